"""The documents and rows of the slots of a rank, read here or in worker processes."""

import itertools
import multiprocessing
import os
import threading
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from shardwise.config import UserError
from shardwise.data.chat_format import Encoded
from shardwise.data.corpus import Corpus
from shardwise.data.formats import LEFT_OVER, LONGER_ROWS, TOO_LONG, Encoder
from shardwise.data.order import Order
from shardwise.data.packing import Document, Row
from shardwise.data.preference import NOTHING
from shardwise.data.record import BadDocument, OutOfBounds, Record
from shardwise.data.shares import Item, SlotShare, left_by_all, remaining
from shardwise.data.state import Rest, SlotState, describe
from shardwise.data.streaming import Streamed, StreamOrder, StreamPass, StreamReader, StreamSample

SlotRows = dict[int, tuple[np.ndarray, "SlotState | tuple[int, SlotState]"]]
"""The next rows [3, T+1] of some slots, and the state behind each: of the slot's own share, or how
many rows of the rest were given out, and the state of the rest."""

Documents = Corpus | StreamReader | StreamPass | StreamSample
"""Records by number."""

Mark = tuple[int, SlotState]
"""How many rows a slot has had, and its state behind them."""

MOST_MARKS = 32
"""The marks of a slot, evenly spaced: with more, less is read again to find a place between two."""


def encoded(corpus: Documents, number: int, encoder: Encoder) -> tuple[Record, int, list[Encoded]]:
    """Return a record, the number of its group of entries, and its documents as tokens.

    UserError, with its place, for a record that cannot be used; BadDocument where `data.on_error`
    is skip.
    """
    try:
        record, group = corpus.read(number)
        return record, group, encoder.encode(record, group)
    except OutOfBounds as error:
        raise UserError(f"{corpus.where(number)}: {error}") from None
    except BadDocument as error:
        if encoder.data.on_error == "skip":
            raise
        raise UserError(f"{corpus.where(number)}: {encoder.with_entry(error)}") from None


def read_documents(
    corpus: Documents, number: int, encoder: Encoder, start: SlotState, other: int | None = None
) -> tuple[list[Document], Counter[str]]:
    """Return the documents of a record that have a target, and how many were left out, by reason.

    `other` is the number of the record whose answer one with a label is compared with: none where
    it is the record itself.
    Without such a document the record is left out as one. UserError, with its place, for a record
    that cannot be used, unless `data.on_error` is skip.
    """
    try:
        record, group, texts = encoded(corpus, number, encoder)
        others = None
        if encoder.reads_labels and other is not None:
            others = [NOTHING] if other == number else _answers(corpus, other, encoder)
        documents = encoder.cut(texts, start, others)
    except BadDocument as error:
        return [], Counter([error.reason])
    left_out = encoder.left_out(record, documents, group)
    documents = [document for document in documents if document.has_target()]
    last = len(documents) - 1
    return [
        replace(document, siblings=len(documents), is_last=i == last)
        for i, document in enumerate(documents)
    ], left_out


def _answers(corpus: Documents, number: int, encoder: Encoder) -> list[Encoded]:
    """Return what a record gives; nothing where it cannot be used."""
    try:
        return encoded(corpus, number, encoder)[2]
    except BadDocument:
        return [NOTHING]


