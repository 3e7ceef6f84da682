"""Guards against other people's files and folders on this machine: docs/guides/security.md.

And how files are written, so that none is lost. This file needs no torch.
"""

import contextlib
import errno
import functools
import os
import re
import stat
import sys
import tempfile
from pathlib import Path

from shardwise.config import Model, UserError, require


@functools.cache
def warn_of_code(model: Model) -> None:
    """Print on stderr, once a process, that code of the model's folder is about to run here."""
    if (
        not model.trust_remote_code
        or int(os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or 0) > 0
    ):
        return
    folders = " and ".join(filter(None, (model.path, model.tokenizer)))
    print(
        f"warning: model.trust_remote_code is true: Python files of {folders} run here, with all "
        "that you may do on this machine",
        file=sys.stderr,
        flush=True,
    )


_FOLDERS = {
    "sweep.json": "the folder of a bench",
    "record.json": "the folder of a run",
    "metrics.jsonl": "the folder of a run",
    "adapter_config.json": "the folder of an adapter",
    "config.json": "the folder of a model",
}
"""Kinds of folders, by a file in them."""


def check_given(path: str | Path, wanted: str) -> None:
    """Raise UserError where a path is of another kind than `wanted`, which is what a command takes.

    Kinds are "a run file", "a sweep" and those of folders. Anything else is left to its reader.
    """
    path, kind = Path(path), ""
    if path.is_dir():
        kind = next((kind for name, kind in _FOLDERS.items() if (path / name).exists()), "")
    elif path.suffix in (".yaml", ".yml") and path.is_file():
        keys: set[str] = set()
        with contextlib.suppress(OSError), path.open(encoding="utf-8", errors="replace") as file:
            keys |= set(re.findall(r"(?m)^(\w+):", file.read(1 << 20)))
        kind = "a sweep" if "axes" in keys else "a run file" if "model" in keys else ""
    if kind not in ("", wanted):
        raise UserError(f"{path} is {kind}; give {wanted}")


def cache_folder() -> Path:
    """Return the folder of this user for what was measured or compiled here; it may not exist."""
    return Path(os.environ.get("SHARDWISE_CACHE") or Path.home() / ".cache" / "shardwise")


def private_folder(path: Path) -> Path:
    """Make a folder that only this user may write to; UserError where others may."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = path.stat()
    except OSError as error:
        raise UserError(
            f"{path}: cannot make the folder ({error.strerror}); set SHARDWISE_CACHE to another"
        ) from None
    if status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise UserError(
            f"{path}: others may write to this folder, and what lies there is run; remove it, or "
            "set SHARDWISE_CACHE to a folder of your own"
        )
    return path


def check_no_links(folder: Path) -> None:
    """Raise UserError where a name in a folder is a link to a file, which a write would change.

    And where `check_no_pipes` does.
    """
    for path in folder.iterdir():
        if path.is_symlink() and not path.is_dir():
            raise UserError(
                f"{path} is a link to {os.readlink(path)}, which would be written in its place; "
                "remove the link"
            )
    check_no_pipes(folder)


def check_no_pipes(folder: str | Path) -> None:
    """Raise UserError where a name in a folder is that of a pipe, which whoever opens it waits for.

    Of a socket or a device, too.
    """
    for path in Path(folder).iterdir() if os.path.isdir(folder) else ():
        if path.exists() and not path.is_file() and not path.is_dir():
            raise UserError(
                f"{path} is no file, but a pipe, a socket or a device, and may have no end; remove "
                "it, or choose another folder"
            )


def is_hub_name(path: str) -> bool:
    """Return whether a model's path may be a name on the hub, such as gpt2 or owner/name.

    UserError where it is neither that nor a folder with a config.json.
    """
    folder = Path(path)
    check_no_pipes(folder)
    if not (folder / "config.json").is_file():
        check_given(path, "the folder of a model")
    problem, way_out = "is a folder without a config.json", "give a hub id such as owner/name"
    if folder.is_file():
        problem = "is a file, and not a folder with a config.json"
        if folder.suffix.lower() == ".gguf":
            way_out = f"write one of it by shardwise init --model {path}"
    elif not folder.is_dir():
        is_path = folder.is_absolute() or path.startswith((".", "~")) or path.count("/") > 1
        if not is_path:
            return True
        problem = "is no folder here, so it has no config.json"
    require(
        (folder / "config.json").is_file(),
        f"{path}: the path of the model {problem}; correct it, or {way_out}",
    )
    return False


def check_output(path: str | Path, option: str) -> None:
    """Raise UserError where `write_output` could not write; for the time before long work."""
    try:
        if _stream(Path(path)) is None:
            tempfile.TemporaryFile(dir=Path(os.path.realpath(path)).parent).close()
    except (OSError, ValueError) as error:
        raise _cannot_write(f"{option} {path}", error) from None


def write_output(path: str | Path, content: str | bytes) -> None:
    """Write to a path that a user has named: a file all or nothing, a pipe or a device as it is.

    A link stays, and the file that it leads to is written, which keeps its mode. One that has other
    names (hard links) is written in place. UserError where that cannot be.
    """
    content = content.encode() if isinstance(content, str) else content
    try:
        stream = _stream(Path(path))
        if stream is None:
            path = Path(os.path.realpath(path))
            before = path.stat() if path.exists() else None
            if before is not None and before.st_nlink > 1:
                path.write_bytes(content)
            else:
                write_atomically(path, content, before and stat.S_IMODE(before.st_mode))
            return
        sys.stdout.flush()  # it may be the same
        if isinstance(stream, int):
            opened = os.dup(stream)
        else:  # a pipe that nobody reads is an error, and not waited for
            opened = os.open(stream, os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
            os.set_blocking(opened, True)
        with os.fdopen(opened, "wb") as file:
            file.write(content)
    except (OSError, ValueError) as error:
        raise _cannot_write(path, error) from None


def _stream(path: Path) -> Path | int | None:
    """Return a pipe or a device, or the open file of this process that a name like /dev/stdout is.

    None where the path is that of a file, or of nothing. OSError for folders and disks.
    """
    ours = f"/proc/{os.getpid()}/fd"
    try:
        kind = path.stat().st_mode
    except FileNotFoundError:
        return None
    if stat.S_ISDIR(kind):
        raise IsADirectoryError(errno.EISDIR, "it is a folder")
    if stat.S_ISBLK(kind):
        raise OSError(errno.EPERM, "it is a disk")
    while path.is_symlink() and os.path.realpath(path.parent) != ours:
        path = path.parent / os.readlink(path)
    if os.path.realpath(path.parent) == ours:
        return int(path.name)
    return None if stat.S_ISREG(kind) else path


def _cannot_write(what: str | Path, error: OSError | ValueError) -> UserError:
    reason = error.strerror if isinstance(error, OSError) else error
    return UserError(f"{what}: cannot write there ({reason}); give the path of a file")


def write_atomically(path: str | Path, content: str | bytes, mode: int | None = None) -> None:
    """Write a file (text in UTF-8) so that a reader sees its old content or all of the new one.

    Several processes may write it at once: one of them is the last. A link of its name is replaced,
    not followed: see `write_output` for a name that a user gives. `mode`: the file's permissions,
    by default those of a new file. Raises OSError where the file cannot be written.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.urandom(4).hex()}.tmp")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    try:
        with os.fdopen(os.open(temporary, flags, 0o666 if mode is None else 0o600), "wb") as file:
            if mode is not None:
                os.fchmod(file.fileno(), mode)
            file.write(content.encode() if isinstance(content, str) else content)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
