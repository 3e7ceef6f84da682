"""The documents of a run by number, whatever they lie in: text files, Parquet and CSV files, `datasets`."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from shardwise.config import Data, UserError
from shardwise.data.tables import is_dataset_folder, is_dataset_name, open_csv, open_dataset, open_parquet
from shardwise.data.text import Record, expanded, find_files, index_files, is_jsonl, path_exists, suffix

FIELDS = {"completion": ("prompt", "completion"), "chat": ("messages",)}
"""The fields that a format reads; `text` reads `data.text_field`."""

OPEN_TABLE = {".parquet": open_parquet, ".csv": open_csv, ".tsv": open_csv}
"""What opens a file that holds rows, by its ending."""


class Source(Protocol):
    """Documents by number, read when asked for; it can be pickled into a worker process without them."""

    def __len__(self) -> int: ...

    def __getitem__(self, document: int) -> Record:
        """The fields of a document; BadDocument where they cannot be read."""
        ...

    def where(self, document: int) -> str:
        """Where the document lies, for an error."""
        ...

    def fingerprint(self) -> str:
        """A short hash that is another one when documents were added, removed, or changed where it looks."""
        ...


@dataclass(frozen=True, eq=False)
class Corpus:
    """The documents of several sources, one after the other."""

    sources: tuple[Source, ...]
    ends: np.ndarray  # [sources] int64: how many documents there are up to the end of each source
    origins: frozenset[str]  # resolved files and folders, and names

    @classmethod
    def of(cls, sources: Sequence[Source], origins: frozenset[str]) -> Corpus:
        """The corpus of these sources."""
        return cls(tuple(sources), np.cumsum([len(source) for source in sources]), origins)

    def __len__(self) -> int:
        return int(self.ends[-1])

    def __getitem__(self, document: int) -> Record:
        source, number = self._find(document)
        return source[number]

    def where(self, document: int) -> str:
        """Where the document lies, for an error."""
        source, number = self._find(document)
        return source.where(number)

    def fingerprint(self) -> str:
        """A short hash of the sources'."""
        content = " ".join(source.fingerprint() for source in self.sources)
        return hashlib.blake2b(content.encode(), digest_size=8).hexdigest()

    def _find(self, document: int) -> tuple[Source, int]:
        index = int(np.searchsorted(self.ends, document, side="right"))
        return self.sources[index], int(document) - (int(self.ends[index - 1]) if index else 0)


def open_corpus(entries: str | Sequence[str], data: Data, key: str = "data.train") -> Corpus:
    """The corpus that these entries stand for: first the text files, then Parquet and CSV, then `datasets`.

    UserError (naming `key`) for an entry that gives nothing, and where there is no document at all.
    """
    entries = [entries] if isinstance(entries, str) else entries
    fields = FIELDS.get(data.format, (data.text_field,))
    for entry in entries:
        path_exists(expanded(entry), key)
    named = [entry for entry in entries if is_dataset_folder(expanded(entry)) or is_dataset_name(entry)]
    others = [entry for entry in entries if entry not in named]
    files = find_files(others, key) if others or not named else []
    tables = [file for file in files if suffix(file) in OPEN_TABLE]
    text = [file for file in files if suffix(file) not in OPEN_TABLE]
    plain = [file for file in text if not is_jsonl(file) and suffix(file) != ".json"]
    if plain and data.format != "text":
        raise UserError(
            f"{key}: {plain[0]} is plain text, which data.format {data.format} cannot use; "
            f"give JSONL, Parquet, CSV or datasets with the fields {', '.join(fields)}"
        )
    sources: list[Source] = [index_files(text, data.text_field)] if text else []
    sources += [OPEN_TABLE[suffix(file)](file, fields) for file in tables]
    sources += [open_dataset(entry, fields, key) for entry in named]
    origins = {str(file.resolve()) for file in files} | {_origin(entry) for entry in named}
    if not any(len(source) for source in sources):
        names = [*map(str, files), *named]
        more = f" and {len(names) - 3:,} others" if len(names) > 3 else ""
        raise UserError(f"{key}: no document in {', '.join(names[:3])}{more}; give files that are not empty")
    return Corpus.of(sources, frozenset(origins))


def _origin(dataset: str) -> str:
    path = expanded(dataset)
    return str(path.resolve()) if path.exists() else dataset


def join(corpora: Sequence[Corpus]) -> Corpus:
    """These corpora one after the other; UserError where two share a file, which would be drawn by both weights."""
    origins: set[str] = set()
    for corpus in corpora:
        if shared := origins & corpus.origins:
            raise UserError(f"data.weights: {min(shared)} is in two entries of data.train; take it out of one of them")
        origins |= corpus.origins
    return Corpus.of([source for corpus in corpora for source in corpus.sources], frozenset(origins))
