"""Checkpoints as folders on disk: written, checked, kept and removed. Needs no torch."""

import dataclasses
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.base.records.record import dumps
from shardwise.checkpoint.history import read_history
from shardwise.checkpoint.index import (
    INDEX,
    DamagedError,
    File,
    Strict,
    check_header,
    is_file_name,
    parse,
    read_file,
    read_index,
    regular,
)
from shardwise.config import RunConfig, UserError
from shardwise.config.run_file import parse_config, without_removed

FORMAT = 4
CHECKPOINTS, MANIFEST, METRICS, BEST = "checkpoints", "checkpoint.json", "metrics.jsonl", "best"
BY_AGE = ("latest", "latest-good", "auto")
"""Values of `training.resume` that name no checkpoint."""
MEMORY_NAME = ".memory"
"""The file in an output folder that names the run's folders in the memory of nodes."""
UNFINISHED = ".tmp"
"""The end of the name of what is being written or removed; no run reads it, the next removes it."""
ABANDONED = ".abandoned"
"""The end of the name of a checkpoint that is later than the one that its run resumed from.

It stays until the run reaches its step again.
"""


@dataclass(frozen=True)
class StoredSlot(Strict):
    """The fields of `data.state.SlotState`."""

    place: int
    part: int
    token: int
    waiting: tuple[tuple[int, int, int], ...]
    long: int
    skipped: dict[str, int]
    continued: int
    is_begun: bool


@dataclass(frozen=True)
class StoredRest(Strict):
    """The fields of `data.state.Rest`: how `training.epochs` end."""

    epochs: float
    last_own: tuple[int, ...]
    begin: dict[str, StoredSlot]
    num_rows: int
    row: int
    state: StoredSlot


@dataclass(frozen=True)
class Loader(Strict):
    """The fields of `data.state.LoaderState`: where every slot is in its stream of rows."""

    step: int
    read_from: dict[str, Any]
    slots: dict[str, StoredSlot]
    filled: dict[str, int]
    rest: StoredRest | None


@dataclass(frozen=True)
class StoredScale(Strict):
    """The fields of `LossScale`."""

    dynamic: bool
    scale: float
    good_steps: int


@dataclass(frozen=True)
class Best(Strict):
    """A run's checkpoint with the lowest loss so far, and the text on which that was evaluated."""

    step: int
    loss: float
    tokens: int
    documents: str | None
    """The fingerprint of the validation set."""


@dataclass(frozen=True)
class Manifest(Strict):
    """Content of `checkpoint.json`: everything beside tensors, and how its files are known.

    A correct checksum proves nothing about its content: whoever hands out a folder can compute it.
    """

    step: int
    """Optimizer steps done."""
    config: dict[str, Any]
    loader: Loader
    loss_scale: StoredScale
    model: dict[str, str]
    """Checksums of the files of `model.path`, by name."""
    best: Best | None
    files: dict[str, File]
    format: int
    num_steps: int | None = None
    """The optimizer steps of the whole run, which `training.epochs` come to."""
    lora: dict[str, Any] | None = None
    """Values that the folder of `lora.path` gave, by key of `lora`; None without one."""

    def configured(self, source: str) -> RunConfig:
        """Return the run, as it was after the folder of `lora.path` was read.

        Raises UserError where this version cannot read it.
        """
        config = without_removed(self.config)
        if self.lora is not None:
            config = {**config, "lora": {**(config.get("lora") or {}), **self.lora, "path": None}}
        return parse_config(config, source=source)


def folder_of(output_dir: str | Path, step: int) -> Path:
    """Return the folder of the checkpoint after `step` steps."""
    return Path(output_dir) / CHECKPOINTS / f"step-{step}"


def step_of(folder: Path) -> int:
    """Return the step in a checkpoint's name."""
    return int(folder.name.removeprefix("step-").removesuffix(ABANDONED))


def complete(output_dir: str | Path) -> list[Path]:
    """Return the checkpoints of a run that were written completely, newest first, unchecked."""
    return _checkpoints(output_dir, "")


def damage(folder: Path, part: int = 0, num_parts: int = 1) -> str | None:
    """Return what is wrong with a checkpoint, in one line that names the file; None if nothing is.

    With `num_parts` each of several processes reads a share of the files; all read the manifest and
    the index.
    """
    try:
        manifest = read_manifest(folder)
        _check_content(folder, manifest)
        index = read_index(folder)
        if missing := {INDEX, METRICS, *index.files()} - manifest.files.keys():
            raise DamagedError(f"{folder / MANIFEST} is altered: it does not know {min(missing)}")
        for name in sorted(manifest.files)[part::num_parts]:
            _check_file(folder / name, manifest.files[name])
            if content := index.content_of(name):
                check_header(folder / name, content)
            elif name == METRICS:
                read_history(folder / name, manifest.files[name].sha256)
    except DamagedError as error:
        return str(error)
    return None


def _check_content(folder: Path, manifest: Manifest) -> None:
    """Raise DamagedError where a well-formed manifest cannot be that of a run in this folder."""
    path = folder / MANIFEST
    if re.fullmatch(r"step-\d+", folder.name) and step_of(folder) != manifest.step:
        raise DamagedError(f"{path} is altered: it is of step {manifest.step}")
    try:
        parse_config(without_removed(manifest.config), source=str(path))
        cfg = manifest.configured(str(path))
    except UserError as error:
        raise DamagedError(f"{error}: this version cannot read its config") from None
    slots = {str(slot) for slot in range(cfg.training.global_batch_size)}
    if manifest.loader.slots.keys() != slots:
        raise DamagedError(f"{path} is altered: its slots are not those of the global batch")


