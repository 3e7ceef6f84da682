"""The output folder of a run: which run may write there, and the record of one that failed."""

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

from shardwise.base.process.ending import RunError, is_full, system_error
from shardwise.base.process.world import World
from shardwise.base.records.record import RunRecord, Status
from shardwise.base.safety import check_no_links, write_atomically
from shardwise.checkpoint import folder as folders
from shardwise.checkpoint import memory_folder, output_lock
from shardwise.checkpoint.folder import BY_AGE, CHECKPOINTS, MANIFEST, METRICS, UNFINISHED, complete
from shardwise.checkpoint.output_lock import Lock
from shardwise.config import RunConfig, UserError

RECORD = "record.json"
TIMELINES = ("timeline.json", "trace.json", "timeline.svg")
"""Files of a pipeline's step: for programs, for Perfetto, and as a picture."""
REFERENCE = "reference-logprobs.safetensors"
"""The log-probabilities of `preference.reference_logprobs: precompute`."""
FILES = (
    RECORD,
    METRICS,
    REFERENCE,
    folders.MEMORY_NAME,
    *TIMELINES,
    "non-finite-step-*-rank-*.json",
)
"""The files that a run writes, as patterns.

Stacks are not among them: one rank may have its file open before another clears the folder.
"""
RESULTS = ("adapter", "model")
"""The folders of what was trained; each gets its name when it is complete."""
_OF_DISKS = (errno.EIO, errno.EFBIG, errno.EROFS, errno.ESTALE)
"""The numbers of errors with which a write fails that names no file."""
FOLDERS = (*RESULTS, *(name + UNFINISHED for name in RESULTS), CHECKPOINTS, "tensorboard")
"""The folders that a run writes."""


@contextlib.contextmanager
def locked(cfg: RunConfig, world: World | None) -> Generator[Lock | None]:
    """Make the output folder and keep other runs out of it: see `output_lock.locked`."""
    _check_is_checkpoint(cfg.training.resume)
    with output_lock.locked(_make(cfg), world, os.environ) as lock:
        yield lock


def claim(cfg: RunConfig, clear: bool) -> None:
    """Make the output folder, and with `clear` remove the files of the run that is replaced.

    UserError where the folder holds a run and `training.overwrite` is off. A run that failed before
    its first step has nothing to lose: the next run replaces it. A run that resumes from a
    checkpoint in this folder leaves everything as it is until the checkpoint was checked: see
    `rewind`.
    """
    _check_is_checkpoint(cfg.training.resume)
    folder = _make(cfg)
    _check_kinds(folder)
    _check_inputs_stay(folder, cfg.model.path, cfg.model.tokenizer)
    if _resumes_here(cfg, folder):
        return
    if not ((folder / RECORD).exists() or (folder / METRICS).exists() or complete(folder)):
        return
    auto = cfg.training.resume == "auto"
    # A run that died before its first checkpoint, and is started again, has nothing to keep.
    starts_again = auto and not results(folder)
    if not (cfg.training.overwrite or starts_again or _took_no_step(folder)):
        raise UserError(f"training.output_dir {folder} holds {_content(folder, auto)}")
    _check_inputs_stay(folder, cfg.training.resume)
    if clear:
        remove_files(cfg)


def _content(folder: Path, auto: bool) -> str:
    """Return what a folder holds that is not this run's, with the ways out."""
    ways = "choose another folder, or delete it with training.overwrite=true"
    if found := results(folder):
        content = f"a finished run ({', '.join(path.name for path in found)})"
        return f"{content}{', and no checkpoint to resume from' if auto else ''}; {ways}"
    if checkpoints := complete(folder):
        step = folders.step_of(checkpoints[0])
        return f"a run with checkpoints up to step {step}: continue it with --resume latest, {ways}"
    return f"another run, which has saved nothing; {ways}"


def remove_files(cfg: RunConfig) -> None:
    """Remove what a run has written, in this node's memory too."""
    folder = Path(cfg.training.output_dir)
    memory_folder.forget(folder)
    for pattern in FILES:
        for path in folder.glob(pattern):
            path.unlink()
    for name in FOLDERS:
        _remove_folder(folder / name)


def reference_file(cfg: RunConfig, checkpoint: Path | None = None) -> Path:
    """Return the file of the reference's log-probabilities: the run's own or, where it has none,
    that of the run which wrote `checkpoint`.
    """
    own = Path(cfg.training.output_dir, REFERENCE)
    if checkpoint is None or own.exists():
        return own
    return checkpoint.parent.parent / REFERENCE


def reference_sum(file: Path) -> dict[str, str]:
    """Return the name of the reference's file with its checksum, which is empty for no file."""
    return {REFERENCE: hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else ""}


def results(folder: str | Path) -> list[Path]:
    """Return the folders of what was trained, of those that were saved completely."""
    return [path for name in RESULTS if (path := Path(folder, name)).is_dir()]


def rewind(cfg: RunConfig, metrics: Path) -> None:
    """Return the folder to the step of a checkpoint, whose `metrics.jsonl` is at `metrics`."""
    folder = Path(cfg.training.output_dir)
    for name in (RECORD, *TIMELINES):
        (folder / name).unlink(missing_ok=True)
    write_atomically(folder / METRICS, metrics.read_bytes())


