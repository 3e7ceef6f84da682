"""Text files: which files there are, and the documents in them. No text is kept in memory."""

from __future__ import annotations

import contextlib
import glob
import hashlib
import itertools
import json
import os
import stat
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import numpy as np

from shardwise.config import UserError
from shardwise.data.record import BadDocument, Record
from shardwise.data.splits import files_of_split
from shardwise.ranges import shown

STRIDE = 32
"""The index has the place of every 32nd document: a small index, and little to read past."""

SAMPLES, BLOCK = 18, 4096
"""A fingerprint reads so many blocks of so many bytes of a file: all of it up to 72 KiB."""

# fmt: off
SUFFIXES = frozenset({
    ".jsonl", ".ndjson", ".parquet", ".txt", ".md", ".rst", ".tex",
    ".py", ".c", ".h", ".cpp", ".cu", ".go", ".java", ".js", ".rs", ".sh", ".ts",
})
# fmt: on
"""The files that are read from a folder. A file given by name or glob may have any suffix."""


_EXISTING = "give existing files, folders or glob patterns"


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


def suffix(path: Path) -> str:
    """Return the suffix of a file's name in lower case, which decides how the file is read."""
    return path.suffix.lower()


def find_files(patterns: str | Sequence[str], key: str = "data.train") -> list[Path]:
    """Return the files of these files, folders and glob patterns, sorted, each file once.

    `**` matches folders at any depth. Of a folder, files with one of SUFFIXES are read, at any
    depth, except hidden ones; where it has several splits, FOLDER::SPLIT names one. Files are
    sorted and compared by their resolved paths, so the order
    of documents does not depend on how a path is spelt. UserError, which names `key`, for a pattern
    without a file.
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
                files += files_of_folder(match, key) if match.is_dir() else [match]
        if not files:
            what = "has no file of text, JSONL or Parquet" if path.is_dir() else "matches no file"
            raise UserError(f"{key}: {pattern} {what}; {_EXISTING}")
        for file in files:
            _check_regular(file)
        files_by_path.update((file.resolve(), file) for file in files)
    if not files_by_path:
        raise UserError(f"{key} is an empty list; {_EXISTING}")
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
        _raise_unreadable(file, error)
    if not is_regular:
        what = "a pipe, socket or device, which cannot be read twice"
        raise UserError(f"{file}: {what}; write it to a file first")


def files_of_folder(
    folder: Path, key: str, config: str | None = None, split: str | None = None
) -> list[Path]:
    """Return the files of a folder, or of a split of it; UserError as from `files_of_split`."""
    if config is not None:
        raise UserError(f"{key}: {folder} has no configurations; give {folder}::{split or config}")
    return files_of_split(folder, files_below(folder), split, key)


def files_below(folder: Path) -> list[Path]:
    """Return the files with one of SUFFIXES in a folder, at any depth, except hidden ones."""
    return [
        file
        for file in sorted(folder.rglob("*"))
        if suffix(file) in SUFFIXES
        and not any(part.startswith(".") for part in file.relative_to(folder).parts)
        and file.is_file()
    ]


@dataclass(frozen=True, eq=False)
class TextFiles:
    """The documents of text files by number.

    The index has the place of every STRIDE-th document. The others are found from there.
    """

    files: tuple[Path, ...]
    ends: np.ndarray  # [files] int64: the number of documents up to the end of each file
    offsets: np.ndarray  # [documents / STRIDE, rounded up] int64: first byte, in its file
    sizes: np.ndarray  # [files] int64: bytes of each file when it was indexed
    text_field: str  # the name of the only field of a plain text

    def __len__(self) -> int:
        return int(self.ends[-1])

    def __getitem__(self, document: int) -> Record:
        """Return the fields of a document; BadDocument where they cannot be read."""
        path, _, raw = self._read(document)
        try:
            return _object(_decode(raw)) if is_jsonl(path) else {self.text_field: _decode(raw)}
        except BadDocument:
            if path.stat().st_size != self.sizes[self.files.index(path)]:
                message = f"{path}: the file has changed since the run began; start again"
                raise UserError(message) from None
            raise

    def where(self, document: int) -> str:
        """Return the file and line of a document, for an error; this reads the file up to there."""
        path, offset, _ = self._read(document)
        return f"{path}:{_line_number(path, offset)}" if is_jsonl(path) else str(path)

    def fingerprint(self) -> str:
        """Return a short hash of the index, the files' sizes, and samples of their bytes."""
        places = self.ends.tobytes() + self.offsets.tobytes()
        content = hashlib.blake2b(places, digest_size=8)
        for path in self.files:
            try:
                for part in _sample(path):
                    content.update(part)
            except OSError as error:
                _raise_unreadable(path, error)
        return content.hexdigest()

    def _read(self, document: int) -> tuple[Path, int, bytes]:
        """Return the file of a document, its first byte there, and its bytes."""
        index = int(np.searchsorted(self.ends, document, side="right"))
        path, first = self.files[index], int(self.ends[index - 1]) if index else 0
        indexed = document // STRIDE * STRIDE
        begin, offset = first, 0
        if indexed > first:
            begin, offset = indexed, int(self.offsets[indexed // STRIDE])
        try:
            if is_jsonl(path):
                # A file that has become shorter gives an empty document.
                nothing = offset, b""
                lines = itertools.islice(_lines(path, offset), document - begin, None)
                return path, *next(lines, nothing)
            return path, 0, path.read_bytes()
        except OSError as error:
            _raise_unreadable(path, error)


def _sample(path: Path) -> Iterator[bytes]:
    """Yield the size of a file and SAMPLES blocks of it, evenly spaced from first to last."""
    size = path.stat().st_size
    yield str(size).encode()
    last = max(size - BLOCK, 0)
    with path.open("rb") as file:
        for place in sorted({last * i // (SAMPLES - 1) for i in range(SAMPLES)}):
            file.seek(place)
            yield file.read(BLOCK)


def _object(line: str) -> Record:
    """Return the JSON object of a line; BadDocument where it is none."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        message = f"not JSON ({error}); correct or remove the line"
        raise BadDocument("not JSON", message) from None
    if not isinstance(record, dict):
        kind = type(record).__name__
        message = f"a JSON {kind}, not an object; correct or remove the line"
        raise BadDocument("not JSON", message)
    return record


def index_files(
    files: Iterable[Path], text_field: str = "text", most: int | None = None
) -> TextFiles:
    """Find the documents of these files, or the first `most` of each.

    A JSONL file has a document in each line that is not blank. Any other file is one document. Its
    text is checked when the document is read. UserError for a file that cannot be read, or whose
    first bytes show that it is not text; for `.json`, which has one value and not one per line; and
    for JSON lines under another name, which nobody wants to read as one text.
    """
    files, count = tuple(files), 0
    ends, offsets, sizes = array("q"), array("q"), array("q")
    for path in files:
        if suffix(path) == ".json":
            way_out = "rename it to .jsonl if it has one object per line"
            raise UserError(f"{path}: .json is not read; {way_out}")
        try:
            _check_text(path)
            if not is_jsonl(path) and _begins_with_json_lines(path):
                raise UserError(
                    f"{path}: its lines are JSON objects, but a file of this name is read as one "
                    "text; rename it to .jsonl"
                )
            sizes.append(path.stat().st_size)
            if is_jsonl(path):
                starts: Iterable[int] = (start for start, _ in _lines(path))
            else:
                starts = range(min(sizes[-1], 1))
            for start in itertools.islice(starts, most):
                if count % STRIDE == 0:
                    offsets.append(start)
                count += 1
        except OSError as error:
            _raise_unreadable(path, error)
        ends.append(count)
    arrays = (np.frombuffer(numbers, np.int64) for numbers in (ends, offsets, sizes))
    return TextFiles(files, *arrays, text_field)


def first_document(path: Path, key: str) -> Record:
    """Return the fields of the first document of a text file; a plain text has the field `text`.

    UserError, which names `key`, for a file that cannot be read or has no document.
    """
    index = index_files([path], "text", most=1)
    if not len(index):
        raise UserError(f"{key}: no document in {path}; give a file that is not empty")
    try:
        return index[0]
    except BadDocument as error:
        raise UserError(f"{index.where(0)}: {error}") from None


_DECOMPRESS = "a compressed file; decompress it, as with"
_AS_ROWS = "write its documents as JSONL or Parquet"
_SAVED = "an Arrow file; give the folder that datasets saved it in, or write JSONL or Parquet"
_UTF16 = "UTF-16 text; convert it, as with iconv -f UTF-16 -t UTF-8"

FIRST_BYTES = {
    b"\x1f\x8b": f"{_DECOMPRESS} gzip -d",
    **{b"BZh%d1AY&SY" % level: f"{_DECOMPRESS} bzip2 -d" for level in range(1, 10)},
    b"\x28\xb5\x2f\xfd": f"{_DECOMPRESS} zstd -d",
    b"\xfd7zXZ\x00": f"{_DECOMPRESS} xz -d",
    b"7z\xbc\xaf\x27\x1c": f"{_DECOMPRESS} 7z x",
    b"PK\x03\x04": "a zip archive; unpack it",
    b"PAR1\x15": "a Parquet file; rename it to .parquet",
    b"ARROW1\x00\x00": _SAVED,
    b"\xff\xff\xff\xff": _SAVED,
    **{bytes([0x80, protocol]): f"a pickle; {_AS_ROWS}" for protocol in range(2, 6)},
    b"SQLite format 3\x00": f"an SQLite database; {_AS_ROWS}",
    b"%PDF-": "a PDF; write its text to a file",
    b"\xff\xfe": _UTF16,
    b"\xfe\xff": _UTF16,
}
"""The first bytes of files that are given as text by mistake: their kind, and what to do."""


def _check_text(path: Path) -> None:
    """Check that the first bytes of a file are no other format's, whatever its name."""
    with path.open("rb") as file:
        head = file.read(16)
    for first, kind in FIRST_BYTES.items():
        if head.startswith(first):
            raise UserError(f"{path}: not UTF-8 text, but by its first bytes {kind}")


def _lines(path: Path, offset: int = 0) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of a file from this byte on, without blank ones: (first byte, line)."""
    with path.open("rb") as file:
        file.seek(offset)
        for line in file:
            if not line.isspace():
                yield offset, line
            offset += len(line)


def _begins_with_json_lines(path: Path) -> bool:
    with path.open("rb") as file:
        lines = iter(lambda: file.readline(1 << 20), b"")
        first = list(itertools.islice((line for line in lines if not line.isspace()), 2))
    try:
        return len([_object(_decode(line)) for line in first]) == 2
    except BadDocument:
        return False


def _line_number(path: Path, offset: int) -> int:
    # Counted when an error needs it: an index of line numbers would be as large as that of offsets.
    number = 1
    with path.open("rb") as file:
        while chunk := file.read(min(offset, 1 << 20)):
            number += chunk.count(b"\n")
            offset -= len(chunk)
    return number


def is_jsonl(path: Path) -> bool:
    """Return whether the name of a file says that each of its lines is a document."""
    return suffix(path) in (".jsonl", ".ndjson")


def _decode(raw: bytes) -> str:
    try:
        # "-sig" drops the byte order mark with which some editors begin a file.
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        way_out = "convert the file, for example with iconv"
        message = f"not UTF-8 (byte {error.start + 1}); {way_out}"
        raise BadDocument("not UTF-8", message) from None


def _raise_unreadable(path: Path, error: OSError) -> NoReturn:
    what = f"{path}: cannot read the file ({error.strerror})"
    raise UserError(f"{what}; check the path and its permissions") from None