def read_manifest(folder: Path) -> Manifest:
    """Read `checkpoint.json`; DamagedError where it is not what this version writes."""
    path = folder / MANIFEST
    written = read_file(path)
    try:
        content = json.loads(written)
        del content["sha256"]
        is_signed = written == _encode(content)
    except (ValueError, TypeError, KeyError, RecursionError):
        raise DamagedError(f"{path} is truncated or altered") from None
    if not is_signed:
        raise DamagedError(f"{path} is altered: its checksum is another")
    if content.get("format") != FORMAT:
        raise DamagedError(
            f"{path} has format {str(content.get('format'))[:20]}, and this version reads "
            f"{FORMAT}: end that run with the version of shardwise that wrote it, or start from "
            "scratch in another folder"
        )
    manifest: Manifest = parse(path, dumps(content), Manifest)
    if bad := next((name for name in manifest.files if not is_file_name(name)), None):
        raise DamagedError(f"{path} is altered: {bad[:40]!r} is no file of a checkpoint")
    slots, rest, numbers = [*manifest.loader.slots.values()], manifest.loader.rest, [manifest.step]
    if rest is not None:
        names = {str(slot) for slot in range(len(rest.last_own))}
        if not names == rest.begin.keys() == manifest.loader.slots.keys():
            raise DamagedError(f"{path} is altered: the end of its epochs is of other slots")
        numbers += [rest.num_rows, rest.row, *rest.last_own]
        slots += [*rest.begin.values(), rest.state]
    numbers += [n for slot in slots for n in (slot.place, slot.part, slot.token)]
    if min(manifest.loader.step, *numbers) < 0:
        raise DamagedError(f"{path} is altered: a number in it is negative")
    return manifest


def checksums(folder: Path, names: Iterable[str]) -> dict[str, File]:
    """Return the size and checksum of these files, by name."""
    paths = {name: folder / name for name in names}
    return {name: File(path.stat().st_size, _file_sha256(path)) for name, path in paths.items()}


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write `checkpoint.json`, with its own checksum in it."""
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
    """Remove what is older than the `keep_last` newest, but not the best.

    What was abandoned is removed up to `step`.
    """
    best = (Path(output_dir) / CHECKPOINTS / BEST).resolve()
    older = [folder for folder in complete(output_dir)[keep_last:] if folder.resolve() != best]
    reached = [folder for folder in _checkpoints(output_dir, ABANDONED) if step_of(folder) <= step]
    for folder in older + reached:
        _remove(folder)


def take_over(output_dir: str | Path, step: int, best_step: int | None) -> None:
    """Prepare the checkpoints of earlier runs for a run that resumes after `step`.

    Whatever earlier runs were writing or removing when they were killed is removed. Checkpoints
    later than `step` are abandoned: "latest" must not lead to them any more. `best` leads to this
    run's best, which a run may have written but not marked.
    """
    folder = Path(output_dir) / CHECKPOINTS
    for path in folder.glob(f"*{UNFINISHED}"):
        if not re.fullmatch(rf"(step-\d+(\.\w+)*|{BEST}){re.escape(UNFINISHED)}", path.name):
            continue  # the folder may be a link to one with files of somebody else
        if path.is_symlink() or not path.is_dir():
            path.unlink()
        else:
            shutil.rmtree(path)
    for later in [path for path in complete(output_dir) if step_of(path) > step]:
        abandoned = later.with_name(later.name + ABANDONED)
        if abandoned.exists():  # this step was reached again before
            _remove(abandoned)
        later.rename(abandoned)
    if best_step is not None and folder_of(output_dir, best_step).is_dir():
        mark_best(folder_of(output_dir, best_step))
    else:
        (folder / BEST).unlink(missing_ok=True)


def _checkpoints(output_dir: str | Path, ending: str) -> list[Path]:
    folders = (Path(output_dir) / CHECKPOINTS).glob(f"step-*{ending}")
    folders = [f for f in folders if re.fullmatch(rf"step-\d+{ending}", f.name) and f.is_dir()]
    return sorted(folders, key=step_of, reverse=True)


def _remove(folder: Path) -> None:
    # Renamed first: a removal that is interrupted must not leave what looks like a checkpoint.
    shutil.rmtree(folder.rename(folder.with_name(f"{folder.name}.removed{UNFINISHED}")))


def shorten(path: Path, known: File) -> None:
    """Remove what a later copy has written behind a file's own bytes, which stay as they are."""
    if path.is_file() and path.stat().st_size > known.num_bytes:
        content = path.read_bytes()[: known.num_bytes]
        path.unlink()  # the later copy keeps its bytes
        path.write_bytes(content)


def is_whole(path: Path, known: File) -> bool:
    """Return whether a file of a checkpoint is there and unchanged."""
    try:
        _check_file(path, known)
    except DamagedError:
        return False
    return True


def _check_file(path: Path, known: File) -> None:
    try:
        size = regular(path).stat().st_size
        if size != known.num_bytes:
            raise DamagedError(f"{path} has {size} bytes of {known.num_bytes}")
        if _file_sha256(path) != known.sha256:
            raise DamagedError(f"{path} is altered: its checksum is another")
    except FileNotFoundError:
        raise DamagedError(f"{path} is missing") from None
    except OSError as error:
        raise DamagedError(f"{path} cannot be read ({error.strerror})") from None


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