@dataclass(frozen=True, eq=False)
class TrainStream(IterableDataset):
    """The rows of some slots, step after step, without end; in a worker, of the worker's own slots.

    Worker w of W reads every W-th slot from w on. So one worker alone tokenises a document, and the
    rows of a slot do not depend on W. What the slots leave at the end (`Rest`) each worker reads. A
    UserError is an item of the stream: raised in a worker, it would be wrapped in a traceback by
    torch.
    """

    corpus: Corpus | Streamed
    order: Order | StreamOrder
    encoder: Encoder
    global_batch_size: int
    step: int  # the last one that is done
    begin: Mapping[int, SlotState]  # state by slot
    rest: Rest | None

    def __iter__(self) -> Iterator[SlotRows | UserError]:
        slots = _of_worker(list(self.begin))
        corpus = self._opened(slots)
        streams = {slot: self._own_rows(slot, corpus) for slot in slots}
        rest_rows, number, row = self._rest_rows(corpus), -1, None
        try:
            for step in itertools.count(self.step + 1):
                rows: SlotRows = {}
                rest_numbers = None if self.rest is None else self.rest.rows(step)
                for slot in slots:
                    if rest_numbers is None or rest_numbers[slot] < 0:
                        rows[slot] = next(streams[slot])
                        continue
                    while number < rest_numbers[slot]:
                        number, row = next(rest_rows)
                    assert row is not None
                    rows[slot] = row
                yield rows
        except UserError as error:
            yield error

    def rows(self, slot: int, corpus: Documents) -> Iterator[Row]:
        """Yield the rows of a slot, as if its own share were no other's to read."""
        share = SlotShare(self.order, slot, self.global_batch_size)
        what = f"slot {slot} of training.global_batch_size {self.global_batch_size}"
        return self.encoder.rows(self._documents(share, corpus, self.begin[slot], what, []))

    def marks(self, slot: int, most: int | None) -> list[Mark]:
        """Read a slot, or its next `most` rows; return the last marks and some before, in order."""
        rows = itertools.islice(self.rows(slot, self._opened([slot])), most)
        marks: list[Mark] = [(0, self.begin[slot])]
        last, stride = deque[Mark](maxlen=1 + max(LEFT_OVER.values())), 1
        for number, (_, state) in enumerate(rows, 1):
            last.append((number, state))
            if number % stride == 0:
                marks.append(last[-1])
            if len(marks) > MOST_MARKS:
                marks, stride = marks[::2], 2 * stride
        return sorted(dict([*marks, *last]).items(), key=itemgetter(0))

    def num_rest_rows(self) -> int:
        """Return how many rows the rest has."""
        return sum(1 for _ in self._packed_rest(self._opened([]), []))

    def _opened(self, slots: Sequence[int]) -> Documents:
        """Return the documents that these slots read, by number."""
        if isinstance(self.corpus, Corpus):
            return self.corpus
        return StreamReader(
            self.corpus, self.global_batch_size, {slot: self.begin[slot] for slot in slots}
        )

    def _own_rows(self, slot: int, corpus: Documents) -> Iterator[Row]:
        """Yield the rows of a slot; behind the last one of all, rows of padding."""
        state = self.begin[slot]
        for row, state in self.rows(slot, corpus):
            yield row, state
        yield from itertools.repeat((self._padding(), state))

    def _rest_rows(self, corpus: Documents) -> Iterator[tuple[int, tuple[np.ndarray, Mark]]]:
        """Yield the number of each row of the rest, and the row; behind the last one, padding.

        The last row has the state at the end, which also counts what is left out behind it.
        """
        assert self.rest is not None
        ends: list[SlotState] = []
        rows, number = self._packed_rest(corpus, ends), self.rest.row
        row = next(rows, None)
        while row is not None:
            following = next(rows, None)
            state = row[1] if following is not None else ends[0]
            yield number, (row[0], (number + 1, state))
            number, row = number + 1, following
        end = ends[0] if ends else self.rest.state
        for behind in itertools.count(number):
            yield behind, (self._padding(), (number, end))

    def _packed_rest(self, corpus: Documents, ends: list[SlotState]) -> Iterator[Row]:
        """Yield the rows of the rest from where it was read to."""
        assert self.rest is not None
        share, what = left_by_all(self.order, self.rest), "the end of training.epochs"
        documents = self._documents(share, corpus, self.rest.state, what, ends)
        return self.encoder.rows(documents)

    def _padding(self) -> np.ndarray:
        return self.encoder.padding()

    def _documents(
        self,
        share: SlotShare | list[Item],
        corpus: Documents,
        begin: SlotState,
        what: str,
        ends: list[SlotState],
    ) -> Iterator[Document]:
        """Yield the documents of a stream that have a target, from where it begins.

        A record is tokenised once, however many of its documents wait. The state behind the last
        document is added to `ends`. `what` names the stream in an error.
        """
        end = replace(begin, is_begun=False, waiting=())
        num_waiting = len({place for place, *_ in begin.waiting})
        # Records that were left out one after the other. Without a limit a slot could search
        # for ever.
        in_a_row = Counter[str]()
        for index, (place, item) in enumerate(remaining(begin, share), 1 - num_waiting):
            read, left_out = read_documents(
                corpus, item.number, self.encoder, SlotState(place), item.following
            )
            documents = item.left(read)
            is_new, is_waiting = place >= begin.place + begin.is_within, index <= 0
            if not item.was_begun:  # the state does not count long documents that only wait
                end = replace(end, long=end.long + any(document.is_long for document in read))
            if is_new:
                documents = [document for document in documents if document.has_target()]
                skipped = Counter(end.skipped) + (Counter() if item.was_read else left_out)
                continued = end.continued + item.was_begun
                end = replace(end, skipped=dict(skipped), continued=continued)
            if not is_waiting:
                end = replace(end, place=place + 1, part=0, token=0)
            if not documents:
                in_a_row += left_out
                self._check_left_out(what, in_a_row)
                continue
            in_a_row.clear()
            for document in documents:
                is_last = document is documents[-1] and (index == 0 or not is_waiting)
                at = document.start
                start = replace(end, place=place, part=at.part, token=at.token)
                before = end if is_waiting else None
                yield replace(document, start=start, is_last=is_last, read_before=before)
        ends.append(end)

    def _check_left_out(self, what: str, in_a_row: Counter[str]) -> None:
        """Raise UserError where a stream has left out more records than there are."""
        if in_a_row.total() > self.order.most_left_out:
            way_out = "give longer documents, other ones or more of them, or a smaller batch"
            if set(in_a_row) == {TOO_LONG}:
                way_out = LONGER_ROWS
            raise UserError(
                f"data.train: {what} finds no target in {self.order}; it left out the last "
                f"{in_a_row.total()} that it read: {describe(in_a_row)}; {way_out}"
            )


