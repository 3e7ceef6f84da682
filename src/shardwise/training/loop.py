"""The training loop: one screen, the same lines for every strategy."""

from contextlib import closing

from shardwise.assembly.build import build
from shardwise.assembly.describe import describe
from shardwise.base.interfaces import Mesh
from shardwise.base.process.watchdog import paused
from shardwise.base.records.record import RunRecord
from shardwise.checkpoint.resume import find_start
from shardwise.config import RunConfig
from shardwise.data.loader import build_loaders
from shardwise.data.tokenizer import load_tokenizer
from shardwise.metrics.meter import Meter
from shardwise.models import folder_config
from shardwise.models.notices import held_notices
from shardwise.parallel.compile import uncompiled
from shardwise.training.epochs import count_steps
from shardwise.training.evaluate import encode_prompt, greedy_sample
from shardwise.training.instruments import Instruments
from shardwise.training.measure import documents_read
from shardwise.training.session import Session


def train(cfg: RunConfig, mesh: Mesh, instruments: Instruments) -> RunRecord | None:
    """Run `cfg` on this rank, whose process group is up; on rank 0 return the record."""
    meter = Meter(cfg.measure.warmup_steps)
    config = folder_config.read_config(cfg.model)  # first: the tokenizer's folder has it too
    with held_notices():
        tokenizer = load_tokenizer(cfg.model, cfg.data.chat_template)
    num_rows = folder_config.check_vocabulary(config, tokenizer)
    with paused():  # reads a whole checkpoint for its checksums, and all files for their index
        start = find_start(cfg)
        slots = mesh.slots(cfg.training.global_batch_size)
        loaders = build_loaders(cfg, tokenizer, slots, start.loader, num_rows)
    steps = count_steps(cfg, loaders, start)
    state = start.state()
    chosen = instruments.choose(cfg, mesh, state.lora, describe)
    job = build(cfg, mesh, state, steps, chosen)
    observer = instruments.observer(cfg, mesh)
    prompt = encode_prompt(cfg, tokenizer, job.run.positions, num_rows)
    training, validation = cfg.training, loaders.validation
    with (
        closing(loaders.train),
        Session(cfg, mesh, job, start, loaders, meter, observer) as session,
    ):
        del job  # the session's alone, which makes another one when layers move
        session.read_reference(loaders)
        if validation is not None and session.done == 0:
            session.evaluate(validation)
        for step in session.steps():
            session.step(next(loaders.train))
            is_due = step == steps or training.is_due(training.eval_every, step, steps)
            if validation is not None and is_due:
                session.evaluate(validation)
        session.reporter.end(documents_read(loaders))
        record = session.finish(tokenizer)
        if prompt is not None:
            with uncompiled(cfg):
                sample = greedy_sample(session.job.pm, tokenizer, prompt, mesh)
            record = session.add(sample=session.reporter.sample(sample))
        if cfg.measure.memory:
            record = session.measure_memory(loaders.first_step())
        return record
