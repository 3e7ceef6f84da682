"""Text files: which files, which documents in them, and the tokenizer. The text itself is never kept in memory."""

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
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from shardwise.config import Model, UserError
from shardwise.ranges import shown

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
        matches = [path] if path_exists(path, key) else _glob(path, key)
        files = [file for match in matches for file in (_files_below(match) if match.is_dir() else [match])]
        if not files:
            what = "holds no file of text, JSONL or Parquet" if path.is_dir() else "matches no file"
            raise UserError(f"{key}: {pattern} {what}; give existing files, folders or glob patterns")
        for file in files:
            _check_kind(file)
        found.update((file.resolve(), file) for file in files)
    if not found:
        raise UserError(f"{key} is an empty list; give existing files, folders or glob patterns")
    return [found[resolved] for resolved in sorted(found)]


def path_exists(path: Path, key: str) -> bool:
    """Whether there is something at a path; UserError (naming `key`) where the system does not say."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (OSError, ValueError) as error:  # no permission, a name that is too long, a link to itself, a null byte
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
    """UserError where links lead from a folder into one above it: `glob` would follow them, each time in all ways."""
    real = os.path.realpath(folder)
    if real in above:
        raise UserError(f"{what} goes in a circle: {folder} is a link to a folder above it; name its folders singly")
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir() and not entry.name.startswith("."):
                _check_circles(Path(entry.path), above | {real}, what)


def _check_kind(file: Path) -> None:
    """UserError for what is no regular file: it cannot be read more than once, or never ends."""
    try:
        mode = file.stat().st_mode
    except OSError as error:
        _unreadable(file, error)
    if not stat.S_ISREG(mode):
        kinds = {stat.S_ISFIFO: "a pipe", stat.S_ISSOCK: "a socket", stat.S_ISCHR: "a device", stat.S_ISBLK: "a device"}
        what = next((kind for is_kind, kind in kinds.items() if is_kind(mode)), "no file")
        raise UserError(f"{file}: {what}, which cannot be read at any place and again; write it to a file first")


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
    sizes: np.ndarray  # [files] int64: the bytes of each file when it was indexed
    text_field: str  # the name of the one field that a document of plain text has

    def __len__(self) -> int:
        return int(self.ends[-1])

    def __getitem__(self, document: int) -> Record:
        path, _, raw = self._read(document)
        try:
            return _object(_decode(raw)) if is_jsonl(path) else {self.text_field: _decode(raw)}
        except BadDocument:
            if path.stat().st_size != self.sizes[self.files.index(path)]:
                raise UserError(f"{path}: the file has changed since the run began; start again") from None
            raise

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

    Text is not checked here but when a document is read. UserError for a file that cannot be read, for one that by its
    first bytes is not text, for `.json` (one value, not a document a line), and for JSON lines under another name,
    which nobody means as one text.
    """
    files, count = tuple(files), 0
    ends, offsets, sizes = array("q"), array("q"), array("q")
    for path in files:
        if suffix(path) == ".json":
            raise UserError(f"{path}: .json is not read; rename it to .jsonl if it holds one object a line")
        try:
            _check_text(path)
            if not is_jsonl(path) and _begins_with_json_lines(path):
                raise UserError(
                    f"{path}: its lines are JSON objects, but by its name it is one text; let the name end in .jsonl"
                )
            sizes.append(path.stat().st_size)
            starts = (start for start, _ in _lines(path)) if is_jsonl(path) else range(min(sizes[-1], 1))
            for start in starts:
                if count % STRIDE == 0:
                    offsets.append(start)
                count += 1
        except OSError as error:
            _unreadable(path, error)
        ends.append(count)
    return TextFiles(files, *(np.frombuffer(places, np.int64) for places in (ends, offsets, sizes)), text_field)


# fmt: off
FIRST_BYTES = {
    b"\x1f\x8b": ("compressed by gzip", "decompress it, as with gzip -d"),
    b"PK\x03\x04": ("a zip archive", "unpack it"),
    b"\x28\xb5\x2f\xfd": ("compressed by zstd", "decompress it, as with zstd -d"),
    b"\xfd7zXZ\x00": ("compressed by xz", "decompress it, as with xz -d"),
    b"7z\xbc\xaf\x27\x1c": ("a 7z archive", "unpack it"),
    **{b"BZh%d1AY&SY" % level: ("compressed by bzip2", "decompress it, as with bzip2 -d") for level in range(1, 10)},
    b"PAR1\x15": ("Parquet", "let its name end in .parquet"),
    b"ARROW1\x00\x00": ("an Arrow file", "give the folder that datasets saved it in, or write JSONL or Parquet"),
    b"\xff\xff\xff\xff": ("an Arrow stream", "give the folder that datasets saved it in, or write JSONL or Parquet"),
    **{bytes([0x80, protocol]): ("a pickle", "write its documents as JSONL or Parquet") for protocol in range(2, 6)},
    b"SQLite format 3\x00": ("an SQLite database", "write its rows as JSONL or Parquet"),
    b"%PDF-": ("a PDF", "write its text to a file"),
    b"\xff\xfe": ("UTF-16 text", "convert it, as with iconv -f UTF-16 -t UTF-8"),
    b"\xfe\xff": ("UTF-16 text", "convert it, as with iconv -f UTF-16 -t UTF-8"),
}
# fmt: on
"""How files begin that are given for text by mistake: what they are, and what to do."""


def _check_text(path: Path) -> None:
    """UserError where a file is by its first bytes no text in UTF-8, whatever its name."""
    with path.open("rb") as file:
        head = file.read(16)
    for first, (what, way_out) in FIRST_BYTES.items():
        if head.startswith(first):
            raise UserError(f"{path}: by its first bytes {what}, not UTF-8 text; {way_out}")


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


def find_tokenizer(*sources: str) -> PreTrainedTokenizerBase | None:
    """The tokenizer of the first of these folders or hub ids that has one; UserError if it cannot be loaded."""
    from transformers.utils import cached_file

    for source in sources:
        for name in ("tokenizer_config.json", "tokenizer.json"):
            try:
                cached_file(source, name)
            except OSError:
                continue
            return load_tokenizer(Model(source))
    return None
