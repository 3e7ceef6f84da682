"""The rows of JSON and CSV files, and what a file is by its first bytes."""

import contextlib
import csv
import itertools
import mmap
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from shardwise.config import UserError

MARK = b"\xef\xbb\xbf"
"""The byte order mark with which some editors begin a file."""

_TOKEN = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|[\[{]|[\]}]|[^\s,:\[\]{}"]+', re.DOTALL)
"""A string, a bracket, or a number or the like."""

JSON_ROW = "shardwise: a row in JSON"
"""The only column of a stream of JSON rows: `datasets` would give all objects the same keys."""

_DECOMPRESS = "a compressed file; decompress it, as with"
_AS_ROWS = "write its documents as JSONL or Parquet"

FIRST_BYTES = {
    b"\x1f\x8b": f"{_DECOMPRESS} gzip -d",
    **{b"BZh%d1AY&SY" % level: f"{_DECOMPRESS} bzip2 -d" for level in range(1, 10)},
    b"\x28\xb5\x2f\xfd": f"{_DECOMPRESS} zstd -d",
    b"\xfd7zXZ\x00": f"{_DECOMPRESS} xz -d",
    b"7z\xbc\xaf\x27\x1c": f"{_DECOMPRESS} 7z x",
    b"PK\x03\x04": "a zip archive; unpack it",
    b"PAR1\x15": "a Parquet file; rename it to .parquet",
    **dict.fromkeys(
        (b"ARROW1\x00\x00", b"\xff\xff\xff\xff"),
        f"an Arrow file; give the folder that datasets saved it in, or {_AS_ROWS}",
    ),
    **{bytes([0x80, protocol]): f"a pickle; {_AS_ROWS}" for protocol in range(2, 6)},
    b"SQLite format 3\x00": f"an SQLite database; {_AS_ROWS}",
    b"%PDF-": "a PDF; write its text to a file",
    **dict.fromkeys(
        (b"\xff\xfe", b"\xfe\xff"), "UTF-16 text; convert it, as with iconv -f UTF-16 -t UTF-8"
    ),
}
"""The first bytes of files that are given as text by mistake: their kind, and what to do."""


def check_text(path: Path) -> bytes:
    """Check that the first bytes of a file are no other format's, and return them."""
    with path.open("rb") as file:
        head = file.read(16)
    for first, kind in FIRST_BYTES.items():
        if head.startswith(first):
            raise UserError(f"{path}: not UTF-8 text, but by its first bytes {kind}")
    return head


def suffix(path: Path) -> str:
    """Return the suffix of a file's name in lower case, which decides how the file is read."""
    return path.suffix.lower()


def is_rows(path: Path) -> bool:
    """Return whether the name of a file says that it has a document in each line or item."""
    return suffix(path) in (".jsonl", ".ndjson", ".json")


def rows_of(path: Path, offset: int = 0) -> Iterator[tuple[int, bytes]]:
    """Yield the documents of a file of rows from this byte on: (first byte, JSON)."""
    return items_of(path, offset) if suffix(path) == ".json" else _lines(path, offset)


def _lines(path: Path, offset: int = 0) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of a file from this byte on, without blank ones: (first byte, line)."""
    with path.open("rb") as file:
        file.seek(offset)
        for line in file:
            if not is_blank(line):
                yield offset, line
            offset += len(line)


def is_blank(line: bytes) -> bool:
    """Return whether a line has white space alone, or a byte order mark."""
    return line.isspace() or not line.removeprefix(MARK).strip()


def items_of(path: Path, offset: int = 0) -> Iterator[tuple[int, bytes]]:
    """Yield the items of a JSON file from this byte on: (first byte, JSON).

    The file is mapped, not read into memory. UserError where a list does not end with the file.
    """
    if path.stat().st_size == 0:  # cannot be mapped
        return
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        depth, start, is_open, is_closed = 0, 0, False, False
        begin = offset or len(MARK) * (content[: len(MARK)] == MARK)
        for number, token in enumerate(_TOKEN.finditer(content, begin)):
            if is_closed:
                raise UserError(f"{path}: something follows behind its list; repair or remove it")
            if number == offset == 0 and token[0] == b"[":
                is_open = True
                continue
            if depth == 0:
                start = token.start()
            depth += (token[0] in (b"[", b"{")) - (token[0] in (b"]", b"}"))
            if depth < 0:
                depth, is_open, is_closed = 0, False, True
            elif depth == 0:
                yield start, content[start : token.end()]
        if depth or is_open:
            raise UserError(f"{path}: its JSON is cut off; repair or remove it")


def has_rows(path: Path) -> bool:
    """Return whether a JSON file has a list, or several objects: rows, not settings."""
    with contextlib.suppress(UserError, OSError), path.open("rb") as file:
        is_list = file.read(64).removeprefix(MARK).lstrip().startswith(b"[")
        return is_list or len(list(itertools.islice(items_of(path), 2))) == 2
    return False


def json_rows(files: Sequence[Path]) -> Iterator[dict[str, str]]:
    """Yield the rows of JSONL and JSON files as text."""
    for path in files:
        check_text(path)
        for _, row in rows_of(path):
            yield {JSON_ROW: row.decode("utf-8-sig")}


def csv_rows(
    files: Sequence[Path], columns: Sequence[str], _changed: object = None
) -> Iterator[dict[str, str]]:
    """Yield these columns of CSV or TSV files; ValueError for a line of another width."""
    for path in files:
        with path.open(encoding="utf-8-sig", newline="") as file:
            lines = csv_lines(path, file)
            names = next(lines, [])
            if twice := [name for name in columns if names.count(name) != 1]:
                raise ValueError(f"{names.count(twice[0])} columns are called {twice[0]!r}")
            for cells in filter(None, lines):
                if (found := len(cells)) != (wanted := len(names)):
                    raise ValueError(f"line {lines.line_num} has {found} cells, not {wanted}")
                row = dict(zip(names, cells))
                yield {name: row[name] for name in columns}


def csv_lines(path: Path, file: Any) -> Any:
    """Return an iterator over the lines of a CSV or TSV file: the cells of each."""
    csv.field_size_limit(2**31 - 1)  # of a cell; the default is 128 KiB
    return csv.reader(file, delimiter="\t" if suffix(path) == ".tsv" else ",", strict=True)
