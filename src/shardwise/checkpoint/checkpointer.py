"""Save a run so that it can go on, under this layout or another, and put it back: torch.distributed.checkpoint inside.

What is saved is known by parameter name and is a plain tensor or a DTensor, so that a layout reads what another wrote:
`weights/NAME` (with LoRA the trained ones only) and `optimizer/NAME/STATE`. Each rank writes its shards, and of what
several ranks hold one copy; nothing is gathered. Everything else stands in `checkpoint.json`.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from shardwise.assembly.build import Job
from shardwise.assembly.optimizer import STATES
from shardwise.checkpoint import folder as folders
from shardwise.checkpoint import tensors as checkpoint_tensors
from shardwise.checkpoint.folder import METRICS, UNFINISHED, Manifest, folder_of
from shardwise.checkpoint.index import Index, read_index
from shardwise.checkpoint.resume import Start, fingerprint
from shardwise.config import RunConfig, UserError
from shardwise.data.loader import Loaders
from shardwise.data.state import merge_states
from shardwise.interfaces import Evaluation
from shardwise.parallel.reduce import of_every_rank
from shardwise.process.ending import MAKE_ROOM, RunError, is_full
from shardwise.process.watchdog import beat, paused, watched


class Checkpointer:
    """Saves a run while it goes on; on every rank, since each writes its share."""

    def __init__(self, cfg: RunConfig, job: Job, loaders: Loaders, start: Start) -> None:
        self._cfg, self._job, self._loaders = cfg, job, loaders
        self._output_dir = Path(cfg.training.output_dir)
        self._main = dist.get_rank() == 0
        self._model = (
            fingerprint(cfg) if self._main else {}
        )  # now, while the files are those that were loaded
        # Of its own: a save may go on beside the collectives of training, and has objects to send, not GPU tensors.
        # Its time-out is longer than the watchdog waits, whose end comes with stacks.
        timeout = timedelta(seconds=2 * cfg.training.timeout_seconds)
        self._group = dist.new_group(backend="gloo", timeout=timeout)
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._writing: Future[None] | None = None
        self._saved = start.step
        self._judged_on = (
            loaders.validation.corpus.fingerprint() if loaders.validation is not None else None
        )
        best = start.manifest.best if start.manifest else None
        # One that is gone, or in another folder, cannot be kept: the next is the best again.
        there = best is not None and folder_of(self._output_dir, best["step"]).is_dir()
        self._best: dict[str, Any] | None = best if of_every_rank(there, self._group)[0] else None

    def __enter__(self) -> Checkpointer:
        if self._main:
            folders.take_over(
                self._output_dir, self._saved, self._best["step"] if self._best else None
            )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._thread.shutdown(wait=error is None)

    def after_step(self, step: int, evaluation: Evaluation | None) -> None:
        """Save if it is time to, or if the evaluation after this step is the best so far and that is to be kept."""
        training = self._cfg.training
        if training.keep_best and evaluation is not None and math.isfinite(evaluation.loss):
            judged_on = {"tokens": evaluation.tokens, "documents": self._judged_on}
            # A loss on other text is no rival: with a resume the validation set may have changed.
            rival = (
                self._best
                if self._best is not None and judged_on.items() <= self._best.items()
                else None
            )
            if rival is None or evaluation.loss < rival["loss"]:
                self._best = {"step": step, "loss": evaluation.loss, **judged_on}
        best = self._best is not None and self._best["step"] == step
        due = training.save_every > 0 and (
            step % training.save_every == 0 or step == training.steps
        )
        if due or best:
            self.save(step)

    def save(self, step: int) -> None:
        """Save the run as it is after `step`; with `async_save` while training goes on, from a copy in CPU memory.

        RunError, the same on every rank, if it cannot be written; asynchronous, from the next call of `save` or `wait`.
        """
        self.wait()
        self._saved = step
        # A few numbers for each slot, from every rank to all.
        loader = of_every_rank(self._loaders.state(), self._group)
        manifest = Manifest(
            step=step,
            config=self._cfg.to_dict(),
            loader=merge_states(loader),
            loss_scale=self._job.loss_scale.state_dict(),
            model=self._model,
            best=self._best,
        )
        portable = portable_tensors(self._job, self._cfg)
        metrics = b""

        @paused()
        def read_metrics() -> None:
            nonlocal metrics
            metrics = (self._output_dir / METRICS).read_bytes()

        self._on_main(read_metrics, folder_of(self._output_dir, step))
        if self._cfg.training.async_save:
            copies = {key: tensor.to("cpu", copy=True) for key, tensor in portable}
            self._writing = self._thread.submit(watched()(self._write), manifest, copies, metrics)
        else:
            self._write(manifest, dict(portable), metrics)

    def stop(self, step: int) -> Path:
        """The checkpoint after `step`, written to its end: saved now, if it has not been."""
        folder = folder_of(self._output_dir, step)
        if self._saved != step:
            self.save(step)
        self.wait()
        return folder

    def wait(self) -> None:
        """Wait until nothing is being written; raise what went wrong in writing."""
        writing, self._writing = self._writing, None
        if writing is not None:
            with paused():  # the thread that writes is watched itself
                writing.result()

    def _write(self, manifest: Manifest, tensors: dict[str, torch.Tensor], metrics: bytes) -> None:
        folder = folder_of(self._output_dir, manifest.step)
        unfinished = folder.with_name(folder.name + UNFINISHED)

        @paused()
        def begin() -> None:
            unfinished.mkdir(parents=True)

        @paused()
        def write_metrics() -> None:
            folders.write_synced(unfinished / METRICS, metrics)

        @paused()
        def check() -> dict[str, dict[str, Any]]:
            names = sorted(path.name for path in unfinished.iterdir())
            return folders.checksums(unfinished, names[dist.get_rank() :: dist.get_world_size()])

        @paused()
        def finish() -> None:
            folders.write_manifest(unfinished, replace(manifest, files=files))
            folders.publish(unfinished, folder)
            if manifest.best is not None and manifest.best["step"] == manifest.step:
                folders.mark_best(folder)
            folders.prune(self._output_dir, manifest.step, self._cfg.training.keep_last)

        try:
            self._on_main(begin, folder)
            self._together(
                lambda: checkpoint_tensors.save(tensors, unfinished, self._group), folder
            )
            self._on_main(write_metrics, folder)
            files = {
                name: known
                for part in self._together(check, folder)
                for name, known in part.items()
            }
            self._on_main(finish, folder)
        except RunError:
            if self._main:
                shutil.rmtree(unfinished, ignore_errors=True)
            raise

    def _on_main(self, work: Callable[[], object], folder: Path) -> None:
        self._together(work if self._main else lambda: None, folder)

    def _together(self, work: Callable[[], Any], folder: Path) -> list[Any]:
        """What `work` gives on every rank, in rank order; RunError on every rank if it failed on one.

        A rank that is done waits for the others no longer than for a step: its time runs while it waits, and only files
        of its own stop it.
        """
        result, reason = None, None
        try:
            result = work()
        except (Exception, CheckpointException) as error:  # the latter is no Exception
            reason = _reason(error)
        results = of_every_rank((result, reason), self._group)
        beat()
        if reasons := [reason for _, reason in results if reason is not None]:
            raise RunError(f"checkpoint {folder.name} could not be written: {min(reasons)[1]}")
        return [result for result, _ in results]


def restore(start: Start, job: Job, cfg: RunConfig) -> None:
    """Put the tensors and the loss scale of a checkpoint into a job that was built after its step, under any layout.

    UserError, the same on every rank, if they do not fit, before any is overwritten. RunError if a file that was whole
    when the run began cannot be read any more: then some are, and the job is of no use.
    """
    if start.folder is None or start.manifest is None:
        return
    index = read_index(start.folder)
    problem = _make_optimizer_states(job, index, cfg)
    tensors = {} if problem else dict(portable_tensors(job, cfg))
    for key, tensor in tensors.items():
        problem = problem or _difference(key, tensor, index)
    # A line, where there is one, from every rank to all.
    if problems := [problem for problem in of_every_rank(problem) if problem is not None]:
        job.optimizer.state.clear()
        raise UserError(
            f"checkpoint {start.folder} does not fit this run: {problems[0]}; take one of a run of the same model and "
            "lora, or start from scratch without training.resume"
        )
    try:
        # Each rank reads its shards, from whatever files they lie in. In place, where a tensor is portable as it is.
        with paused():
            checkpoint_tensors.load(tensors, start.folder, index)
    except CheckpointException as error:
        raise RunError(
            f"checkpoint {start.folder} could not be read: {_failures(error)[0]}"
        ) from None
    for key, name, held in _held(job, cfg):
        if _is_translated(key, held):
            job.pm.from_portable(name, held, tensors[key])
    job.loss_scale.load_state_dict(start.manifest.loss_scale)


def portable_tensors(job: Job, cfg: RunConfig) -> Iterator[tuple[str, torch.Tensor]]:
    """What is saved of a job, by key: plain tensors and DTensors that share the job's memory where they can."""
    for key, name, held in _held(job, cfg):
        yield key, job.pm.to_portable(name, held) if _is_translated(key, held) else held.detach()


