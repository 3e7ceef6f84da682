"""Data sets that are read from first to last, without an index or a download (`data.streaming`).

A stream has no number of documents and no document by number. So its order is that in which
`datasets` reads it, shuffled within a buffer, pass after pass. Slot j of G has the records j,
j + G, j + 2G, ... of this order. Each process that reads goes through the whole stream, and keeps
what its slots need. So rows depend neither on ranks nor on workers.
"""

import hashlib
import itertools
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from shardwise.config import Data, UserError
from shardwise.data.record import Record
from shardwise.data.rows import JSON_ROW
from shardwise.data.state import SlotState
from shardwise.data.tables import (
    DatasetEntry,
    load_datasets,
    open_stream,
    read_stream,
    records_of,
    strings,
    version,
)

BUFFER = 1_000
"""The records among which the next one is drawn. They are read before the first step."""
MOST_LEFT_OUT = 10_000
"""How many records a slot may leave out one after the other."""
SAMPLE = 16
"""The records by which a resume knows a stream."""
GROUP = "shardwise: group of entries"
"""The field of a record that has the number of its group of entries, where streams are mixed."""


@dataclass(frozen=True)
class Streamed:
    """The records of several data sets. A pickle of it has their names alone."""

    entries: tuple[DatasetEntry, ...]
    groups: tuple[tuple[int, Data], ...]
    """[entries] The number of the group of each entry, and the keys by which it is read."""
    most: int | None
    weights: tuple[float, ...] | None
    seed: int | None
    """None: in the order in which they are stored."""
    key: str

    @classmethod
    def of(
        cls, data: Data, seed: int | None, key: Literal["train", "validation"] = "train"
    ) -> "Streamed":
        """Return the stream of `data.train` or `data.validation`; UserError for a file."""
        is_train, name = key == "train", f"data.{key}"
        groups = enumerate(data.groups(key), 0 if is_train else len(data.groups("train")))
        found = [
            (DatasetEntry.streamed(entry, name), (number, keys))
            for number, (entries, keys) in groups
            for entry in entries
        ]
        if not found:
            raise UserError(f"{name} is an empty list; give names of data sets")
        most = data.max_documents if is_train else None
        weights = data.shares if is_train and seed is not None else None
        return cls(*map(tuple, zip(*found)), most, weights, seed, name)

    @property
    def origins(self) -> frozenset[str]:
        """The documents that it names, however they are spelt."""
        origins = set()
        for entry in self.entries:
            files = entry.files(self.key)
            origins |= {str(file.resolve()) for file in files} or {entry.origin}
        return frozenset(origins)

    def once(self, epoch: int = 0) -> Iterator[tuple[Record, int]]:
        """Yield the records of one pass, each with the number of its group of entries.

        UserError where a data set cannot be read.
        """
        numbers, keys = zip(*self.groups)
        streams = [open_stream(entry, data, self.key) for entry, data in zip(self.entries, keys)]
        first = numbers[0]
        if set(numbers) != {first}:
            streams = list(map(with_group, streams, numbers))
        rows = mixed(streams, self.weights, self.seed, self.most)
        if self.seed is not None:
            rows = rows.shuffle(seed=self.seed % 2**32, buffer_size=BUFFER)
            rows.set_epoch(epoch)
        records = read_stream(rows, self.key)
        while (record := _next(records)) is not None:
            yield record, record.pop(GROUP, first)

    def endless(self) -> Iterator[tuple[Record, int]]:
        """Yield the records of pass after pass."""
        for epoch in itertools.count():
            record = None
            for record in self.once(epoch):
                yield record
            if record is None:
                names = ", ".join(map(str, self.entries))
                raise UserError(f"{self.key}: no document in {names}; give other data sets")

    def alone(self) -> "Iterator[Streamed]":
        """Yield the stream of each entry, in the order in which it is stored."""
        for entry, group in zip(self.entries, self.groups):
            yield replace(self, entries=(entry,), groups=(group,), weights=None, seed=None)

    def first(self, count: int | None) -> list[tuple[Record, int]]:
        """Return the first records in the order in which they are stored."""
        stored = replace(self, weights=None, seed=None)
        return list(itertools.islice(stored.once(), count))

    def fingerprint(self) -> str:
        """Return a short hash of the first records."""
        content = json.dumps(self.first(SAMPLE), default=str, sort_keys=True)
        return hashlib.blake2b(content.encode(), digest_size=8).hexdigest()


def with_group(rows: Any, number: int) -> Any:
    """Return a stream of JSON text, whose records have the number of their group of entries.

    Data sets whose columns differ can so become one stream.
    """
    features, arguments = strings([JSON_ROW]), {"rows": rows, "number": number}
    generated = load_datasets("data.streaming").IterableDataset.from_generator
    return generated(_numbered, features=features, gen_kwargs=arguments)


