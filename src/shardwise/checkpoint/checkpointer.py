"""Save a run so that it can resume, under this layout or another.

What is saved is `assembly.state.portable_tensors`: with LoRA the trained weights only. Each rank
writes its shards, and of what several ranks hold one copy; nothing is gathered. Everything else
stands in `checkpoint.json`.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from shardwise.assembly.build import Job
from shardwise.assembly.state import portable_tensors
from shardwise.checkpoint import folder as folders
from shardwise.checkpoint import tensors as checkpoint_tensors
from shardwise.checkpoint.folder import METRICS, UNFINISHED, Best, File, Manifest, folder_of
from shardwise.checkpoint.resume import Start, fingerprint
from shardwise.checkpoint.tensors import Tensors
from shardwise.config import RunConfig
from shardwise.data.loader import Loaders
from shardwise.data.state import merge_states
from shardwise.interfaces import Evaluation
from shardwise.models.adapter_start import of_folder
from shardwise.parallel.reduce import of_every_rank
from shardwise.process.ending import MAKE_ROOM, RunError, is_full
from shardwise.process.watchdog import beat, paused, watched


class _Portable(NamedTuple):
    """The tensors that a checkpoint saves of a run, made again each time."""

    job: Job
    trained_only: bool

    def items(self) -> Iterable[tuple[str, torch.Tensor]]:
        """See checkpoint.tensors.Tensors."""
        return portable_tensors(self.job.pm, self.job.optimizer, self.trained_only)


class Checkpointer:
    """Saves a run while it trains; on every rank, since each writes its share."""

    def __init__(
        self,
        cfg: RunConfig,
        job: Job,
        loaders: Loaders,
        start: Start,
        check: Callable[[int], object] = lambda step: None,
    ) -> None:
        """Take what is saved; `check` is called with the step before each save, on every rank."""
        self._cfg, self._job, self._loaders, self._check = cfg, job, loaders, check
        self._output_dir = Path(cfg.training.output_dir)
        self._main = dist.get_rank() == 0
        # Taken now, while the files are those that were loaded.
        self._model = fingerprint(cfg) if self._main else {}
        # A group of its own: a save may run beside the collectives of training, and sends objects,
        # not GPU tensors. Its time-out is longer than the watchdog's, which writes stacks.
        timeout = timedelta(seconds=2 * cfg.training.timeout_seconds)
        self._group = dist.new_group(backend="gloo", timeout=timeout)
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._writing: Future[None] | None = None
        self._step = self._saved = self._start_step = start.step
        validation = loaders.validation
        self._validation_text = validation.corpus.fingerprint() if validation else None
        best = start.manifest.best if start.manifest else None
        # A best checkpoint that is gone, or in another folder, cannot be kept.
        exists = best is not None and folder_of(self._output_dir, best.step).is_dir()
        self._best: Best | None = best if of_every_rank(exists, self._group)[0] else None

    def __enter__(self) -> Checkpointer:
        if self._main:
            best_step = self._best.step if self._best else None
            folders.take_over(self._output_dir, self._saved, best_step)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._thread.shutdown(wait=error is None)

    def after_step(
        self, step: int, evaluation: Evaluation | None, is_asked_for: bool = False
    ) -> None:
        """Save every `training.save_every` steps, and with `keep_best` after a best evaluation.

        A step is saved once.
        """
        self._step = step
        training = self._cfg.training
        if training.keep_best and evaluation is not None and math.isfinite(evaluation.loss):
            new = Best(step, evaluation.loss, evaluation.tokens, self._validation_text)
            best = self._best
            # Losses on different text are not compared: a resume may change the validation set.
            if (
                best is None
                or (best.tokens, best.documents) != (new.tokens, new.documents)
                or new.loss < best.loss
            ):
                self._best = new
        is_best = self._best is not None and self._best.step == step
        is_due = training.save_every > 0 and step % training.save_every == 0
        if (is_due or is_best or is_asked_for) and self._saved != step:
            self.save(step)

    def finish(self) -> None:
        """Save the run after its last step, if it saves at all; wait until that is written."""
        if self._cfg.training.save_every > 0:
            self.stop(self._step)
        self.wait()

    def save(self, step: int) -> None:
        """Save the run as it is after `step`.

        With `async_save` a thread writes a copy in CPU memory while training continues.
        RunError, the same on every rank, if the checkpoint cannot be written; with `async_save` the
        next call of `save` or `wait` raises it.
        """
        self.wait()
        self._check(step)
        self._saved = step
        # A few numbers for each slot, from every rank to all.
        loader = of_every_rank(self._loaders.state(), self._group)
        job, lora = self._job, self._cfg.lora
        manifest = Manifest(
            step=step,
            num_steps=job.num_steps,
            config=self._cfg.to_dict(),
            loader=folders.Loader(**merge_states(loader)),
            loss_scale=folders.Scale(**job.loss_scale.state_dict()),
            model=self._model,
            best=self._best,
            files={},
            format=folders.FORMAT,
            lora=None if lora is None or lora.path is None else of_folder(job.lora),
        )
        tensors = _Portable(job, lora is not None)
        metrics = b""

        @paused()
        def read_metrics() -> None:
            nonlocal metrics
            metrics = (self._output_dir / METRICS).read_bytes()

        self._on_main(read_metrics, folder_of(self._output_dir, step))
        if self._cfg.training.async_save:
            copies = {key: tensor.to("cpu", copy=True) for key, tensor in tensors.items()}
            self._writing = self._thread.submit(watched()(self._write), manifest, copies, metrics)
        else:
            # What lies on disk is read one by one, twice; to gather shards twice would cost more.
            is_on_disk = self._cfg.parallel.offload == "disk"
            self._write(manifest, tensors if is_on_disk else dict(tensors.items()), metrics)

    def has(self, step: int) -> bool:
        """Return whether the run as it is after `step` was saved by this process."""
        return self._saved == step and step > self._start_step

    def stop(self, step: int) -> Path:
        """Return the checkpoint after `step` once it is written; it is saved now if it was not."""
        folder = folder_of(self._output_dir, step)
        if self._saved != step:
            self.save(step)
        self.wait()
        return folder

    def wait(self) -> None:
        """Wait until nothing is being written; raise the error of a write that failed."""
        writing, self._writing = self._writing, None
        if writing is not None:
            with paused():  # the thread that writes is watched itself
                writing.result()

    def _write(self, manifest: Manifest, tensors: Tensors, metrics: bytes) -> None:
        rank, folder = dist.get_rank(), folder_of(self._output_dir, manifest.step)
        unfinished = folder.with_name(folder.name + UNFINISHED)

        files: dict[str, File] = {}

        @paused()
        def begin() -> None:
            unfinished.mkdir(parents=True)
            folders.write_synced(unfinished / METRICS, metrics)

        @paused()
        def check() -> dict[str, File]:
            names = sorted(path.name for path in unfinished.iterdir())
            return folders.checksums(unfinished, names[rank :: dist.get_world_size()])

        @paused()
        def finish() -> None:
            folders.write_manifest(unfinished, replace(manifest, files=files))
            folders.publish(unfinished, folder)
            if manifest.best is not None and manifest.best.step == manifest.step:
                folders.mark_best(folder)
            folders.prune(self._output_dir, manifest.step, self._cfg.training.keep_last)

        try:
            self._on_main(begin, folder)
            # What each rank holds, some 100 bytes per shard, goes from every rank to all.
            ranks = self._together(lambda: checkpoint_tensors.held(tensors, rank), folder)
            write = partial(checkpoint_tensors.write, tensors, unfinished, ranks, rank)
            self._together(write, folder)
            for checksums in self._together(check, folder):
                files |= checksums
            self._on_main(finish, folder)
        except RunError:
            if self._main:
                shutil.rmtree(unfinished, ignore_errors=True)
            raise

    def _on_main(self, work: Callable[[], object], folder: Path) -> None:
        self._together(work if self._main else lambda: None, folder)

    def _together(self, work: Callable[[], Any], folder: Path) -> list[Any]:
        """Return what `work` returns on every rank; RunError on every rank if it failed on one.

        The watchdog times how long a rank waits here for others; it pauses only while the rank
        itself reads or writes files.
        """
        result, reason = None, None
        try:
            result = work()
        except Exception as error:
            reason = _reason(error)
        results = of_every_rank((result, reason), self._group)
        beat()
        if reasons := [reason for _, reason in results if reason is not None]:
            raise RunError(f"checkpoint {folder.name} could not be written: {min(reasons)[1]}")
        return [result for result, _ in results]


def _reason(error: Exception) -> tuple[int, str]:
    """Return why a checkpoint could not be written, with a way out, behind a rank among reasons.

    Reasons of the operating system (0) come before others (1), which often follow from them.
    """
    if not isinstance(error, OSError):
        return 1, str(error) or type(error).__name__
    reason = str(error.strerror or error)
    if is_full(error):
        return 0, f"{reason}; {MAKE_ROOM}"
    file = f": {error.filename}" if error.filename else ""
    return 0, f"{reason}{file}; mend that, then resume with --resume latest-good"
