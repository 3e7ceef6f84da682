"""The documents in text files. No text is kept in memory."""

import hashlib
import itertools
import json
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from shardwise.config import UserError
from shardwise.data.files import raise_unreadable
from shardwise.data.record import CORRECT_LINE, KINDS, BadDocument, Record
from shardwise.data.rows import check_text, is_blank, is_rows, rows_of

STRIDE = 32
"""The index has the place of every 32nd document: a small index, and little to read past."""

SAMPLES, BLOCK = 18, 4096
"""A fingerprint reads so many blocks of so many bytes of a file: all of it up to 72 KiB."""


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
            return read_object(_decode(raw)) if is_rows(path) else {self.text_field: _decode(raw)}
        except BadDocument:
            if path.stat().st_size != self.sizes[self.files.index(path)]:
                message = f"{path}: the file has changed since the run began; start again"
                raise UserError(message) from None
            raise

    def where(self, document: int) -> str:
        """Return the file and line of a document, for an error; this reads the file up to there."""
        path, offset, _ = self._read(document)
        return f"{path}:{_line_number(path, offset)}" if is_rows(path) else str(path)

    def fingerprint(self) -> str:
        """Return a short hash of the index, the files' sizes, and samples of their bytes."""
        places = self.ends.tobytes() + self.offsets.tobytes()
        content = hashlib.blake2b(places, digest_size=8)
        for path in self.files:
            try:
                for part in _sample(path):
                    content.update(part)
            except OSError as error:
                raise_unreadable(path, error)
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
            if is_rows(path):
                # A file that has become shorter gives an empty document.
                nothing = offset, b""
                rows = itertools.islice(rows_of(path, offset), document - begin, None)
                return path, *next(rows, nothing)
            return path, 0, path.read_bytes()
        except OSError as error:
            raise_unreadable(path, error)


def _sample(path: Path) -> Iterator[bytes]:
    """Yield the size of a file and SAMPLES blocks of it, evenly spaced from first to last."""
    size = path.stat().st_size
    yield str(size).encode()
    last = max(size - BLOCK, 0)
    with path.open("rb") as file:
        for place in sorted({last * i // (SAMPLES - 1) for i in range(SAMPLES)}):
            file.seek(place)
            yield file.read(BLOCK)


def read_object(line: str) -> Record:
    """Return the JSON object of a line; BadDocument where it is none."""
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        way_out = CORRECT_LINE
        if line.lstrip()[:1] not in ("{", "["):
            way_out = f"{way_out}, or rename the file to .txt if it is one text"
        problem = f"not JSON ({error.msg}, at character {error.pos + 1} of the document)"
        raise BadDocument("not JSON", f"{problem}; {way_out}") from None
    except (ValueError, RecursionError) as error:
        raise BadDocument("not JSON", f"not JSON ({error}); {CORRECT_LINE}") from None
    if not isinstance(record, dict):
        kind = KINDS[type(record).__name__]
        raise BadDocument("not JSON", f"{kind} in JSON, not an object; {CORRECT_LINE}")
    return record


def index_files(
    files: Iterable[Path], text_field: str = "text", most: int | None = None
) -> TextFiles:
    """Find the documents of these files, or the first `most` of each.

    A JSONL file has a document in each line that is not blank, and a `.json` file in each item of
    its list. Any other file is one document. Its text is checked when the document is read.
    UserError for a file that cannot be read, or whose first bytes show that it is not text; and for
    JSON lines under another name, which nobody wants to read as one text.
    """
    files, count = tuple(files), 0
    ends, offsets, sizes = array("q"), array("q"), array("q")
    for path in files:
        try:
            head = check_text(path).lstrip(b"\xef\xbb\xbf \t\r\n")
            if not is_rows(path) and head[:1] in (b"{", b"") and _begins_with_json_lines(path):
                raise UserError(
                    f"{path}: its lines are JSON objects, but a file of this name is read as one "
                    "text; rename it to .jsonl"
                )
            sizes.append(path.stat().st_size)
            if is_rows(path):
                starts: Iterable[int] = (start for start, _ in rows_of(path))
            else:
                starts = range(min(sizes[-1], 1))
            for start in itertools.islice(starts, most):
                if count % STRIDE == 0:
                    offsets.append(start)
                count += 1
        except OSError as error:
            raise_unreadable(path, error)
        ends.append(count)
    arrays = (np.frombuffer(numbers, np.int64) for numbers in (ends, offsets, sizes))
    return TextFiles(files, *arrays, text_field)


def _begins_with_json_lines(path: Path) -> bool:
    with path.open("rb") as file:
        lines = iter(lambda: file.readline(1 << 20), b"")
        first = list(itertools.islice((line for line in lines if not is_blank(line)), 2))
    try:
        return len([read_object(_decode(line)) for line in first]) == 2
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


def _decode(raw: bytes) -> str:
    try:
        # "-sig" drops the byte order mark with which some editors begin a file.
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        message = f"not UTF-8 (byte {error.start + 1}); convert the file, for example with iconv"
        raise BadDocument("not UTF-8", message) from None
