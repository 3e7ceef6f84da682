"""Save a run so that it can resume, under this layout or another.

What is saved is `assembly.state.portable_tensors`: with LoRA the trained weights only. Each rank
writes its shards, and of what several ranks hold one copy; nothing is gathered. Everything else
stands in `checkpoint.json`.
"""

import math
import shutil
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from shardwise.assembly.build import Job
from shardwise.assembly.state import load_weights, portable_tensors
from shardwise.base.interfaces import Evaluation
from shardwise.base.process.ending import RunError, Stopped
from shardwise.base.process.watchdog import paused, watched
from shardwise.checkpoint import folder as folders
from shardwise.checkpoint import memory_folder
from shardwise.checkpoint import tensors as checkpoint_tensors
from shardwise.checkpoint.folder import Best, File, Manifest, folder_of
from shardwise.checkpoint.memory import MemoryCheckpoints
from shardwise.checkpoint.output_dir import reference_sum
from shardwise.checkpoint.resume import Start, fingerprint
from shardwise.checkpoint.saved_state import SavedState
from shardwise.checkpoint.tensors import Tensors
from shardwise.checkpoint.together import together
from shardwise.config import RunConfig
from shardwise.data.loader import Loaders
from shardwise.data.state import merge_states
from shardwise.models.adapters.peft_config import keys_of_folder
from shardwise.parallel.reduce import from_every_rank


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
        saved: Callable[[Path], object] = lambda folder: None,
    ) -> None:
        """Take what is saved; `check` is called with the step before each save, on every rank.

        `saved` is called on rank 0 with each folder that is written.
        """
        self._cfg, self._loaders, self._check, self._report = cfg, loaders, check, saved
        self.job = job
        """The job to save; another one after layers have moved."""
        self._output_dir = Path(cfg.training.output_dir)
        self._main = dist.get_rank() == 0
        # Taken now, while the files are those that were loaded.
        self._model = fingerprint(cfg) if self._main else {}
        # A group of its own: a save may run beside the collectives of training, and sends objects,
        # not GPU tensors. Its time-out is longer than the watchdog's, which writes stacks.
        timeout = timedelta(seconds=2 * cfg.launch.timeout_seconds)
        self._group = dist.new_group(backend="gloo", timeout=timeout)
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._writing: Future[None] | None = None
        self._step = self._start_step = start.step
        # What lies in memory alone is not saved yet.
        self._saved = -1 if start.in_memory else start.step
        every = cfg.training.memory_checkpoint_every
        self._memory = MemoryCheckpoints(cfg) if every else None
        self._memory_folder = memory_folder.find(self._output_dir)
        self._starts_in_memory = start.in_memory
        validation = loaders.validation
        self._validation_text = validation.corpus.fingerprint() if validation else None
        best = start.manifest.best if start.manifest else None
        self._best_folder = Path() if best is None else folder_of(self._output_dir, best.step)
        if start.folder is not None and not self._best_folder.is_dir():  # a resume elsewhere
            self._best_folder = start.folder.with_name(self._best_folder.name)
        exists = best is not None and self._best_folder.is_dir()
        self._best: Best | None = best if from_every_rank(exists, self._group)[0] else None

    def __enter__(self) -> "Checkpointer":
        if not self._starts_in_memory:
            self._forget()  # it is of steps that will be done again
        if self._main:
            best_step = self._best.step if self._best else None
            folders.take_over(self._output_dir, self._start_step, best_step)
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._thread.shutdown(wait=error is None)
        if error is None or isinstance(error, Stopped):
            self._forget()  # all is on disk
        if error is None and self._main:
            (self._output_dir / folders.MEMORY_NAME).unlink(missing_ok=True)

    def _forget(self) -> None:
        if self._memory_folder is not None:
            shutil.rmtree(self._memory_folder, ignore_errors=True)

    def after_step(
        self, step: int, evaluation: Evaluation | None, is_asked_for: bool = False
    ) -> None:
        """Save every `training.save_every` steps, and with `keep_best` after a best evaluation.

        A step is saved once.
        """
        self._step = step
        training = self._cfg.training
        if evaluation is not None and evaluation.step != step:
            evaluation = None  # of other weights: the step came after it
        if training.keep_best and evaluation is not None and math.isfinite(evaluation.loss):
            new = Best(step, evaluation.loss, evaluation.tokens, self._validation_text)
            # Losses on different text are not compared: a resume may change the validation set.
            best = self._best
            is_other = best is None or (best.tokens, best.documents) != (new.tokens, new.documents)
            if best is None or is_other or new.loss < best.loss:
                self._best, self._best_folder = new, folder_of(self._output_dir, step)
        is_best = self._best is not None and self._best.step == step
        is_due = training.is_due(training.save_every, step, self.job.num_steps)
        if (is_due or is_best or is_asked_for) and self._saved != step:
            self.save(step)
        every = training.memory_checkpoint_every
        if self._memory is not None and step % every == 0:
            self._check(step)
            # Its own group: a thread may be writing by the other one.
            manifest = self._manifest(step, self._memory.group)
            self._memory.save(manifest, self._tensors())

    def finish(self) -> None:
        """Save the run after its last step, if it saves at all; wait until that is written."""
        if self._cfg.training.save_every != 0:
            self.stop(self._step)
        self.wait()

    def load_best(self, note: Callable[[str], object]) -> int:
        """Load the weights of the best evaluation, with `keep_best`; return its step.

        It follows `finish`: a resume continues from the last step.
        """
        folder, best = self._best_folder, self._best
        if not self._cfg.training.keep_best or best is None or best.step == self._step:
            return self._step
        with paused():
            damage = folders.damage(folder, dist.get_rank(), dist.get_world_size())
        if any(from_every_rank(damage, self._group)):
            note(f"the best checkpoint, {folder}, is damaged: the result is of the last step")
            return self._step
        load_weights(self.job.pm, SavedState(folder, folders.read_manifest(folder)))
        return best.step

    def save(self, step: int) -> None:
        """Save the run as it is after `step`.

        With `async_save` a thread writes a copy in CPU memory while training continues.
        RunError, the same on every rank, if the checkpoint cannot be written; with `async_save` the
        next call of `save` or `wait` raises it.
        """
        self.wait()
        self._check(step)
        self._saved = step
        manifest, metrics = self._manifest(step, self._group), b""

        @paused()
        def read_metrics() -> None:
            nonlocal metrics
            metrics = (self._output_dir / folders.METRICS).read_bytes()

        self._on_main(read_metrics, folder_of(self._output_dir, step))
        if self._cfg.training.async_save:
            tensors = _Portable(self.job, self._cfg.lora is not None)
            copies = {key: tensor.to("cpu", copy=True) for key, tensor in tensors.items()}
            self._writing = self._thread.submit(watched()(self._write), manifest, copies, metrics)
        else:
            self._write(manifest, self._tensors(), metrics)

    def _manifest(self, step: int, group: dist.ProcessGroup) -> Manifest:
        """Return what a checkpoint after `step` holds beside tensors; its files are not known."""
        # A few numbers for each slot, from every rank to all.
        loader = from_every_rank(self._loaders.state(), group)
        job, lora = self.job, self._cfg.lora
        return Manifest(
            step=step,
            num_steps=job.num_steps,
            config=self._cfg.recorded(),
            loader=folders.Loader(**merge_states(loader)),
            loss_scale=folders.StoredScale(**job.loss_scale.state_dict()),
            model=self._model,
            best=self._best,
            files={},
            format=folders.FORMAT,
            lora=None if lora is None or lora.path is None else keys_of_folder(job.run.lora),
        )

    def _tensors(self) -> Tensors:
        tensors = _Portable(self.job, self._cfg.lora is not None)
        # What lies on disk is read one by one, twice; to gather shards twice would cost more.
        return tensors if self._cfg.parallel.offload == "disk" else dict(tensors.items())

    def has(self, step: int) -> bool:
        """Return whether the run as it is after `step` was saved by this process."""
        return self._saved == step and step > self._start_step

    def read_beside(self, file: Path) -> None:
        """Let checkpoints name the reference's file by its checksum, which a resume compares."""
        self._model |= reference_sum(file) if self._main else {}

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
        unfinished = folder.with_name(folder.name + folders.UNFINISHED)

        names: list[str] = []
        files: dict[str, File] = {}

        @paused()
        def begin() -> None:
            unfinished.mkdir(parents=True)
            folders.write_synced(unfinished / folders.METRICS, metrics)

        @paused()
        def check() -> dict[str, File]:
            return folders.checksums(unfinished, names[rank :: dist.get_world_size()])

        @paused()
        def finish() -> None:
            folders.write_manifest(unfinished, replace(manifest, files=files))
            folders.publish(unfinished, folder)
            if manifest.best is not None and manifest.best.step == manifest.step:
                folders.mark_best(folder)
            folders.prune(self._output_dir, manifest.step, self._cfg.training.keep_last)
            self._report(folder)

        try:
            self._on_main(begin, folder)
            # What each rank holds, some 100 bytes per shard, goes from every rank to all.
            ranks = self._together(lambda: checkpoint_tensors.held(tensors, rank), folder)
            write = partial(checkpoint_tensors.write, tensors, unfinished, ranks, rank)
            # Not what a rank sees in the folder: over NFS it may look there as it did a minute ago.
            names += sorted({folders.METRICS}.union(*self._together(write, folder)))
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
        return together(work, self._group, f"checkpoint {folder.name}")
