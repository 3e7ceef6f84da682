"""Checkpoints as folders on disk: whole, or found out before anything is read into a model. Needs no torch."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from shardwise.checkpoint.index import (
    INDEX,
    DamagedError,
    check_header,
    is_file_name,
    parse,
    read_file,
    read_index,
)
from shardwise.config import UserError
from shardwise.records.record import dumps
from shardwise.run_file import parse_config, without_removed

FORMAT = 3
CHECKPOINTS, MANIFEST, METRICS, BEST = "checkpoints", "checkpoint.json", "metrics.jsonl", "best"
UNFINISHED = ".tmp"
"""The end of the name of what is being written or removed: no run reads it, and the next one takes it away."""
ABANDONED = ".abandoned"
"""The end of the name of a checkpoint that its run has gone back behind: it stays until the run is there again."""


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint holds beside tensors, and by which its files are known to be whole."""

    step: int  # optimizer steps done; the learning rate is a function of it
    config: dict[str, Any]
    loader: dict[str, Any]  # where every slot of the global batch is in its stream
    loss_scale: dict[str, Any]  # float16's, where it stands
    model: dict[str, str]  # by which the files of `model.path` are known
    best: dict[str, Any] | None = (
        None  # this run's checkpoint with the lowest loss so far: step, loss, of which text
    )
    files: dict[str, dict[str, Any]] = field(default_factory=dict)  # name -> bytes, sha256
    format: int = FORMAT


def folder_of(output_dir: str | Path, step: int) -> Path:
    """Where the checkpoint after `step` steps stands."""
    return Path(output_dir) / CHECKPOINTS / f"step-{step}"


def step_of(folder: Path) -> int:
    """The step in a checkpoint's name."""
    return int(folder.name.removeprefix("step-").removesuffix(ABANDONED))


def complete(output_dir: str | Path) -> list[Path]:
    """The checkpoints of a run that were written to their end, newest first; whether they are whole is not asked."""
    return _checkpoints(output_dir, "")


def damage(folder: Path, part: int = 0, num_parts: int = 1) -> str | None:
    """What is wrong with a checkpoint, in one line that names the file; None where nothing is.

    With `num_parts` each of several processes reads a share of the files; the manifest and the index are read by all.
    """
    try:
        manifest = read_manifest(folder)
        _check_content(folder, manifest)
        index = read_index(folder)
        if missing := {INDEX, METRICS, *index.files()} - manifest.files.keys():
            raise DamagedError(f"{folder / MANIFEST} is altered: it does not know {min(missing)}")
        for name in sorted(manifest.files)[part::num_parts]:
            _check_file(folder / name, **manifest.files[name])
            if content := index.content_of(name):
                check_header(folder / name, content)
            elif name == METRICS:
                _check_metrics(folder / name)
    except DamagedError as error:
        return str(error)
    return None


def _check_content(folder: Path, manifest: Manifest) -> None:
    """Raise DamagedError where a manifest is well formed, and yet cannot be that of a run in this folder."""
    path = folder / MANIFEST
    if re.fullmatch(r"step-\d+", folder.name) and step_of(folder) != manifest.step:
        raise DamagedError(f"{path} is altered: it is of step {manifest.step}")
    try:
        cfg = parse_config(without_removed(manifest.config), source=str(path))
    except UserError as error:
        raise DamagedError(f"{error}: this version cannot read its config") from None
    slots = {str(slot) for slot in range(cfg.training.global_batch_size)}
    if manifest.loader["slots"].keys() != slots:
        raise DamagedError(f"{path} is altered: its slots are not those of the global batch")


def read_manifest(folder: Path) -> Manifest:
    """Read `checkpoint.json`; DamagedError where it is not what this version writes."""
    path = folder / MANIFEST
    written = read_file(path)
    try:
        content = json.loads(written)
        as_written = isinstance(content, dict) and content.pop("sha256", None) is not None
        signed = as_written and written == _encode(content)
    except (ValueError, RecursionError):
        raise DamagedError(f"{path} is truncated or altered") from None
    if not as_written:
        raise DamagedError(f"{path} is truncated or altered")
    if not signed:
        raise DamagedError(f"{path} is altered: its checksum is another")
    if content.get("format") != FORMAT:
        raise DamagedError(
            f"{path} has format {str(content.get('format'))[:20]}, and this version reads {FORMAT}: end that run with "
            "the version of shardwise that wrote it, or start from scratch in another folder"
        )
    parse(path, dumps(content), _Content)
    if bad := next((name for name in content["files"] if not is_file_name(name)), None):
        raise DamagedError(f"{path} is altered: {bad[:40]!r} is no file of a checkpoint")
    places = [
        n
        for slot in content["loader"]["slots"].values()
        for n in slot.values()
        if isinstance(n, int)
    ]
    if min(content["step"], content["loader"]["step"], *places) < 0:
        raise DamagedError(f"{path} is altered: a number in it is negative")
    return Manifest(**content)


