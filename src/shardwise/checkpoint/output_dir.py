"""The output folder of a run: whose it is, and the record of a run that did not succeed."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Generator
from pathlib import Path

from shardwise.checkpoint import output_lock
from shardwise.checkpoint.folder import CHECKPOINTS, MANIFEST, METRICS, UNFINISHED, complete
from shardwise.checkpoint.output_lock import Lock
from shardwise.config import RunConfig, UserError
from shardwise.process.ending import RunError, is_full
from shardwise.process.world import World
from shardwise.records.record import RunRecord, Status, write_atomically

RECORD = "record.json"
TIMELINES = ("timeline.json", "trace.json", "timeline.svg")
"""What a pipeline did in a step, for programs, for Perfetto, and to look at."""
FILES = (RECORD, METRICS, *TIMELINES, "non-finite-step-*-rank-*.json")
"""The files that a run writes, as patterns, but for stacks: a rank may have its file open before another clears."""
RESULTS = ("adapter", "model")
"""The folders of what was trained, there once they are whole."""
FOLDERS = (*RESULTS, *(name + UNFINISHED for name in RESULTS), CHECKPOINTS, "tensorboard")
"""The folders that a run writes."""


@contextlib.contextmanager
def locked(cfg: RunConfig, world: World | None) -> Generator[Lock | None]:
    """Make the output folder and keep other runs out of it: see `output_lock.locked`."""
    _check_is_checkpoint(cfg.training.resume)
    with output_lock.locked(_make(cfg), world, os.environ) as lock:
        yield lock


def claim(cfg: RunConfig, clear: bool) -> None:
    """Make the output folder; `clear` removes the run that is to be replaced, and nothing that no run wrote.

    Raises UserError where the folder holds a run and `training.overwrite` is off. A record of a run that was refused
    before it began (status `unsupported`) holds nothing to lose: the next try replaces it. A run that goes on from a
    checkpoint in this folder leaves everything as it is until the checkpoint is found whole: see `go_on`.
    """
    _check_is_checkpoint(cfg.training.resume)
    folder = _make(cfg)
    _check_kinds(folder)
    _check_inputs_stay(folder, cfg.model.path, cfg.model.tokenizer)
    if _goes_on_here(cfg, folder):
        return
    auto = cfg.training.resume == "auto"
    again = auto and not results(
        folder
    )  # of a run that died before its first checkpoint nothing is kept
    if not ((folder / RECORD).exists() or (folder / METRICS).exists() or complete(folder)):
        return
    if not (cfg.training.overwrite or again or _was_refused(folder)):
        held = "results, and no checkpoint to go on from" if auto else "another run"
        raise UserError(
            f"training.output_dir {folder} holds {held}; choose another folder, or set training.overwrite=true"
        )
    _check_inputs_stay(folder, cfg.training.resume)
    if clear:
        for pattern in FILES:
            for path in folder.glob(pattern):
                path.unlink()
        for name in FOLDERS:
            _remove_folder(folder / name)


def results(folder: str | Path) -> list[Path]:
    """What was trained, as far as it was saved to its end."""
    return [path for name in RESULTS if (path := Path(folder, name)).is_dir()]


def go_on(cfg: RunConfig, metrics: Path) -> None:
    """Make the folder one of a run that stands where its checkpoint, whose metrics these are, was written."""
    folder = Path(cfg.training.output_dir)
    for name in (RECORD, *TIMELINES):
        (folder / name).unlink(missing_ok=True)
    write_atomically(folder / METRICS, metrics.read_text(encoding="utf-8"))


@contextlib.contextmanager
def writing(cfg: RunConfig) -> Generator[None]:
    """Raise RunError with a way out where something in the output folder cannot be written any more."""
    folder = Path(cfg.training.output_dir)
    try:
        yield
    except OSError as error:
        # A full disk has a way out of its own: see `ending.explain`.
        if (
            isinstance(error.filename, str | Path)
            and Path(error.filename).is_relative_to(folder)
            and not is_full(error)
        ):
            raise RunError(
                f"training.output_dir {folder}: {Path(error.filename).name} cannot be written ({error.strerror}); was "
                "the folder moved or removed while the run was in it? put it back, then go on with --resume auto"
            ) from None
        raise


def record_failure(cfg: RunConfig, status: Status, reason: str) -> None:
    """Record why the run did not succeed, unless another rank has done so: the first reason is the cause.

    A user's mistake is `unsupported` if the run had not begun, else `failed`. Torch must be importable.
    """
    from shardwise.metrics.hardware import environment

    folder = Path(cfg.training.output_dir)
    if (folder / RECORD).exists():
        return
    if status == "unsupported" and (folder / METRICS).exists():
        status = "failed"
    with contextlib.suppress(
        OSError
    ):  # a full disk, two ranks at once: what matters is the error that is told next
        RunRecord(status, cfg.to_dict(), reason, environment()).write(folder / RECORD)


def _make(cfg: RunConfig) -> Path:
    folder = Path(cfg.training.output_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"training.output_dir {folder}: cannot make the folder ({error.strerror}); choose another"
        ) from None
    return folder


def _check_is_checkpoint(resume: str | None) -> None:
    if resume in (None, "latest", "latest-good", "auto") or Path(resume, MANIFEST).exists():
        return
    found = complete(resume)
    way_out = (
        f"the newest is {found[0]}"
        if found
        else "they are checkpoints/step-N in the output_dir of a run"
    )
    raise UserError(f"training.resume: {resume} is no checkpoint, it has no {MANIFEST}; {way_out}")


def _goes_on_here(cfg: RunConfig, folder: Path) -> bool:
    resume = cfg.training.resume
    if resume == "auto":
        return bool(complete(folder))
    if resume is None or resume in ("latest", "latest-good"):
        return resume is not None
    return Path(resume).resolve().is_relative_to((folder / CHECKPOINTS).resolve())


def _was_refused(folder: Path) -> bool:
    if (folder / METRICS).exists():
        return False
    try:
        return RunRecord.read(folder / RECORD).status == "unsupported"
    except UserError:
        return False


def _check_kinds(folder: Path) -> None:
    folders = [
        folder / name
        for name in FOLDERS
        if (folder / name).exists() and not (folder / name).is_dir()
    ]
    files = [path for pattern in FILES for path in folder.glob(pattern) if path.is_dir()]
    for path in folders + files:
        raise UserError(
            f"training.output_dir {folder}: {path.name} is a {'folder' if path in files else 'file'}, which no run "
            "has made; move it away, or choose another folder"
        )


def _remove_folder(folder: Path) -> None:
    if folder.is_symlink():
        folder.unlink()
    elif folder.exists():
        try:
            shutil.rmtree(folder)
        except OSError as error:
            raise UserError(
                f"training.output_dir: cannot remove {folder} ({error.strerror}); remove it, or choose another folder"
            ) from None


def _check_inputs_stay(folder: Path, *paths: str | None) -> None:
    inputs = [Path(path).resolve() for path in paths if path is not None]
    for name in FOLDERS:
        if any(path.is_relative_to((folder / name).resolve()) for path in inputs):
            raise UserError(
                f"training.output_dir: this run reads {folder / name}, where it would write; choose another output_dir"
            )
