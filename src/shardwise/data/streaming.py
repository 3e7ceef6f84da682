"""Data sets that are read from first to last, without an index or a download (`data.streaming`).

A stream has no number of documents and no document by number. So its order is that in which
`datasets` reads it, shuffled within a buffer, pass after pass. Slot j of G has the records j,
j + G, j + 2G, ... of this order. Each process that reads goes through the whole stream, and keeps
what its slots need. So rows depend neither on ranks nor on workers.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from shardwise.config import Data, UserError
from shardwise.data.record import Record
from shardwise.data.state import SlotState
from shardwise.data.tables import DatasetEntry, mixed, open_stream, read_stream, version

BUFFER = 1_000
"""The records among which the next one is drawn. They are read before the first step."""
MOST_LEFT_OUT = 10_000
"""How many records a slot may leave out one after the other."""
SAMPLE = 16
"""The records by which a resume knows a stream."""


@dataclass(frozen=True)
class Streamed:
    """The records of several data sets. A pickle of it has their names alone."""

    entries: tuple[DatasetEntry, ...]
    data: Data
    weights: tuple[float, ...] | None
    seed: int | None
    """None: in the order in which they are stored."""
    key: str

    @classmethod
    def of(
        cls, entries: str | Sequence[str], data: Data, seed: int | None, key: str = "data.train"
    ) -> Streamed:
        """Return the stream of these entries; UserError, which names `key`, for a file."""
        entries = [entries] if isinstance(entries, str) else entries
        weights = None if data.weights is None or seed is None else tuple(data.weights)
        return cls(tuple(DatasetEntry.streamed(e, key) for e in entries), data, weights, seed, key)

    @property
    def origins(self) -> frozenset[str]:
        """The documents that it names, however they are spelt."""
        origins = set()
        for entry in self.entries:
            files = entry.files(self.key)
            origins |= {str(file.resolve()) for file in files} or {entry.origin}
        return frozenset(origins)

    def once(self, epoch: int = 0) -> Iterator[Record]:
        """Yield the records of one pass; UserError where a data set cannot be read."""
        is_train = self.key == "data.train"
        most = self.data.max_documents if is_train else None
        streams = [open_stream(entry, self.data, self.key) for entry in self.entries]
        rows = mixed(streams, self.weights, self.seed, most)
        if self.seed is not None:
            rows = rows.shuffle(seed=self.seed % 2**32, buffer_size=BUFFER)
            rows.set_epoch(epoch)
        records = read_stream(rows, self.key)
        while (record := _next(records)) is not None:
            yield record

    def endless(self) -> Iterator[Record]:
        """Yield the records of pass after pass."""
        for epoch in itertools.count():
            record = None
            for record in self.once(epoch):
                yield record
            if record is None:
                names = ", ".join(map(str, self.entries))
                raise UserError(f"{self.key}: no document in {names}; give other data sets")

    def first(self, count: int) -> list[Record]:
        """Return the first records in the order in which they are stored."""
        stored = Streamed(self.entries, self.data, None, None, self.key)
        return list(itertools.islice(stored.once(), count))

    def fingerprint(self) -> str:
        """Return a short hash of the first records."""
        content = json.dumps(self.first(SAMPLE), default=str, sort_keys=True)
        return hashlib.blake2b(content.encode(), digest_size=8).hexdigest()


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
        self._kept: dict[int, Record] = {}

    def __getitem__(self, number: int) -> Record:
        """Return a record. Only those that waited at the begin can be had more than once."""
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
        self._stream = stream
        self._record: Record = {}

    def numbers(self) -> Iterator[int]:
        """Yield the number of each record of a new pass, which can then be read."""
        for number, record in enumerate(self._stream.once()):
            self._record = record
            yield number

    def __getitem__(self, _number: int) -> Record:
        return self._record

    def fingerprint(self) -> str:
        """Return a short hash of the first records."""
        return self._stream.fingerprint()

    def where(self, number: int) -> str:
        """Return the place of a record, for an error message."""
        return f"{self._stream.key}: record {number}"
