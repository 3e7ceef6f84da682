"""What a run tells while it goes on: the screen, `metrics.jsonl` and the trackers, all on rank 0; and its history."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

import torch.distributed as dist

from shardwise.assembly.build import Job
from shardwise.checkpoint import output_dir
from shardwise.checkpoint.folder import METRICS
from shardwise.checkpoint.resume import Start
from shardwise.config import RunConfig, UserError
from shardwise.data.state import Counts
from shardwise.interfaces import Batch, Evaluation, Mesh
from shardwise.metrics.memory import memory_in_use
from shardwise.metrics.meter import Meter
from shardwise.records.record import MetricsFile, dumps
from shardwise.training.loggers import Logger, open_loggers
from shardwise.training.not_finite import explain
from shardwise.training.progress import Progress
from shardwise.training.step import NonFiniteLossError, StepResult


class Reporter:
    """Collects what happens on every rank; shows and writes it on rank 0."""

    def __init__(self, cfg: RunConfig, mesh: Mesh, job: Job, start: Start) -> None:
        self.cfg = cfg
        self.mesh = mesh
        self.start = start
        self.losses: list[float] = []
        self.grad_norms: list[float] = []
        self.skipped_steps = 0
        self.evaluations: list[Evaluation] = []
        self.documents: Mapping[str, Counts] = {}
        if start.folder is not None:
            self._recall(start.folder / METRICS)
        self._main = dist.get_rank() == 0
        self._output_dir = Path(cfg.training.output_dir)
        self._progress = Progress(cfg.training.steps, show=self._main)
        self._metrics: MetricsFile | None = None
        self._loggers: list[Logger] = []
        self._stack = contextlib.ExitStack()
        trainable, total = job.parameters["trainable"], job.parameters["total"]
        self._progress.message(
            f"{job.spec.family} on {mesh}: {trainable:,} of {total:,} parameters are trained"
            f"\na step reads {cfg.training.global_batch_size:,} rows of {cfg.data.sequence_length:,} tokens"
            + (f"\n{job.coverage}" if job.coverage else "")
            + (f"\n{job.cut}" if job.cut else "")
            + f"\nkernels: {', '.join(f'{name} {kernel}' for name, kernel in job.kernels.items())}"
        )
        for note in job.notes:
            self._progress.message(f"note: {note}")
        for line in start.passed_over:
            self._progress.message(line)
        if start.folder is not None:
            self._progress.message(f"going on after step {start.step}, from {start.folder}")

    def __enter__(self) -> Reporter:
        if self._main:
            if self.start.folder is not None:
                output_dir.rewind(self.cfg, self.start.folder / METRICS)
            self._metrics = self._stack.enter_context(
                MetricsFile(self._output_dir / "metrics.jsonl")
            )
            self._loggers = open_loggers(
                self.cfg.measure.trackers, self._output_dir, self.cfg.to_dict()
            )
            for logger in self._loggers:
                self._stack.callback(logger.close)
        self._stack.enter_context(self._progress)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    def step(self, step: int, result: StepResult, lr: float, meter: Meter) -> None:
        """A step is done: its loss and norm, at this learning rate, in the meter's last seconds."""
        self.losses.append(result.loss)
        self.grad_norms.append(result.grad_norm)
        rate = meter.tokens_per_second()
        self._progress.update(step, result.loss, rate, memory_in_use(self.mesh.device))
        self.skipped_steps += result.skipped
        values = {
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            "lr": lr,
            "seconds": meter.seconds[-1],
        }
        self._write(
            step,
            {**values, "tokens_per_second": result.tokens / meter.seconds[-1]},
            tokens=result.tokens,
            skipped_steps=self.skipped_steps,
        )

    def evaluation(self, evaluation: Evaluation) -> Evaluation:
        """The validation set was evaluated; returns what it was given."""
        self.evaluations.append(evaluation)
        self._progress.message(
            f"validation after step {evaluation.step}: loss {evaluation.loss:.4f}, "
            f"perplexity {evaluation.perplexity:.2f} over {evaluation.tokens:,} tokens"
        )
        values = {"eval_loss": evaluation.loss, "eval_perplexity": evaluation.perplexity}
        self._write(evaluation.step, values, eval_tokens=evaluation.tokens)
        return evaluation

    def data(self, documents: Mapping[str, Counts]) -> None:
        """The last step is done, and this was read for it all."""
        self.documents = documents
        for name, read in documents.items():
            self._progress.message(f"data.{name}: {read}")

    def sample(self, text: str) -> str:
        """The model has continued `training.sample`; returns what it was given."""
        self._progress.message(f"sample: {text}")
        return text

    def measuring_memory(self) -> None:
        """What follows the last step is no part of the training, and takes about as long as a few steps."""
        self._progress.message(
            "measuring memory: one more step, which changes nothing that was saved"
        )

    def non_finite(
        self, step: int, microbatches: Sequence[Batch], error: NonFiniteLossError
    ) -> UserError:
        """Leave the rows of the step in a file per rank, and say where; to be raised."""
        path = self._output_dir / f"non-finite-step-{step}-rank-{dist.get_rank()}.json"
        rows = [
            {
                "slot": slot,
                "input_ids": batch.input_ids[i].tolist(),
                "labels": batch.labels[i].tolist(),
            }
            for batch in microbatches
            for i, slot in enumerate(batch.slots)
        ]
        path.write_text(
            dumps({"step": step, "error": str(error), "rows": rows}) + "\n", encoding="utf-8"
        )
        # Every rank is here, and none ends before all have written.
        explained = explain(error.found, just_loaded=step == self.start.step + 1, trained=step > 1)
        return UserError(f"step {step}: {error}; this rank's rows are in {path}; {explained}")

    def _recall(self, metrics: Path) -> None:
        """Take up the history that a checkpoint keeps."""
        for line in metrics.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            if "loss" in row:
                self.losses.append(float(row["loss"]))  # "nan" and "inf" are strings there
                self.grad_norms.append(float(row["grad_norm"]))
                self.skipped_steps = row["skipped_steps"]
            if "eval_loss" in row:
                loss, perplexity = float(row["eval_loss"]), float(row["eval_perplexity"])
                self.evaluations.append(
                    Evaluation(row["step"], loss, perplexity, row["eval_tokens"])
                )

    def _write(self, step: int, values: dict[str, float], **counts: int) -> None:
        if self._metrics is not None:
            self._metrics.write(step=step, **values, **counts)
        for logger in self._loggers:
            logger.log(step, values)