def _numbered(rows: Any, number: int) -> Iterator[dict[str, str]]:
    for record in records_of(rows):
        yield {JSON_ROW: json.dumps({**record, GROUP: number}, default=str)}


def mixed(
    streams: Sequence[Any], weights: Sequence[float] | None, seed: int | None, most: int | None
) -> Any:
    """Return one stream of several: one after the other, or drawn in proportion to the weights.

    It has the first `most` rows, with weights of each stream. A stream that ends is read again
    until all have ended.
    """
    datasets = load_datasets("data.streaming")
    if weights is None:
        rows = streams[0] if len(streams) == 1 else datasets.concatenate_datasets(list(streams))
        return rows if most is None else rows.take(most)
    taken = [rows if most is None else rows.take(most) for rows in streams]
    shares = [weight / sum(weights) for weight in weights]
    return datasets.interleave_datasets(
        taken, shares, seed=(seed or 0) % 2**32, stopping_strategy="all_exhausted"
    )


def _next(records: Iterator[Record]) -> Record | None:
    """Return the next record, None behind the last one.

    There `datasets` waits for threads of pyarrow, lest they outlive the process. A pass that was
    read to its end has left none. It still waits where a pass is given up.
    """
    from datasets import config

    settings, name = vars(config), "SLEEP_TIME_ON_THREADS_SHUTDOWN"
    wait, settings[name] = settings.get(name), 0
    try:
        return next(records, None)
    finally:
        settings[name] = wait


@dataclass(frozen=True)
class StreamOrder:
    """The order of a stream, as `Order` is that of documents by number; it has no end."""

    epochs = None
    num_read = sys.maxsize
    most_left_out = MOST_LEFT_OUT
    num_documents = None
    sizes = None

    @property
    def method(self) -> str:
        """The name of the order. Another version of `datasets` may have another one."""
        return f"stream of datasets {version()}, shuffled in a buffer of {BUFFER:,}"

    def __str__(self) -> str:
        return "the stream"

    def documents(self, numbers: np.ndarray) -> list[int]:
        """Return the records at these numbers of the stream: the numbers themselves."""
        return numbers.tolist()


class StreamReader:
    """The records of some slots by number, read in the order of the stream.

    What a slot needs later is kept, and what is no slot's is dropped. So to begin at a later place
    is to read all records before it.
    """

    def __init__(self, stream: Streamed, num_slots: int, begin: Mapping[int, SlotState]) -> None:
        self._records = enumerate(stream.endless())
        self._name = str(stream.entries[0]) if len(stream.entries) == 1 else stream.key
        self._num_slots = num_slots
        self._first = {slot: state.place for slot, state in begin.items()}
        self._waiting = {
            slot + place * num_slots
            for slot, state in begin.items()
            for place, _, _ in state.waiting
        }
        self._kept: dict[int, tuple[Record, int]] = {}

    def read(self, number: int) -> tuple[Record, int]:
        """Return a record and its group. Only one that waited at the begin can be had twice."""
        while number not in self._kept:
            at, record = next(self._records)
            if at in self._waiting or self._is_needed(at):
                self._kept[at] = record
        return self._kept[number] if number in self._waiting else self._kept.pop(number)

    def where(self, number: int) -> str:
        """Return the place of a record, for an error message."""
        return f"{self._name}: record {number} of the shuffled stream"

    def _is_needed(self, number: int) -> bool:
        place, slot = divmod(number, self._num_slots)
        return slot in self._first and place >= self._first[slot]


class StreamPass:
    """The records of one pass after the other, for evaluations."""

    def __init__(self, stream: Streamed) -> None:
        self.stream = stream
        self._record: tuple[Record, int] = {}, 0

    def numbers(self) -> Iterator[int]:
        """Yield the number of each record of a new pass, which can then be read."""
        for number, record in enumerate(self.stream.once()):
            self._record = record
            yield number

    def read(self, _number: int) -> tuple[Record, int]:
        """Return the record whose number was yielded last, and its group."""
        return self._record

    def fingerprint(self) -> str:
        """Return a short hash of the first records."""
        return self.stream.fingerprint()

    def where(self, number: int) -> str:
        """Return the place of a record, for an error message."""
        return f"{self.stream.key}: record {number}"


class StreamSample:
    """The first records of a stream by number, in the order in which they are stored."""

    def __init__(self, stream: Streamed, count: int | None = SAMPLE) -> None:
        self._records, self._name = stream.first(count), str(stream.entries[0])

    def __len__(self) -> int:
        return len(self._records)

    def read(self, number: int) -> tuple[Record, int]:
        """Return a record, and the number of its group of entries."""
        return self._records[number]

    def where(self, number: int) -> str:
        """Return the place of a record, for an error message."""
        return f"{self._name}: record {number}"
