"""The output folder of a run: whose it is, and the record of a run that did not succeed."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

from shardwise.config import RunConfig, UserError
from shardwise.metrics.record import RunRecord

RECORD, METRICS = "record.json", "metrics.jsonl"
FILES = (RECORD, METRICS, "non-finite-step-*-rank-*.json")
"""The files that a run writes, as patterns."""
FOLDERS = ("adapter", "model", "checkpoints", "tensorboard")
"""The folders that a run writes."""


def claim(cfg: RunConfig, clear: bool) -> None:
    """Make the output folder; `clear` removes the run that is to be replaced, and nothing that no run wrote.

    Raises UserError where the folder holds a run and `training.overwrite` is off. A record of a run that was refused
    before it began (status `unsupported`) holds nothing to lose: the next try replaces it.
    """
    folder = Path(cfg.training.output_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"training.output_dir {folder}: cannot make the folder ({error.strerror})") from None
    if not ((folder / RECORD).exists() or (folder / METRICS).exists()):
        return
    if not cfg.training.overwrite and not _was_refused(folder):
        raise UserError(
            f"training.output_dir {folder} holds another run; choose another folder, or set training.overwrite=true"
        )
    _check_inputs_stay(cfg, folder)
    if clear:
        for pattern in FILES:
            for path in folder.glob(pattern):
                path.unlink()
        for name in FOLDERS:
            shutil.rmtree(folder / name, ignore_errors=True)


def record_failure(cfg: RunConfig, out_of_memory: bool, refused: bool, reason: str) -> None:
    """Record why the run did not succeed, unless another rank has done so: the first reason is the cause.

    `refused` is a user's mistake: `unsupported`, if the run had not begun. Torch must be importable.
    """
    from shardwise.metrics.hardware import environment

    folder = Path(cfg.training.output_dir)
    if (folder / RECORD).exists():
        return
    refused = refused and not (folder / METRICS).exists()
    status = "oom" if out_of_memory else "unsupported" if refused else "failed"
    with contextlib.suppress(OSError):  # a full disk, two ranks at once: what matters is the error that is told next
        RunRecord(status, cfg.to_dict(), reason, environment()).write(folder / RECORD)


def _was_refused(folder: Path) -> bool:
    if (folder / METRICS).exists():
        return False
    try:
        return RunRecord.read(folder / RECORD).status == "unsupported"
    except UserError:
        return False


def _check_inputs_stay(cfg: RunConfig, folder: Path) -> None:
    inputs = [Path(path).resolve() for path in (cfg.model.path, cfg.model.tokenizer) if path is not None]
    for name in FOLDERS:
        if any(path.is_relative_to((folder / name).resolve()) for path in inputs):
            raise UserError(
                f"training.overwrite would remove {folder / name}, which this run reads; choose another output_dir"
            )
