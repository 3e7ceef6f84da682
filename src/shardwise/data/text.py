"""Text files: which files, which documents in them, and the tokenizer. The text itself is never kept in memory."""

from __future__ import annotations

import glob
import hashlib
import itertools
import json
import os
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from shardwise.config import Model, UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

STRIDE = 32
"""Of so many documents the place of one is kept: little to keep, and little to read past."""

SAMPLES, BLOCK = 18, 4096
"""A fingerprint looks at so many blocks of so many bytes of each file: at all of it up to 72 KiB."""

Record = dict[str, Any]
"""A document as it is stored: its fields by name."""


class BadDocument(UserError):
    """A document that cannot be used, and the kind of mistake; `data.on_error` says what follows."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


# fmt: off
SUFFIXES = frozenset({
    ".jsonl", ".ndjson", ".parquet", ".txt", ".md", ".rst", ".tex",
    ".py", ".c", ".h", ".cpp", ".cu", ".go", ".java", ".js", ".rs", ".sh", ".ts",
})
# fmt: on
"""What is taken from a folder; a file that is named, or that a glob pattern matches, may have any suffix."""


def expanded(entry: str) -> Path:
    """The path that an entry is; a `~name` of nobody stays as it is, as in a shell."""
    return Path(os.path.expanduser(entry))


def suffix(path: Path) -> str:
    """By what a file's name says what it is: its ending in lower case."""
    return path.suffix.lower()


def find_files(patterns: str | Sequence[str], key: str = "data.train") -> list[Path]:
    """The files that these files, folders and glob patterns (`**` for any depth) stand for, sorted, each once.

    A folder gives its files with one of SUFFIXES, at any depth, without hidden ones. Order and identity go by the
    resolved path, so the way a path is spelt does not change the order of the documents. UserError (naming `key`)
    for a pattern that gives no file.
    """
    found: dict[Path, Path] = {}
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        path = expanded(pattern)
        # A path that exists is taken literally, even where it holds a `[` or `*`.
        matches = [path] if path.exists() else [Path(match) for match in glob.glob(str(path), recursive=True)]
        files = [file for match in matches for file in (_files_below(match) if match.is_dir() else [match])]
        if not files:
            what = "holds no file of text, JSONL or Parquet" if path.is_dir() else "matches no file"
            raise UserError(f"{key}: {pattern} {what}; give existing files, folders or glob patterns")
        found.update((file.resolve(), file) for file in files)
    if not found:
        raise UserError(f"{key} is an empty list; give existing files, folders or glob patterns")
    return [found[resolved] for resolved in sorted(found)]


def _files_below(folder: Path) -> list[Path]:
    return [
        file
        for file in folder.rglob("*")
        if suffix(file) in SUFFIXES
        and not any(part.startswith(".") for part in file.relative_to(folder).parts)
        and file.is_file()
    ]


