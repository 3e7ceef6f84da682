"""Text on disk: which files, which documents in them, and the tokenizer. The text itself is never kept in memory."""

from __future__ import annotations

import glob
import hashlib
import json
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from shardwise.config import Model, UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# fmt: off
SUFFIXES = frozenset({
    ".jsonl", ".txt", ".md", ".rst", ".tex",
    ".py", ".c", ".h", ".cpp", ".cu", ".go", ".java", ".js", ".rs", ".sh", ".ts",
})
# fmt: on
"""What is taken from a folder; a file that is named, or that a glob pattern matches, may have any suffix."""


def find_files(patterns: str | Sequence[str], key: str = "data.train") -> list[Path]:
    """The files that these files, folders and glob patterns (`**` for any depth) stand for, sorted, each once.

    A folder gives its files with one of SUFFIXES, at any depth, without hidden ones. Order and identity go by the
    resolved path, so the way a path is spelt does not change the order of the documents. UserError (naming `key`)
    for a pattern that gives no file.
    """
    found: dict[Path, Path] = {}
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        path = Path(pattern).expanduser()
        # A path that exists is taken literally, even where it holds a `[` or `*`.
        matches = [path] if path.exists() else [Path(match) for match in glob.glob(str(path), recursive=True)]
        files = [file for match in matches for file in (_files_below(match) if match.is_dir() else [match])]
        if not files:
            what = "holds no text file" if path.is_dir() else "matches no file"
            raise UserError(f"{key}: {pattern} {what}; give existing files, folders or glob patterns")
        found.update((file.resolve(), file) for file in files)
    if not found:
        raise UserError(f"{key} is an empty list; give existing files, folders or glob patterns")
    return [found[resolved] for resolved in sorted(found)]


def _files_below(folder: Path) -> list[Path]:
    return [
        file
        for file in folder.rglob("*")
        if file.suffix in SUFFIXES
        and not any(part.startswith(".") for part in file.relative_to(folder).parts)
        and file.is_file()
    ]


@dataclass(frozen=True, eq=False)
class Corpus:
    """Documents by number: `corpus[i]` reads document i from its file; only places are kept (12 bytes a document)."""

    files: tuple[Path, ...]
    file_of: np.ndarray  # [documents] int32: index into `files`
    offsets: np.ndarray  # [documents] int64: where the document's line begins, in bytes; 0 for a file of plain text
    text_field: str

    def __len__(self) -> int:
        return len(self.offsets)

    def fingerprint(self) -> str:
        """A short hash of where the documents lie; it sees no change of text that moves no document."""
        content = hashlib.blake2b(np.bincount(self.file_of).tobytes(), digest_size=8)
        content.update(self.offsets.tobytes())
        return content.hexdigest()

    def __getitem__(self, document: int) -> str:
        path, offset = self.files[self.file_of[document]], int(self.offsets[document])
        jsonl = _is_jsonl(path)
        try:
            with path.open("rb") as file:
                file.seek(offset)
                raw = file.readline() if jsonl else file.read()
        except OSError as error:
            _unreadable(path, error)
        try:
            return _field(_decode(raw), self.text_field) if jsonl else _decode(raw)
        except UserError as error:
            place = f"{path}:{_line_number(path, offset)}" if jsonl else path
            raise UserError(f"{place}: {error}") from None


def _field(line: str, name: str) -> str:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise UserError(f"not JSON ({error}); mend or remove the line") from None
    if not isinstance(record, dict):
        raise UserError(f"a JSON {type(record).__name__}, not an object; mend or remove the line")
    if name not in record:
        raise UserError(f"no field {name!r}; set data.text_field to one of the line's fields: {', '.join(record)}")
    text = record[name]
    if not isinstance(text, str):
        raise UserError(f"field {name!r} holds a {type(text).__name__}, not a string; mend or remove the line")
    try:
        text.encode()  # JSON can escape half a surrogate pair, which no tokenizer takes
    except UnicodeEncodeError:
        raise UserError(f"field {name!r} escapes half a surrogate pair; mend or remove the line") from None
    return text


def index_corpus(files: Iterable[Path], text_field: str = "text", key: str = "data.train") -> Corpus:
    """Find the documents of these files: each line of a `.jsonl` file that is not blank; any other file as a whole.

    Text is not checked here but when a document is read. UserError for a file that cannot be read, for `.json`
    (one value, not a document a line), and where there is no document at all (empty files hold none).
    """
    files = tuple(files)
    file_of, offsets = array("i"), array("q")
    for index, path in enumerate(files):
        if path.suffix == ".json":
            raise UserError(f"{path}: .json is not read; rename it to .jsonl if it holds one object a line")
        try:
            starts = _line_starts(path) if _is_jsonl(path) else array("q", [0] if path.stat().st_size else [])
        except OSError as error:
            _unreadable(path, error)
        offsets.extend(starts)
        file_of.extend([index] * len(starts))
    if not offsets:
        raise UserError(f"{key}: no document in {len(files)} files; give files that are not empty")
    return Corpus(files, np.array(file_of, np.int32), np.array(offsets, np.int64), text_field)


def _line_starts(path: Path) -> array[int]:
    starts, offset = array("q"), 0
    with path.open("rb") as file:
        for line in file:
            if not line.isspace():
                starts.append(offset)
            offset += len(line)
    return starts


def _line_number(path: Path, offset: int) -> int:
    # Counted only when an error needs it: an index of line numbers would be as large as the index of offsets.
    number = 1
    with path.open("rb") as file:
        while chunk := file.read(min(offset, 1 << 20)):
            number += chunk.count(b"\n")
            offset -= len(chunk)
    return number


def _is_jsonl(path: Path) -> bool:
    return path.suffix == ".jsonl"


def _decode(raw: bytes) -> str:
    try:
        return raw.decode("utf-8-sig")  # some editors begin a file with a byte order mark, which is no text
    except UnicodeDecodeError as error:
        raise UserError(f"not UTF-8 (byte {error.start + 1}); convert the file, for example with iconv") from None


def _unreadable(path: Path, error: OSError) -> NoReturn:
    raise UserError(f"{path}: cannot read the file ({error.strerror}); check the path and its permissions") from None


def permutation(size: int, seed: int, epoch: int) -> np.ndarray:
    """The numbers 0 .. size-1 in an order that is a function of (seed, epoch) alone: [size] int64.

    They are sorted by raw 64-bit draws of PCG64, a stream that numpy keeps across versions; it makes no such promise
    for `Generator.permutation`, nor torch for `randperm`.
    """
    keys = np.random.PCG64(np.random.SeedSequence((seed % 2**64, epoch))).random_raw(size)
    return np.argsort(keys, kind="stable")


def split(corpus: Corpus, share: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Part the document numbers into (train, validation), sorted: `share` of them, drawn by `seed`, are held out.

    The count is rounded and kept between one document and all but one. UserError for a corpus of one document.
    """
    if len(corpus) < 2:
        raise UserError(
            f"data.validation: a share of {share} cannot be held out, the whole corpus is one document; "
            "give validation files of their own, or 0"
        )
    held_out = min(max(round(share * len(corpus)), 1), len(corpus) - 1)
    order = permutation(len(corpus), seed, epoch=0)
    return np.sort(order[held_out:]), np.sort(order[:held_out])


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
    except (OSError, ValueError, ImportError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{source}: no tokenizer could be loaded ({reason}); {way_out}") from None
    if set(tokenizer.get_vocab()) <= set(tokenizer.all_special_tokens):
        raise UserError(f"{source}: no tokenizer files here, or an empty vocabulary; {way_out}")
    return tokenizer
