"""The training loop: one screen, the same lines for every strategy."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from shardwise.assembly.build import build
from shardwise.checkpoint.checkpointer import Checkpointer
from shardwise.checkpoint.export import save_result
from shardwise.checkpoint.output_dir import writing
from shardwise.checkpoint.resume import find_start
from shardwise.config import RunConfig
from shardwise.data.loader import build_loaders
from shardwise.data.tokenizer import load_tokenizer
from shardwise.interfaces import Evaluation, Mesh
from shardwise.metrics.meter import Meter
from shardwise.models import load
from shardwise.parallel.compile import uncompiled
from shardwise.planner.timeline import Recorder, record_timeline
from shardwise.process.ending import Stopped
from shardwise.process.stop import agreed_signal, on_signals
from shardwise.process.watchdog import beat, paused
from shardwise.records.record import RunRecord
from shardwise.training.epochs import count_steps
from shardwise.training.evaluate import encode_prompt, evaluate, greedy_sample
from shardwise.training.measure import add_to_record, documents_read, measure_memory, write_record
from shardwise.training.reporter import Reporter
from shardwise.training.step import NonFiniteLossError, training_step

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def train(cfg: RunConfig, mesh: Mesh) -> RunRecord | None:
    """Run `cfg` on this rank, whose process group is up; on rank 0 return the record."""
    tokenizer = _tokenizer(cfg)
    slots = mesh.slots(cfg.training.global_batch_size)
    with paused():  # reads a whole checkpoint for its checksums, and all files for their index
        start = find_start(cfg)
        loaders = build_loaders(cfg, tokenizer, slots, start.loader)
    steps, eval_every = count_steps(cfg, loaders, start), cfg.training.eval_every
    job = build(cfg, mesh, start.state(), steps)
    prompt = encode_prompt(cfg, tokenizer, job.positions)
    meter, recorder = Meter(cfg.measure.warmup_steps), Recorder(cfg.measure.warmup_steps)
    signals: list[int] = []
    with (
        writing(cfg),
        closing(loaders.train),
        Reporter(cfg, mesh, job, start) as reporter,
        Checkpointer(cfg, job, loaders, start) as checkpointer,
        on_signals(signals.append),
    ):

        def run_evaluation(step: int) -> Evaluation | None:
            if loaders.validation is None:
                return None
            return reporter.evaluation(evaluate(job.pm, loaders.validation, mesh, step))

        if start.step == 0:
            run_evaluation(0)
        for step in reporter.steps_left():
            meter.start()  # the wait for data counts
            microbatches = [batch.to(mesh.device) for batch in next(loaders.train)]
            if cfg.measure.reverse_microbatches:
                microbatches.reverse()
            lr = job.optimizer.param_groups[0]["lr"]
            try:
                result = training_step(job, microbatches, mesh, cfg.optimizer.max_grad_norm)
            except NonFiniteLossError as error:
                raise reporter.non_finite(step, microbatches, error) from None
            meter.stop(result.tokens)
            recorder.step(job.pm.events())
            reporter.step(step, result, lr, meter)
            is_evaluated = step == steps or (eval_every and step % eval_every == 0)
            checkpointer.after_step(step, run_evaluation(step) if is_evaluated else None)
            beat()
            if step < steps and (signal := agreed_signal(signals, mesh)):
                raise Stopped(signal, step, checkpointer.stop(step))
        checkpointer.finish()
        reporter.end(documents_read(loaders))
        # The result and the record come before what may fail.
        save_result(job, cfg, mesh, Path(cfg.training.output_dir), tokenizer)
        record = write_record(cfg, mesh, job, reporter, meter)
        record = add_to_record(cfg, record, **record_timeline(cfg, mesh, job, recorder))
        if prompt is not None:
            with uncompiled(cfg):
                sample = reporter.sample(greedy_sample(job.pm, tokenizer, prompt, mesh))
            record = add_to_record(cfg, record, sample=sample)
        if cfg.measure.memory:
            reporter.measuring_memory()
            memory = measure_memory(job, loaders.first_step(), mesh, cfg)
            record = add_to_record(cfg, record, **memory.fields())
        return record


def _tokenizer(cfg: RunConfig) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a run; UserError where the model's vocabulary is smaller than its."""
    tokenizer = load_tokenizer(cfg.model, cfg.data.chat_template)
    load.check_vocabulary(load.read_config(cfg.model), tokenizer.get_vocab())
    return tokenizer
