"""The reports of a run: on rank 0 its history, the screen, `metrics.jsonl` and trackers."""

import contextlib
import math
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from shardwise.assembly.build import Job
from shardwise.assembly.routing import STATISTICS
from shardwise.base.batches import AnyBatch
from shardwise.base.interfaces import Evaluation, Mesh
from shardwise.base.records.record import MetricsFile, dumps
from shardwise.base.schedule.resplit import Proposal
from shardwise.base.words import seconds as duration
from shardwise.base.words import size
from shardwise.checkpoint import output_dir
from shardwise.checkpoint.folder import METRICS
from shardwise.checkpoint.history import History, read_history
from shardwise.checkpoint.resume import Start
from shardwise.config import RunConfig, UserError, require
from shardwise.config.preference import PAIR_METRICS
from shardwise.config.ranges import shown
from shardwise.data.state import Counts
from shardwise.metrics.memory import memory_in_use
from shardwise.metrics.meter import Meter
from shardwise.parallel.reduce import from_every_rank
from shardwise.training.early_stop import EarlyStop, early_stop
from shardwise.training.not_finite import explain
from shardwise.training.progress import Progress
from shardwise.training.step import NonFiniteLossError, StepResult
from shardwise.training.trackers import Log, open_trackers

COLUMNS = {
    *("step", "loss", "grad_norm", "lr", "seconds", "tokens_per_second", "tokens"),
    *("samples_per_second", "skipped_steps", "eval_loss", "eval_perplexity", "eval_tokens"),
    *STATISTICS,
    *(f"{prefix}{name}" for prefix in ("", "eval_") for name in PAIR_METRICS),
    *("router_share", "resplit"),
}
"""The names that a run itself writes to `metrics.jsonl`."""
SHARES_EVERY = 100
"""The shares of all experts, which may be 100 KiB, are in the line of each so many steps."""