@contextlib.contextmanager
def writing(cfg: RunConfig) -> Generator[None]:
    """Turn an error of writing in the output folder into a RunError with a way out."""
    folder = Path(cfg.training.output_dir)
    try:
        yield
    except Exception as error:
        cause = system_error(error)
        # `ending.explain` gives the way out of a full disk.
        if cause is None or is_full(error):
            raise
        if cause.filename is None and cause.errno in _OF_DISKS:
            raise RunError(
                f"training.output_dir {folder}: a file there cannot be written ({cause.strerror}); "
                "correct that, then resume with --resume auto"
            ) from None
        if not isinstance(cause.filename, str | bytes | Path):
            raise
        file = Path(os.fsdecode(cause.filename))
        if not file.is_relative_to(folder):
            raise
        raise RunError(
            f"training.output_dir {folder}: {file.name} cannot be written ({cause.strerror}); was "
            "the folder moved or removed while the run was in it? put it back, then resume with "
            "--resume auto"
        ) from None


def record_failure(cfg: RunConfig, status: Status, reason: str) -> None:
    """Record why the run failed, unless another rank has: the first reason is the cause.

    A user's mistake is `unsupported` if the run had not begun, else `failed`. The machine is told
    where torch was imported; the run may have ended because it could not be.
    """
    folder = Path(cfg.training.output_dir)
    if (folder / RECORD).exists():
        return
    if status == "unsupported" and (folder / METRICS).exists():
        status = "failed"
    machine: dict[str, Any] = {}
    if sys.modules.get("torch"):
        from shardwise.metrics.hardware import environment

        machine = environment()
    # The disk may be full, or two ranks may write at once; the error that is printed next matters.
    with contextlib.suppress(OSError):
        RunRecord(status, cfg.recorded(), reason, machine).write(folder / RECORD)


def _make(cfg: RunConfig) -> Path:
    folder = Path(cfg.training.output_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"training.output_dir {folder}: cannot make the folder ({error.strerror}); choose "
            "another"
        ) from None
    check_no_links(folder)
    return folder


def _check_is_checkpoint(resume: str | None) -> None:
    if resume in (None, *BY_AGE) or Path(resume, MANIFEST).exists():
        return
    way_out = "they are checkpoints/step-N in the output_dir of a run"
    if checkpoints := complete(resume):
        way_out = f"the newest is {checkpoints[0]}"
    raise UserError(f"training.resume: {resume} is no checkpoint, it has no {MANIFEST}; {way_out}")


def _resumes_here(cfg: RunConfig, folder: Path) -> bool:
    resume = cfg.training.resume
    if resume is None:
        return False
    if resume == "auto":
        in_memory = memory_folder.has_name(folder) and not results(folder)
        return in_memory or bool(complete(folder))
    if resume in ("latest", "latest-good"):
        return True
    return Path(resume).resolve().is_relative_to((folder / CHECKPOINTS).resolve())


def _took_no_step(folder: Path) -> bool:
    """Return whether a run here failed before its first step, so that it has saved nothing."""
    if complete(folder) or results(folder):
        return False
    try:
        if (folder / RECORD).exists() and RunRecord.read(folder / RECORD).status == "ok":
            return False
        lines = (folder / METRICS).read_bytes().splitlines() if (folder / METRICS).exists() else []
        return all(json.loads(line)["step"] == 0 for line in lines)  # an evaluation at the start
    except (UserError, ValueError, KeyError, TypeError):
        return False


def _check_kinds(folder: Path) -> None:
    """Raise UserError where a folder has the name of a file that a run writes, or the reverse."""
    paths = [folder / name for name in FOLDERS]
    paths += [
        path
        for path in (folder / CHECKPOINTS).glob("step-*")
        if re.fullmatch(rf"step-\d+({re.escape(folders.ABANDONED)})?", path.name)
    ]
    wrong = [(path, "file") for path in paths if path.exists() and not path.is_dir()]
    paths = [path for pattern in FILES for path in folder.glob(pattern)]
    wrong += [(path, "folder") for path in paths if path.is_dir()]
    for path, kind in wrong:
        raise UserError(
            f"training.output_dir {folder}: {path.name} is a {kind}, which no run has made; move "
            "it away, or choose another folder"
        )


def _remove_folder(folder: Path) -> None:
    if folder.is_symlink():
        folder.unlink()
    elif folder.exists():
        try:
            shutil.rmtree(folder)
        except OSError as error:
            raise UserError(
                f"training.output_dir: cannot remove {folder} ({error.strerror}); remove it, or "
                "choose another folder"
            ) from None


def _check_inputs_stay(folder: Path, *paths: str | None) -> None:
    inputs = [Path(path).resolve() for path in paths if path is not None]
    for name in FOLDERS:
        if any(path.is_relative_to((folder / name).resolve()) for path in inputs):
            raise UserError(
                f"training.output_dir: this run reads {folder / name}, where it would write; "
                "choose another output_dir"
            )