@dataclass(frozen=True, eq=False)
class TextFiles:
    """The documents of text files by number; of every STRIDE-th its place is kept, from which others are looked for."""

    files: tuple[Path, ...]
    ends: np.ndarray  # [files] int64: how many documents there are up to the end of each file
    offsets: np.ndarray  # [documents / STRIDE, rounded up] int64: the byte of its file where each STRIDE-th one begins
    text_field: str  # the name of the one field that a document of plain text has

    def __len__(self) -> int:
        return int(self.ends[-1])

    def __getitem__(self, document: int) -> Record:
        path, _, raw = self._read(document)
        return _object(_decode(raw)) if is_jsonl(path) else {self.text_field: _decode(raw)}

    def where(self, document: int) -> str:
        """The file and line of a document, for an error; it reads the file up to there."""
        path, offset, _ = self._read(document)
        return f"{path}:{_line_number(path, offset)}" if is_jsonl(path) else str(path)

    def fingerprint(self) -> str:
        """A short hash of the kept places, and of each file's size and a sample of its bytes (`_sample`)."""
        content = hashlib.blake2b(self.ends.tobytes() + self.offsets.tobytes(), digest_size=8)
        for path in self.files:
            try:
                for part in _sample(path):
                    content.update(part)
            except OSError as error:
                _unreadable(path, error)
        return content.hexdigest()

    def _read(self, document: int) -> tuple[Path, int, bytes]:
        """The file of a document, the byte where it begins there, and its bytes."""
        index = int(np.searchsorted(self.ends, document, side="right"))
        path, first = self.files[index], int(self.ends[index - 1]) if index else 0
        kept = document // STRIDE * STRIDE
        begin, offset = (kept, int(self.offsets[kept // STRIDE])) if kept > first else (first, 0)
        try:
            if is_jsonl(path):
                ended = offset, b""  # what a file gives that has become shorter
                return path, *next(itertools.islice(_lines(path, offset), document - begin, None), ended)
            return path, 0, path.read_bytes()
        except OSError as error:
            _unreadable(path, error)


def _sample(path: Path) -> Iterator[bytes]:
    """The size of a file, and SAMPLES blocks of it, evenly spaced from the first to the last."""
    size = path.stat().st_size
    yield str(size).encode()
    with path.open("rb") as file:
        for place in sorted({max(size - BLOCK, 0) * i // (SAMPLES - 1) for i in range(SAMPLES)}):
            file.seek(place)
            yield file.read(BLOCK)


def _object(line: str) -> Record:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise BadDocument("not JSON", f"not JSON ({error}); mend or remove the line") from None
    if not isinstance(record, dict):
        raise BadDocument("not JSON", f"a JSON {type(record).__name__}, not an object; mend or remove the line")
    return record


def index_files(files: Iterable[Path], text_field: str = "text") -> TextFiles:
    """Find the documents of these files: each line of a JSONL file that is not blank; any other file as a whole.

    Text is not checked here but when a document is read. UserError for a file that cannot be read, for `.json` (one
    value, not a document a line), and for JSON lines under another name, which nobody means as one text.
    """
    files, count = tuple(files), 0
    ends, offsets = array("q"), array("q")
    for path in files:
        if suffix(path) == ".json":
            raise UserError(f"{path}: .json is not read; rename it to .jsonl if it holds one object a line")
        try:
            if not is_jsonl(path) and _begins_with_json_lines(path):
                raise UserError(
                    f"{path}: its lines are JSON objects, but by its name it is one text; let the name end in .jsonl"
                )
            starts = (start for start, _ in _lines(path)) if is_jsonl(path) else range(min(path.stat().st_size, 1))
            for start in starts:
                if count % STRIDE == 0:
                    offsets.append(start)
                count += 1
        except OSError as error:
            _unreadable(path, error)
        ends.append(count)
    return TextFiles(files, np.frombuffer(ends, np.int64), np.frombuffer(offsets, np.int64), text_field)


def _lines(path: Path, offset: int = 0) -> Iterator[tuple[int, bytes]]:
    """The lines from this byte of the file on that are not blank, each with the byte where it begins."""
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
    # Counted only when an error needs it: an index of line numbers would be as large as the index of offsets.
    number = 1
    with path.open("rb") as file:
        while chunk := file.read(min(offset, 1 << 20)):
            number += chunk.count(b"\n")
            offset -= len(chunk)
    return number


def is_jsonl(path: Path) -> bool:
    """Whether the file holds a document a line, by its name."""
    return suffix(path) in (".jsonl", ".ndjson")


def _decode(raw: bytes) -> str:
    try:
        return raw.decode("utf-8-sig")  # some editors begin a file with a byte order mark, which is no text
    except UnicodeDecodeError as error:
        message = f"not UTF-8 (byte {error.start + 1}); convert the file, for example with iconv"
        raise BadDocument("not UTF-8", message) from None


def _unreadable(path: Path, error: OSError) -> NoReturn:
    raise UserError(f"{path}: cannot read the file ({error.strerror}); check the path and its permissions") from None


def load_tokenizer(model: Model) -> PreTrainedTokenizerBase:
    """The tokenizer in `model.tokenizer`, or else in `model.path`; a local folder is read without asking the hub.

    UserError where there is none, or one without a vocabulary (transformers builds that from a bare `config.json`).
    """
    from transformers import AutoTokenizer  # here, so that indexing and packing do without transformers

    source = model.tokenizer or model.path
    options: dict[str, Any] = {"trust_remote_code": model.trust_remote_code, "local_files_only": Path(source).is_dir()}
    way_out = "set model.tokenizer to a folder or hub id that has one"
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(source, **options)
    except Exception as error:  # what a file may make transformers and tokenizers raise is anything
        what = f"{type(error).__name__}: {str(error)[:200]}"
        where = "" if Path(source).is_dir() else "is no folder here, and from the hub "
        raise UserError(f"{source}: {where}no tokenizer could be loaded ({what}); {way_out}") from None
    if set(tokenizer.get_vocab()) <= set(tokenizer.all_special_tokens):
        raise UserError(f"{source}: no tokenizer files here, or an empty vocabulary; {way_out}")
    return tokenizer
