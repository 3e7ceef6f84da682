"""Which files the entries of `data.train` and `data.validation` name."""

import contextlib
import functools
import glob
import itertools
import os
import stat
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn, TextIO

from shardwise.config import UserError
from shardwise.config.ranges import shown
from shardwise.data.rows import has_rows, suffix
from shardwise.data.splits import files_of_split

# fmt: off
SUFFIXES = frozenset({
    ".jsonl", ".ndjson", ".json", ".parquet", ".csv", ".tsv", ".txt", ".md", ".rst", ".tex",
    ".py", ".c", ".h", ".cpp", ".cu", ".go", ".java", ".js", ".rs", ".sh", ".ts",
})
# fmt: on
"""The files that are read from a folder. A file given by name or glob may have any suffix."""

EXISTING = "give existing files, folders or glob patterns"


def expanded(entry: str) -> Path:
    """Return an entry as a path, with `~` expanded. A `~name` that is no user's stays as it is."""
    return Path(os.path.expanduser(entry))


def parts_of(entry: str) -> tuple[str, str | None, str | None]:
    """Return name, configuration and split of an entry: NAME, NAME:CONFIGURATION or
    NAME:CONFIGURATION:SPLIT, whose configuration may be empty.

    A path that exists is a name, whatever colons it has; so is an entry that begins with one.
    """
    is_name = expanded(entry).exists() or entry.startswith(":")
    parts = [entry] if is_name else entry.split(":", 2)
    name, config, split = (*parts, "", "")[:3]
    return name, config or None, split or None


def read_text(name: str, key: str) -> str:
    """Return the text of a file that `key` of the run file names; UserError, which names it."""
    path = expanded(name)
    try:
        if not path.is_file():
            raise UserError(f"{key}: {path} is not a file; give an existing one")
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise UserError(f"{key}: {path} cannot be read ({error}); give another file") from None


def find_files(patterns: str | Sequence[str], key: str = "data.train") -> list[Path]:
    """Return the files of these files, folders and glob patterns, sorted, each file once.

    `**` matches folders at any depth. Of a folder, `files_below` are read; where it has several
    splits, FOLDER::SPLIT names one. Files are sorted and compared by their resolved paths, so the
    order of documents does not depend on how a path is spelt. UserError, which names `key`, for a
    pattern without a file.
    """
    files_by_path: dict[Path, Path] = {}
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        path = expanded(pattern)
        name, config, split = parts_of(pattern)
        files: list[Path] = []
        if (config or split) and expanded(name).is_dir():
            path = expanded(name)
            files = files_of_folder(path, key, config, split)
        else:
            # A path that exists is taken literally, even where it contains a `[` or `*`.
            for match in [path] if path_exists(path, key) else _glob(path, key):
                if match.is_dir():
                    files += files_of_folder(match, key)
                else:
                    _check_regular(match)
                    files.append(match)
        if not files:
            what = "matches no file"
            if path.is_dir():
                what = (
                    f"has no file of text, JSON, CSV or Parquet, only {_left_out(path) or 'none'}"
                )
            raise UserError(f"{key}: {pattern} {what}; {EXISTING}")
        found = dict(zip(resolved(files), files))
        if twice := found.keys() & files_by_path.keys():
            _say_once(f"{key}: {min(twice)} is named twice, and read once; a weight reads it more")
        files_by_path.update(found)
    if not files_by_path:
        raise UserError(f"{key} is an empty list; {EXISTING}")
    return [files_by_path[resolved] for resolved in sorted(files_by_path)]


