"""The documents of a run by number, from text files, Parquet and CSV files, and `datasets`."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np

from shardwise.config import Data, UserError
from shardwise.data.columns import fields_of
from shardwise.data.files import EXISTING, expanded, find_files, path_exists, resolved, tell
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


class CorpusPart(NamedTuple):
    """A file, table or data set of a corpus."""

    name: str
    group: int
    """The number of the group of entries that names it."""
    numbers: range
    """The numbers of its documents in the corpus."""


@dataclass(frozen=True, eq=False)
class Corpus:
    """The documents of several sources, one source behind the other."""

    sources: tuple[Source, ...]
    ends: np.ndarray
    """[sources] int64: the number of documents up to the end of each source, less those that
    `data.max_documents` leaves out."""
    origins: frozenset[str]  # resolved files and folders, and names of datasets
    groups: tuple[int, ...]
    """[sources] The number of the group of entries (`Data.groups`) that names each source."""

    def __len__(self) -> int:
        return int(self.ends[-1])

    def __getitem__(self, document: int) -> Record:
        return self.read(document)[0]

    def read(self, document: int) -> tuple[Record, int]:
        """Return a document, and the number of the group of entries that it is of."""
        index, number = self._find(document)
        return self.sources[index][number], self.groups[index]

    def where(self, document: int) -> str:
        """Return the place of a document, for an error message."""
        index, number = self._find(document)
        return self.sources[index].where(number)

    def first(self, most: int) -> "Corpus":
        """Return the corpus of the first `most` documents."""
        return replace(self, ends=np.minimum(self.ends, most))

    def parts(self) -> Iterator[CorpusPart]:
        """Yield the files, tables and data sets that have a document."""
        begin = 0
        for source, group, end in zip(self.sources, self.groups, self.ends.tolist()):
            is_text = isinstance(source, TextFiles)
            names = source.files if is_text else [source.name]
            ends = source.ends.tolist() if is_text else [len(source)]
            for name, first, last in zip(names, [0, *ends], ends):
                if numbers := range(begin + first, min(begin + last, end)):
                    yield CorpusPart(str(name), group, numbers)
            begin = end

    def fingerprint(self) -> str:
        """Return a short hash of the fingerprints of all sources."""
        content = " ".join(source.fingerprint() for source in self.sources)
        return hashlib.blake2b(content.encode(), digest_size=8).hexdigest()

    def _find(self, document: int) -> tuple[int, int]:
        """Return the index of the source of a document, and the number of the document in it."""
        index = int(np.searchsorted(self.ends, document, side="right"))
        begin = int(self.ends[index - 1]) if index else 0
        return index, int(document) - begin


def open_groups(data: Data, key: Literal["train", "validation"]) -> list[Corpus]:
    """Open the documents of each group of entries of `data.train` or `data.validation`.

    Of `data.train` the first `data.max_documents` are used, of entries with weights those of each.
    UserError as from `open_corpus`, for no entry at all, and where two groups share a file, whose
    documents would be read by both.
    """
    groups, name = data.groups(key), f"data.{key}"
    if not groups:
        raise UserError(f"{name} is an empty list; {EXISTING}")
    first = 0 if key == "train" else len(data.groups("train"))
    corpora = [
        open_corpus(entries, keys, name, number)
        for number, (entries, keys) in enumerate(groups, first)
    ]
    origins: set[str] = set()
    for corpus in corpora:
        if shared := origins & corpus.origins:
            raise UserError(f"{name}: {min(shared)} is in two entries; keep it in one")
        origins |= corpus.origins
    if key == "train" and data.max_documents is not None and data.shares is not None:
        return [corpus.first(data.max_documents) for corpus in corpora]
    return corpora


def open_corpus(
    entries: str | Sequence[str], data: Data, key: str = "data.train", group: int = 0
) -> Corpus:
    """Open the documents of these entries: files, folders, glob patterns, names of datasets.

    They are the group of this number. Text files come first, then Parquet and CSV files, then
    `datasets`. UserError, which names `key`, for an entry without a file, for plain text in another
    format than `text`, and if there is no document at all.
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
    ends = np.cumsum([len(source) for source in sources])
    return Corpus(tuple(sources), ends, frozenset(origins), (group,) * len(sources))


def join(corpora: Sequence[Corpus]) -> Corpus:
    """Join corpora, the documents of one behind those of the other."""
    begins = np.cumsum([0, *map(len, corpora)])
    ends = np.concatenate([begin + corpus.ends for begin, corpus in zip(begins, corpora)])
    return Corpus(
        tuple(source for corpus in corpora for source in corpus.sources),
        ends,
        frozenset().union(*(corpus.origins for corpus in corpora)),
        tuple(group for corpus in corpora for group in corpus.groups),
    )