class Reporter:
    """Keeps the history of a run; shows and writes it on rank 0."""

    def __init__(self, cfg: RunConfig, mesh: Mesh, job: Job, start: Start) -> None:
        self.cfg = cfg
        self.mesh = mesh
        self.start = start
        self._main = dist.get_rank() == 0
        self.history = History()
        """The steps that are done; those before a resume on rank 0 only."""
        if self._main and start.manifest is not None and start.folder is not None:
            sha256 = start.manifest.files[METRICS].sha256
            self.history = read_history(start.folder / METRICS, sha256)
            read_history.cache_clear()  # it is continued
        # A few numbers for each evaluation, from rank 0 to all: each rank may stop early.
        self.history.evaluations = from_every_rank(self.history.evaluations)[0]
        self._loads = job.routing
        self.documents: Mapping[str, Counts] = {}
        self.notes: list[str] = []
        """Notes for a reader of the record."""
        self.saved_step: int | None = None
        self._last_step = start.step
        self._result = ""
        self._told = time.monotonic()
        self._output_dir = Path(cfg.training.output_dir)
        self._num_steps = job.num_steps
        self._progress = Progress(
            job.num_steps,
            cfg.training.epochs,
            show=self._main,
            every_seconds=cfg.measure.print_seconds,
        )
        self._metrics: MetricsFile | None = None
        self._logs: list[Log] = []
        self._stack = contextlib.ExitStack()
        trainable, total = job.parameters["trainable"], job.parameters["total"]
        self._progress.message(
            f"{job.run.spec.family} on {mesh}: {trainable:,} of {total:,} parameters are trained"
        )
        rows, length = cfg.training.global_batch_size, cfg.data.sequence_length
        tokens = "" if job.run.spec.is_own else f" of {length:,} tokens"
        self._progress.message(f"a step reads {rows:,} rows{tokens}")
        for report in (job.run.coverage, job.cut, job.chosen):
            if report:
                self._progress.message(str(report))
        kernels = ", ".join(f"{name} {kernel}" for name, kernel in job.run.kernels.items())
        if kernels:
            self._progress.message(f"kernels: {kernels}")
        for note in job.notes:
            self.note(note)
        for line in start.passed_over:
            self._progress.message(line)
        if start.folder is not None:
            self._progress.message(f"resuming after step {start.step}, from {start.folder}")

    def __enter__(self) -> "Reporter":
        with contextlib.ExitStack() as stack:  # closes what is open where one of these fails
            if self._main:
                if self.start.folder is not None:
                    output_dir.rewind(self.cfg, self.start.folder / METRICS)
                self._metrics = stack.enter_context(MetricsFile(self._output_dir / METRICS))
                names, config = self.cfg.measure.trackers, self.cfg.recorded()
                done = self.start.step
                self._logs = open_trackers(names, self._output_dir, config, stack, done)
            stack.enter_context(self._progress)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)
        if error[0] is None and self._result:
            self._progress.message(self._result)

    def step(self, step: int, result: StepResult, lr: float, meter: Meter) -> None:
        """Report that a step is done, with learning rate `lr`, in the last seconds of `meter`."""
        self._last_step = step
        rate = meter.tokens_per_second()
        self._progress.update(step, result.loss, rate, memory_in_use(self.mesh.device))
        seconds = meter.seconds[-1]
        values = {
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            "lr": lr,
            "seconds": seconds,
            "tokens_per_second": result.tokens / seconds,
            "samples_per_second": self.cfg.training.global_batch_size / seconds,
            **result.routing,
            **result.metrics,
        }
        others = self._router_share(step)
        skipped = self.history.skipped_steps + result.skipped
        self._write(step, values, tokens=result.tokens, skipped_steps=skipped, **others)

    def evaluation(self, evaluation: Evaluation) -> Evaluation:
        """Report an evaluation of the validation set, and return it."""
        metrics, perplexity = evaluation.metrics, evaluation.perplexity
        values = {"eval_loss": evaluation.loss}
        values |= {f"eval_{name}": value for name, value in metrics.items()}
        if perplexity is not None:
            values["eval_perplexity"] = perplexity
            found = f"perplexity {perplexity:.2f}"
        else:
            margin = metrics["rewards/margins"]
            found = f"rewards of good answers ahead by {margin:.3f} on average"
            if math.isnan(margin):
                found = "all answers with the same label,"
            if (share := metrics.get("rewards/accuracies")) is not None:
                found += f", and in {share:.1%} of pairs,"
        self._progress.message(
            f"validation after step {evaluation.step}: loss {evaluation.loss:.4f}, {found} "
            f"over {evaluation.tokens:,} tokens"
        )
        self._write(evaluation.step, values, eval_tokens=evaluation.tokens)
        return evaluation

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write numbers of the caller; UserError for a name that the run itself writes."""
        numbers = {}
        for name, value in values.items():
            require(name not in COLUMNS, f"{name} is written by the run; log it by another name")
            try:
                numbers[name] = float(value)
            except (TypeError, ValueError, ArithmeticError, RuntimeError):  # a tensor of many
                raise UserError(f"{name} is no number, but {shown(value)}; log a number") from None
        self._write(step, numbers)

    def say(self, text: Callable[[], str]) -> None:
        """Print on rank 0 what `text` returns there, which may take a second."""
        if self._main and (line := text()):
            self._progress.message(line)

    def computed(self, number: int) -> None:
        """Print now and then of how many steps the reference has computed the answers."""
        if self._main and time.monotonic() - self._told > self.cfg.measure.print_seconds:
            self._told = time.monotonic()
            self._progress.message(f"{number:,} of them are done")

    def note(self, text: str) -> None:
        """Report what a reader of the figures must know; the record has it too."""
        self.notes.append(text)
        self._progress.message(f"note: {text}")

    def resplit(
        self, step: int, before: Sequence[int], to: Proposal, num_bytes: int, seconds: float
    ) -> None:
        """Report that layers have moved after a step: so many bytes in so many seconds."""
        moved = {
            "step": step,
            "layers_before": [*before],
            "layers": [*to.layers],
            "busy_seconds": [*to.seen.busy_seconds],
            "step_seconds": to.seen.step_seconds,
            "expected_seconds": to.expected_seconds,
            "moved_bytes": num_bytes,
            "seconds": seconds,
        }
        old, new = (" + ".join(map(str, numbers)) for numbers in (before, to.layers))
        worked = ", ".join(map(duration, to.seen.busy_seconds))
        self._progress.message(
            f"after step {step} the split {old} becomes {new}: ranks worked for {worked} of a step "
            f"of {duration(to.seen.step_seconds)}, which should now take "
            f"{duration(to.expected_seconds)}; {size(num_bytes)} moved in {duration(seconds)}"
        )
        self._write(step, {}, resplit=moved)

    def resplit_took(self, seconds: float | None) -> None:
        """Report what a step takes since layers have moved, once it is known."""
        latest = self.history.resplits[-1:]
        if seconds is not None and latest and "measured_seconds" not in latest[0]:
            latest[0]["measured_seconds"] = seconds
            self._progress.message(f"a step of the new split takes {duration(seconds)}")

    def steps_left(self) -> Iterator[int]:
        """Yield the steps that are left, up to the last one or an early stop."""
        for step in range(self.start.step + 1, self._num_steps + 1):
            if self.early_stop is not None:
                return
            yield step

    @property
    def early_stop(self) -> EarlyStop | None:
        """The early stop that is due after the last step, None after all steps."""
        if self._last_step == self._num_steps:
            return None
        evaluations = [Evaluation(**numbers) for numbers in self.history.evaluations]
        return early_stop(evaluations, self.cfg.training.patience, self._last_step)

    def saved(self, step: int) -> None:
        """Report the step whose weights the result has, where it could be another one."""
        self.saved_step = step
        if self.early_stop is not None or step != self._last_step:
            self._progress.message(f"the result has the weights after step {step}")

    def checkpoint(self, folder: Path) -> None:
        """Report a checkpoint that is written."""
        self._progress.log(f"saved {folder}")

    def result(self, folder: Path | None) -> None:
        """Keep the folder of the result, which is rank 0's, for the last line of the run."""
        if folder is None:
            return
        base = self.cfg.model
        self._result = f"wrote {folder}"
        if self.cfg.lora is not None and base.init == "weights" and not base.is_callers:
            words = ["shardwise", "export", base.path, str(folder), f"{folder}-merged", "--merge"]
            self._result += f"; next: {shlex.join(words)}"
        elif self.cfg.lora is None and not base.is_callers:
            self._result += "; transformers and servers read it as it is"

    def end(self, documents: Mapping[str, Counts]) -> None:
        """Report that the steps are done, and what they have read."""
        self._progress.flush()
        if self.early_stop is not None:
            self._progress.message(str(self.early_stop))
        self.documents = documents
        for name, read in documents.items():
            if read.rows == 0:  # a resume that only writes its result
                continue
            self._progress.message(f"data.{name}: {read}")

    def check_folder(self) -> None:
        """Note where the folder is not the one in which the run has written its metrics."""
        if self._metrics is not None and not (self._output_dir / METRICS).exists():
            self.note(
                f"{METRICS} is not in training.output_dir any more; was the folder moved or "
                "replaced while the run was in it?"
            )

    def sample(self, text: str) -> str:
        """Report the continuation of `training.sample`, and return it."""
        self._progress.message(f"sample: {text}")
        return text

    def measuring_memory(self) -> None:
        """Report that the memory is now measured, which takes about as long as a few steps."""
        self._progress.message(
            "measuring memory: one more step, which changes nothing that was saved"
        )

    def non_finite(
        self, step: int, microbatches: Sequence[AnyBatch], error: NonFiniteLossError
    ) -> UserError:
        """Write the rows of a step whose loss is not finite, and return the error to raise.

        Each rank writes a file of its own. This is a collective of all ranks.
        """
        path = self._output_dir / f"non-finite-step-{step}-rank-{dist.get_rank()}.json"
        rows = [row for batch in microbatches for row in batch.rows()]
        content = dumps({"step": step, "error": str(error), "rows": rows})
        path.write_text(f"{content}\n", encoding="utf-8")
        # `explain` waits for every rank, so none ends before all have written.
        explained = explain(error.found, just_loaded=step == self.start.step + 1, trained=step > 1)
        return UserError(f"step {step}: {error}; this rank's rows are in {path}; {explained}")

    def _router_share(self, step: int) -> dict[str, Any]:
        """Return what experts were given, in a step whose line in `metrics.jsonl` says so."""
        if self._loads is None or self._metrics is None:
            return {}
        is_due = step % SHARES_EVERY == 0 or step == self._num_steps
        return {"router_share": self._loads.shares()} if is_due else {}

    def _write(self, step: int, values: Mapping[str, float], **others: Any) -> None:
        """Add a line to the history, and write it; trackers get `values` alone."""
        self.history.add({"step": step, **values, **others})
        if self._metrics is not None:
            self._metrics.write(step=step, **values, **others)
        for log in self._logs:
            log(values, step=step)