def checksums(folder: Path, names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """The size and checksum of these files, as a manifest has them."""
    return {
        name: {"num_bytes": (folder / name).stat().st_size, "sha256": _file_sha256(folder / name)}
        for name in names
    }


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write `checkpoint.json`, with a checksum of its own."""
    write_synced(folder / MANIFEST, _encode(dataclasses.asdict(manifest)))


def write_synced(path: Path, content: bytes) -> None:
    """Write a file and wait until the disk has it."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def publish(unfinished: Path, folder: Path) -> None:
    """Give a written checkpoint its name."""
    _sync_folder(unfinished)
    unfinished.rename(folder)
    _sync_folder(folder.parent)


def mark_best(folder: Path) -> None:
    """Let the link `best` lead to this checkpoint."""
    link = folder.with_name(BEST + UNFINISHED)
    link.unlink(missing_ok=True)
    link.symlink_to(folder.name)
    link.replace(folder.with_name(BEST))


def prune(output_dir: str | Path, step: int, keep_last: int) -> None:
    """Remove what is older than the `keep_last` newest, but not the best; and up to `step` what was abandoned."""
    best = (Path(output_dir) / CHECKPOINTS / BEST).resolve()
    older = [folder for folder in complete(output_dir)[keep_last:] if folder.resolve() != best]
    reached = [folder for folder in _checkpoints(output_dir, ABANDONED) if step_of(folder) <= step]
    for folder in older + reached:
        _remove(folder)


def take_over(output_dir: str | Path, step: int, best_step: int | None) -> None:
    """Leave the checkpoints of a run that stands after `step`, whatever the runs before it were killed in.

    What they were writing or removing goes. Later checkpoints than `step` are abandoned: "latest" must not lead to
    them once this run has begun another way. `best` leads to that of this run, which a run may have written but not
    marked.
    """
    folder = Path(output_dir) / CHECKPOINTS
    for path in folder.glob(f"*{UNFINISHED}"):
        path.unlink() if path.is_symlink() or not path.is_dir() else shutil.rmtree(path)
    for later in [path for path in complete(output_dir) if step_of(path) > step]:
        abandoned = later.with_name(later.name + ABANDONED)
        if abandoned.exists():  # this step was reached again before
            _remove(abandoned)
        later.rename(abandoned)
    if best_step is not None:
        mark_best(folder_of(output_dir, best_step))
    else:
        (folder / BEST).unlink(missing_ok=True)


def _checkpoints(output_dir: str | Path, ending: str) -> list[Path]:
    folders = (Path(output_dir) / CHECKPOINTS).glob(f"step-*{ending}")
    return sorted(
        (f for f in folders if re.fullmatch(rf"step-\d+{ending}", f.name)),
        key=step_of,
        reverse=True,
    )


def _remove(folder: Path) -> None:
    # That takes time: cut off in the middle, what is left must not be taken for a checkpoint.
    shutil.rmtree(folder.rename(folder.with_name(f"{folder.name}.removed{UNFINISHED}")))


def _check_file(path: Path, num_bytes: int, sha256: str) -> None:
    try:
        if path.exists() and not path.is_file():
            raise DamagedError(f"{path} is not a file")
        size = path.stat().st_size
        if size != num_bytes:
            raise DamagedError(f"{path} has {size} bytes of {num_bytes}")
        if _file_sha256(path) != sha256:
            raise DamagedError(f"{path} is altered: its checksum is another")
    except FileNotFoundError:
        raise DamagedError(f"{path} is missing") from None
    except OSError as error:
        raise DamagedError(f"{path} cannot be read ({error.strerror})") from None


def _check_metrics(path: Path) -> None:
    for line in read_file(path).splitlines():
        parse(path, line, _Row)


def _file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _encode(content: dict[str, Any]) -> bytes:
    checksum = hashlib.sha256(dumps(content).encode()).hexdigest()
    return (dumps({"sha256": checksum, **content}, indent=1) + "\n").encode()


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# What `checkpoint.json` and a line of `metrics.jsonl` have to be; whoever hands out a folder can sign it himself.


@dataclass(frozen=True)
class _File:
    __pydantic_config__: ClassVar = {"extra": "forbid"}

    num_bytes: int
    sha256: str


@dataclass(frozen=True)
class _Slot:
    __pydantic_config__: ClassVar = {"extra": "forbid"}

    epoch: int
    place: int
    token: int
    documents: int
    skipped: dict[str, int]


@dataclass(frozen=True)
class _Loader:
    __pydantic_config__: ClassVar = {"extra": "forbid"}

    step: int
    read_from: dict[str, Any]
    slots: dict[str, _Slot]


@dataclass(frozen=True)
class _Scale:
    __pydantic_config__: ClassVar = {"extra": "forbid"}

    dynamic: bool
    scale: float
    good_steps: int


@dataclass(frozen=True)
class _Best:
    __pydantic_config__: ClassVar = {"extra": "forbid"}

    step: int
    loss: float
    tokens: int
    documents: str | None


@dataclass(frozen=True)
class _Content:
    __pydantic_config__: ClassVar = {"extra": "forbid"}

    step: int
    config: dict[str, Any]
    loader: _Loader
    loss_scale: _Scale
    model: dict[str, str]
    best: _Best | None
    files: dict[str, _File]
    format: int


@dataclass(frozen=True)
class _Row:
    step: int
    loss: float | Literal["nan", "inf", "-inf"] = 0.0
    grad_norm: float | Literal["nan", "inf", "-inf"] = 0.0
    skipped_steps: int = 0
    eval_loss: float | Literal["nan", "inf", "-inf"] = 0.0
    eval_perplexity: float | Literal["nan", "inf", "-inf"] = 0.0
    eval_tokens: int = 0