@dataclass(frozen=True, eq=False)
class Marks(IterableDataset):
    """The marks of some slots' own shares; in a worker, of the worker's own slots."""

    stream: TrainStream
    num_rows: Mapping[int, int | None]
    """The number of rows that each slot reads; None: all."""

    def __iter__(self) -> Iterator[tuple[int, list[Mark]] | UserError]:
        try:
            for slot in _of_worker(list(self.num_rows)):
                yield slot, self.stream.marks(slot, self.num_rows[slot])
        except UserError as error:
            yield error


def _of_worker(slots: list[int]) -> list[int]:
    """Return the slots that this process reads; all of them where it is no worker."""
    worker = get_worker_info()
    return slots if worker is None else slots[worker.id :: worker.num_workers]


def items(stream: TrainStream | Marks, encoder: Encoder, num_workers: int) -> Iterator[Any]:
    """Iterate over the stream here, or over its parts in worker processes, worker after worker.

    Workers come from a fork server, a clean process with one thread. To fork this process is unsafe
    under NCCL and gloo, whose threads hold locks, and each spawned process would import torch. The
    server imports once what workers need.
    """
    if num_workers == 0:
        return iter(stream)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, type(encoder.tokenizer).__module__])
    loader = DataLoader(
        stream,
        batch_size=None,
        num_workers=num_workers,
        # The default moves arrays into shared memory, which is scarce in containers.
        collate_fn=_unchanged,
        multiprocessing_context=context,
        worker_init_fn=_end_with_parent,
        # Nothing here uses its seeds. Without it DataLoader draws them from the run's generator.
        generator=torch.Generator(),
    )
    return iter(loader)


def _end_with_parent(_worker: int) -> None:
    # A killed rank cannot stop its workers. torch lets a worker watch its parent process, but that
    # is the fork server, which lives as long as its workers. So a worker waits for the rank itself,
    # on a pipe that closes when the rank ends.
    rank = multiprocessing.parent_process()
    assert rank is not None

    def wait() -> None:
        rank.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def _unchanged(item: Any) -> Any:
    return item
