"""The documents of a run by number, from text files, Parquet and CSV files, and `datasets`."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shardwise.config import Data, UserError
from shardwise.data.columns import fields_of
from shardwise.data.files import expanded, find_files, path_exists, resolved, tell
from shardwise.data.record import Record
from shardwise.data.rows import check_text, is_rows, suffix
from shardwise.data.tables import DatasetEntry, Table, open_csv, open_dataset, open_parquet
from shardwise.data.text import TextFiles, index_files

OPEN_TABLE = {".parquet": open_parquet, ".csv": open_csv, ".tsv": open_csv}
"""The function that opens a table, by the suffix of its file."""

MANY_FILES, MANY_TABLES = 10_000, 200
"""A run says that it opens so many files of text, or tables: that takes a second or more."""

Source = TextFiles | Table
"""Documents by number, which are read when they are needed. A pickle of them holds no documents."""


@dataclass(frozen=True, eq=False)
class Corpus:
    """The documents of several sources, one source behind the other."""

    sources: tuple[Source, ...]
    ends: np.ndarray
    """[sources] int64: the number of documents up to the end of each source, less those that
    `data.max_documents` leaves out."""
    origins: frozenset[str]  # resolved files and folders, and names of datasets

    @classmethod
    def of(
        cls, sources: Sequence[Source], origins: frozenset[str], most: int | None = None
    ) -> Corpus:
        """Join these sources; of their documents the first `most` are used."""
        ends = np.cumsum([len(source) for source in sources])
        return cls(tuple(sources), ends if most is None else np.minimum(ends, most), origins)

    def __len__(self) -> int:
        return int(self.ends[-1])

    def __getitem__(self, document: int) -> Record:
        source, number = self._find(document)
        return source[number]

    def where(self, document: int) -> str:
        """Return the place of a document, for an error message."""
        source, number = self._find(document)
        return source.where(number)

    def fingerprint(self) -> str:
        """Return a short hash of the fingerprints of all sources."""
        content = " ".join(source.fingerprint() for source in self.sources)
        return hashlib.blake2b(content.encode(), digest_size=8).hexdigest()

    def _find(self, document: int) -> tuple[Source, int]:
        """Return the source of a document, and the number of the document in it."""
        index = int(np.searchsorted(self.ends, document, side="right"))
        begin = int(self.ends[index - 1]) if index else 0
        return self.sources[index], int(document) - begin


def open_corpus(entries: str | Sequence[str], data: Data, key: str = "data.train") -> Corpus:
    """Open the documents of these entries: files, folders, glob patterns, names of datasets.

    Text files come first, then Parquet and CSV files, then `datasets`. UserError, which names
    `key`, for an entry without a file, for plain text in another format than `text`, and if there
    is no document at all. Of `data.train` the first `data.max_documents` are used.
    """
    entries = [entries] if isinstance(entries, str) else entries
    datasets: list[DatasetEntry] = []
    patterns: list[str] = []
    for entry in entries:
        path_exists(expanded(entry), key)
        dataset = DatasetEntry.of(entry)
        if dataset is None:
            patterns.append(entry)
        else:
            datasets.append(dataset)
    files = find_files(patterns, key) if patterns or not datasets else []
    tables = [file for file in files if suffix(file) in OPEN_TABLE]
    text = [file for file in files if suffix(file) not in OPEN_TABLE]
    plain = [file for file in text if not is_rows(file)]
    if plain and data.format != "text":
        check_text(plain[0])
        raise UserError(
            f"{key}: {plain[0]} is plain text, which data.format {data.format} cannot use; give "
            f"JSONL, JSON, CSV, Parquet or datasets with the fields {', '.join(fields_of(data))}"
        )
    for kind, found, many in (("text", text, MANY_FILES), ("tables", tables, MANY_TABLES)):
        if len(found) >= many:
            tell(
                f"opening {len(found):,} files of {kind}, one after the other; the same documents "
                "in one JSONL or Parquet file begin sooner"
            )
    sources: list[Source] = [index_files(text, data.text_field)] if text else []
    sources += [OPEN_TABLE[suffix(file)](file, data) for file in tables]
    sources += [open_dataset(entry, data, key) for entry in datasets]
    if not any(len(source) for source in sources):
        names = [*map(str, files), *map(str, datasets)]
        others = f" and {len(names) - 3:,} others" if len(names) > 3 else ""
        first = ", ".join(names[:3])
        raise UserError(f"{key}: no document in {first}{others}; give files that are not empty")
    origins = set(map(str, resolved(files))) | {entry.origin for entry in datasets}
    most = data.max_documents if key == "data.train" else None
    return Corpus.of(sources, frozenset(origins), most)


def join(corpora: Sequence[Corpus]) -> Corpus:
    """Join corpora that have weights; UserError where two of them share a file.

    Documents of that file would be drawn by both weights.
    """
    origins: set[str] = set()
    for corpus in corpora:
        if shared := origins & corpus.origins:
            name = min(shared)
            raise UserError(f"data.weights: {name} is in two entries of data.train; keep it in one")
        origins |= corpus.origins
    sources = tuple(source for corpus in corpora for source in corpus.sources)
    begins = np.cumsum([0, *map(len, corpora)])
    ends = np.concatenate([begin + corpus.ends for begin, corpus in zip(begins, corpora)])
    return Corpus(sources, ends, frozenset(origins))