def _held(job: Job, cfg: RunConfig) -> Iterator[tuple[str, str, torch.Tensor]]:
    """(key, parameter's name, what this rank holds), in an order that is equal on every rank."""
    full = cfg.lora is None
    for name, parameter in job.pm.named_parameters():
        if full or parameter.requires_grad:
            yield f"weights/{name}", name, parameter
    for part in job.pm.parts if full else ():
        persistent = part.hf.state_dict(keep_vars=True)
        yield from (
            (f"buffers/{name}", name, b)
            for name, b in part.hf.named_buffers()
            if name in persistent
        )
    for name, parameter in _optimized(job.optimizer):
        for state, tensor in job.optimizer.state[parameter].items():
            yield f"optimizer/{name}/{state}", name, tensor


def _is_translated(key: str, held: torch.Tensor) -> bool:
    # Buffers are whole everywhere, and so is a number such as AdamW's count of steps.
    return held.dim() > 0 and not key.startswith("buffers/")


def _optimized(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
    for group in optimizer.param_groups:
        yield from zip(group["param_names"], group["params"], strict=True)


def _make_optimizer_states(job: Job, index: Index, cfg: RunConfig) -> str | None:
    """Give an optimizer that has not made a step the states that were saved, all zero; say what is wrong with them."""
    parameters, saved = dict(_optimized(job.optimizer)), dict[str, set[str]]()
    for key in index.tensors:
        kind, _, name = key.partition("/")
        if kind == "optimizer":
            name, _, state = name.rpartition("/")
            saved.setdefault(name, set()).add(state)
    for name, states in saved.items():
        if name not in job.trained:
            return f"{name} was trained, and is not here"
        if states != STATES[cfg.optimizer.name]:
            return f"{cfg.optimizer.name} does not keep {', '.join(sorted(states))} of {name}"
    for name in saved.keys() & parameters.keys():  # others are another stage's
        for state in saved[name]:
            entry, parameter = index.tensors[f"optimizer/{name}/{state}"], parameters[name]
            count = torch.zeros((), dtype=torch.float32)
            job.optimizer.state[parameter][state] = (
                torch.zeros_like(parameter) if entry.shape else count
            )
    return None


def _difference(key: str, tensor: torch.Tensor, index: Index) -> str | None:
    entry = index.tensors.get(key)
    if entry is None:
        return f"it does not hold {key}"
    shape, dtype = tuple(entry.shape), checkpoint_tensors.DTYPES[entry.dtype]
    if (shape, dtype) != (tensor.shape, tensor.dtype):
        return f"its {key} is {dtype} of {list(shape)}, and here it is {tensor.dtype} of {list(tensor.shape)}"
    return None


def _failures(error: BaseException) -> list[BaseException]:
    return (
        [failure for failure, _ in error.failures.values()]
        if isinstance(error, CheckpointException)
        else [error]
    )


def _reason(error: BaseException) -> tuple[int, str]:
    """Why a checkpoint could not be written, and the way out; the system's reasons (0) come before others (1)."""
    failures = _failures(error)
    for failure in failures:
        if isinstance(failure, OSError):
            name = f": {failure.filename}" if failure.filename and not is_full(failure) else ""
            way_out = (
                MAKE_ROOM if is_full(failure) else "mend that, then go on with --resume latest-good"
            )
            return 0, f"{failure.strerror or failure}{name}; {way_out}"
    return 1, str(failures[0])
