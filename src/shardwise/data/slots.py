"""The documents and rows of the slots of a rank, read here or in worker processes."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from shardwise.config import UserError
from shardwise.data.corpus import Corpus
from shardwise.data.formats import ALL, Encoder, Piece
from shardwise.data.order import Order
from shardwise.data.packing import Document, Row, empty_row
from shardwise.data.record import BadDocument, OutOfBounds
from shardwise.data.state import SlotState, describe
from shardwise.data.streaming import Streamed, StreamOrder, StreamPass, StreamReader

SlotRows = dict[int, Row]
"""The next row of some slots, by slot."""

Documents = Corpus | StreamReader | StreamPass
"""Records by number."""


def read_documents(
    corpus: Documents, number: int, encoder: Encoder, start: SlotState, piece: Piece = ALL
) -> tuple[list[Document], Counter[str]]:
    """Return the documents of a record that have a target, and how many were left out, by reason.

    Without such a document the record is left out as one. UserError, with its place, for a record
    that cannot be used, unless `data.on_error` is skip.
    """
    try:
        record = corpus[number]
        try:
            documents = encoder.documents(record, start, piece)
        except OutOfBounds as error:
            raise UserError(f"{corpus.where(number)}: {error}") from None
    except BadDocument as error:
        if encoder.data.on_error == "fail":
            raise UserError(f"{corpus.where(number)}: {error}") from None
        return [], Counter([error.reason])
    left_out = encoder.left_out(record, documents)
    documents = [document for document in documents if document.has_target()]
    last = len(documents) - 1
    return [
        replace(document, siblings=len(documents), is_last=i == last)
        for i, document in enumerate(documents)
    ], left_out


@dataclass(frozen=True, eq=False)
class TrainStream(IterableDataset):
    """The rows of some slots, step after step, without end; in a worker, of the worker's own slots.

    Worker w of W reads every W-th slot from w on. So one worker alone tokenises a document, and the
    rows of a slot do not depend on W. A UserError is an item of the stream: raised in a worker, it
    would be wrapped in a traceback by torch.
    """

    corpus: Corpus | Streamed
    order: Order | StreamOrder
    encoder: Encoder
    global_batch_size: int
    begin: Mapping[int, SlotState]  # by slot

    def __iter__(self) -> Iterator[SlotRows | UserError]:
        slots = _of_worker(list(self.begin))
        corpus = self._opened(slots)
        streams = {slot: self._rows(slot, corpus) for slot in slots}
        try:
            while True:
                yield {slot: next(stream) for slot, stream in streams.items()}
        except UserError as error:
            yield error

    def num_rows(self, slot: int) -> int:
        """Return how many rows a slot still has until `training.epochs` end."""
        documents = self._documents(slot, self._opened([slot]), ends=[])
        return sum(1 for _ in self.encoder.rows(documents))

    def _opened(self, slots: Sequence[int]) -> Documents:
        """Return the documents that these slots read, by number."""
        if isinstance(self.corpus, Corpus):
            return self.corpus
        return StreamReader(
            self.corpus, self.global_batch_size, {slot: self.begin[slot] for slot in slots}
        )

    def _rows(self, slot: int, corpus: Documents) -> Iterator[Row]:
        """Yield the rows of a slot; behind the last one of `training.epochs`, rows of padding.

        The last row has the state at the end, which also counts what is left out behind it.
        """
        ends: list[SlotState] = []
        rows = self.encoder.rows(self._documents(slot, corpus, ends))
        if self.order.num_read is None:
            yield from rows
        row = next(rows, None)
        while row is not None:
            following = next(rows, None)
            yield row if following is not None else (row[0], ends[0])
            row = following
        padding = empty_row(self.encoder.data.sequence_length, self.encoder.fill)
        while True:
            yield padding, ends[0]

    def _documents(self, slot: int, corpus: Documents, ends: list[SlotState]) -> Iterator[Document]:
        """Yield the documents of a slot that have a target, from where it begins.

        First come those that were read before and still wait for a row. Of the next record come the
        documents from `begin.part` on, and of this one the tokens from `begin.token` on. The state
        behind the last document is added to `ends`.
        """
        begin = self.begin[slot]
        skipped, num_long = Counter(begin.skipped), begin.long
        for index, (epoch, place, part, _) in enumerate(begin.waiting, 1):
            number, piece = self._record(slot, epoch, place)
            at = SlotState(epoch, place)
            read, _ = read_documents(corpus, number, self.encoder, at, piece)
            document = next(document for document in read if document.start.part == part)
            if document is read[0] and (epoch, place) in begin.unbegun():
                # The state does not count long documents that only wait.
                num_long += any(document.is_long for document in read)
            read_before = replace(begin, waiting=(), long=num_long)
            is_last = index == len(begin.waiting)
            yield replace(document, is_last=is_last, read_before=read_before)
        # Records that were left out one after the other. Without a limit a slot could search
        # for ever.
        in_a_row = Counter[str]()
        end = replace(begin, waiting=(), long=num_long)
        places = self.order.places(slot, self.global_batch_size, begin.epoch, begin.place)
        for count, (epoch, place, number, piece) in enumerate(places, begin.documents):
            start = SlotState(epoch, place, documents=count)
            read, left_out = read_documents(corpus, number, self.encoder, start, piece)
            is_rest = count == begin.documents and begin.part + begin.token > 0
            if not is_rest:
                num_long += any(document.is_long for document in read)
                skipped += left_out
            end = SlotState(
                epoch, place + 1, documents=count + 1, long=num_long, skipped=dict(skipped)
            )
            if not read:
                in_a_row += left_out
                self._check_left_out(slot, in_a_row)
                continue
            in_a_row.clear()
            for document in read:
                if is_rest and document.start.part < begin.part:
                    continue
                cut = begin.token if is_rest and document.start.part == begin.part else 0
                start = replace(document.start, long=num_long, skipped=end.skipped)
                yield replace(document, start=start).after(cut)
        ends.append(end)

    def _record(self, slot: int, epoch: int, place: int) -> tuple[int, Piece]:
        """Return the number of the record at a place of a slot's share, and its piece of it."""
        places = self.order.places(slot, self.global_batch_size, epoch, place)
        # Fewer epochs than before may end before a document that was read ahead.
        for _, _, number, piece in places:
            return number, piece
        raise UserError(
            "training.epochs: the checkpoint has read more documents than that already; give more"
        )

    def _check_left_out(self, slot: int, in_a_row: Counter[str]) -> None:
        """Raise UserError where a slot has left out more records than there are."""
        if in_a_row.total() > self.order.most_left_out:
            raise UserError(
                f"data.train: slot {slot} of training.global_batch_size {self.global_batch_size} "
                f"finds no target in {self.order}; it left out the last {in_a_row.total()} that it "
                f"read: {describe(in_a_row)}; give longer documents, other ones or more of them, "
                "or a smaller batch"
            )


@dataclass(frozen=True, eq=False)
class RowCounts(IterableDataset):
    """How many rows each of some slots still has; in a worker, each of the worker's own slots."""

    stream: TrainStream

    def __iter__(self) -> Iterator[int | UserError]:
        try:
            for slot in _of_worker(list(self.stream.begin)):
                yield self.stream.num_rows(slot)
        except UserError as error:
            yield error


def _of_worker(slots: list[int]) -> list[int]:
    """Return the slots that this process reads; all of them where it is no worker."""
    worker = get_worker_info()
    return slots if worker is None else slots[worker.id :: worker.num_workers]


def items(stream: TrainStream | RowCounts, encoder: Encoder, num_workers: int) -> Iterator[Any]:
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