def path_exists(path: Path, key: str) -> bool:
    """Return whether a path exists; UserError, which names `key`, where the system cannot tell."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (OSError, ValueError) as error:
        # No permission, a name that is too long, a link to itself, or a null byte.
        reason = error.strerror if isinstance(error, OSError) else error
        what = f"{key}: {shown(str(path))}: cannot be read ({reason})"
        raise UserError(f"{what}; check the path and its permissions") from None
    return True


def _glob(pattern: Path, key: str) -> list[Path]:
    if "**" in pattern.parts:
        literal = itertools.takewhile(lambda part: not glob.has_magic(part), pattern.parts)
        _check_circles(Path(*literal), frozenset(), f"{key}: {pattern}")
    return [Path(match) for match in glob.glob(str(pattern), recursive=True)]


def _check_circles(folder: Path, above: frozenset[str], what: str) -> None:
    """Check that no link below a folder leads to a folder above the link.

    `glob` would follow such links again and again, in every combination. UserError, which begins
    with `what`.
    """
    real = os.path.realpath(folder)
    if real in above:
        link = f"{folder} is a link to a folder above it"
        raise UserError(f"{what} runs in a circle: {link}; list its folders one by one")
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir() and not entry.name.startswith("."):
                _check_circles(Path(entry.path), above | {real}, what)


def _check_regular(file: Path) -> None:
    """Check that a file is regular; UserError for one that never ends or can be read only once."""
    try:
        is_regular = stat.S_ISREG(file.stat().st_mode)
    except OSError as error:
        raise_unreadable(file, error)
    if not is_regular:
        what = "a pipe, socket or device, which cannot be read twice"
        raise UserError(f"{file}: {what}; write it to a file first")


def files_of_folder(
    folder: Path, key: str, config: str | None = None, split: str | None = None
) -> list[Path]:
    """Return the files of a folder, or of a split of it; UserError as from `files_of_split`.

    Once for each folder, a line on stderr names what is left out.
    """
    if config is not None:
        raise UserError(f"{key}: {folder} has no configurations; give {folder}::{split or config}")
    files = files_of_split(folder, files_below(folder), split, key)
    if files:
        _say_what_is_left_out(folder, key)
    return files


def files_below(folder: Path, are_read: bool = True) -> list[Path]:
    """Return the regular files in a folder that are read, or the others, at any depth.

    They have one of SUFFIXES, a `.json` file also rows, unlike settings. Hidden ones are neither.
    """
    files: list[Path] = []
    for name, folders, names in os.walk(folder):
        folders[:] = [f for f in folders if not f.startswith(".") and f != "__pycache__"]
        files += [Path(name, file) for file in names if not file.startswith(".")]
    return sorted(
        file
        for file in files
        if (suffix(file) in SUFFIXES and (suffix(file) != ".json" or has_rows(file))) == are_read
        and file.is_file()
    )


def resolved(files: Iterable[Path]) -> Iterator[Path]:
    """Yield the path of each file without links; a folder of many files is resolved once."""
    folder = functools.cache(Path.resolve)
    for file in files:
        yield file.resolve() if file.is_symlink() else folder(file.parent) / file.name


def _left_out(folder: Path) -> str:
    """Return how many files of a folder are not read, by their suffix or name."""
    kinds = Counter(suffix(file) or file.name for file in files_below(folder, False))
    return ", ".join(f"{count:,} {kind}" for kind, count in kinds.most_common(8))


@functools.cache
def _say_what_is_left_out(folder: Path, key: str) -> None:
    if others := _left_out(folder):
        _say_once(f"{key}: {folder} has files that are not read: {others}")


@functools.cache
def _say_once(note: str) -> None:
    tell(f"note: {note}", sys.stderr)


def tell(line: str, file: TextIO | None = None) -> None:
    """Print a line on the first rank, before there is a report; without a file on stdout."""
    ranks = sys.modules.get("torch.distributed")  # whose processes need not have a variable
    rank: Any = os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or 0
    if ranks is not None and ranks.is_available() and ranks.is_initialized():
        rank = ranks.get_rank()
    if int(rank) == 0:
        print(line, file=file, flush=True)


def raise_unreadable(path: Path, error: OSError) -> NoReturn:
    """Raise the UserError of a file that the system does not let us read."""
    what = f"{path}: cannot read the file ({error.strerror})"
    raise UserError(f"{what}; check the path and its permissions") from None
