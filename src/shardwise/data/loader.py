"""Batches of a run: a function of (corpus, seed, step) alone, whatever the ranks, micro-batches and workers.

Slot j of every global batch reads its own stream of documents, and a rank reads the streams of its slots. In each
epoch all documents are put into an order drawn by (seed, epoch), and slot j takes those at places j, j + G, j + 2G, ...
(G: the global batch size), so that an epoch holds each document once (with `data.weights` see `Order`). When a slot has
read its share it goes on with its share of the next epoch, without waiting for the other slots. A document that is left
out leaves its place empty: no other document moves to another slot for it.

Where a slot is in its stream travels with its rows, so what is saved (`Loaders.state`) belongs to the last batch handed
out, however far workers have read ahead; a resume goes on there, on any number of ranks, without reading what lies
before.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import threading
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from shardwise.config import RunConfig, Training, UserError
from shardwise.data.corpus import Corpus, join, open_corpus
from shardwise.data.formats import WHOLE, Encoder, Piece
from shardwise.data.order import Order, split
from shardwise.data.packing import Document, Row, empty_row, to_batch
from shardwise.data.state import Counts, LoaderState, SlotState, describe, loader_state, read_from, starts
from shardwise.data.text import BadDocument
from shardwise.interfaces import Batch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SlotRows = dict[int, Row]
"""The next row of some slots, by slot."""


@dataclass(frozen=True)
class Loaders:
    """What a rank reads: for training without end, and for evaluation."""

    train: Generator[list[Batch], None, None]
    """For each optimizer step, from 1, this rank's micro-batches; `close()` ends the worker processes."""
    validation: Validation | None
    """None: nothing held out."""
    state: Callable[[], LoaderState]
    """Where this rank's slots are after the last step that `train` has handed out; plain data, safe for JSON."""


def build_loaders(
    cfg: RunConfig, tokenizer: PreTrainedTokenizerBase, slots: range, state: LoaderState | None = None
) -> Loaders:
    """The batches of the rank that reads these slots of each global batch, from the step after that of `state` on.

    `state` holds all slots of the global batch (`merge_states`), so that a run can go on with other numbers of ranks,
    workers and micro-batches.

    Text is tokenised as it is read; for training in worker processes that start with the first step, of which there
    are no more than the rank has slots. Call `train.close()` when done, also after an error. UserError for files or a
    tokenizer that do not serve, and for a state that was saved with other data; from the batches for documents.
    """
    batch_size, micro_batch_size = cfg.training.global_batch_size, cfg.training.micro_batch_size
    if len(slots) % micro_batch_size:
        raise UserError(
            f"training.micro_batch_size {micro_batch_size} does not divide the {len(slots)} rows that a rank takes of "
            f"training.global_batch_size {batch_size}; change one of them"
        )
    encoder = Encoder.of(tokenizer, cfg.data)
    corpus, order, held_out = _documents(cfg)
    if len(order) < batch_size and cfg.data.format != "text":
        raise UserError(
            f"data.train: {len(order)} documents are fewer than the {batch_size} rows of training.global_batch_size, "
            f"and with data.format {cfg.data.format} rows cannot share one; give more documents or a smaller batch"
        )
    _check_first(corpus, encoder)
    source = read_from(cfg, corpus, held_out and held_out[0], len(order), tokenizer)
    step, begin = starts(state, source, slots)
    stream = TrainStream(corpus, order, encoder, batch_size, begin)
    reading = _Reading(step, begin)
    return Loaders(
        _train_batches(stream, reading, min(cfg.data.workers, len(slots)), micro_batch_size),
        None if held_out is None else Validation(*held_out, encoder, cfg.training, slots),
        lambda: loader_state(reading.step, source, reading.slots),
    )


def _documents(cfg: RunConfig) -> tuple[Corpus, Order, tuple[Corpus, Callable[[], Iterable[int]]] | None]:
    """The corpus and the order to train in; and for validation a corpus, and which documents to read each time."""
    data, weights = cfg.data, None
    if data.weights is None:
        corpus = open_corpus(data.train, data)
        sizes = [len(corpus)]
    else:
        entries = [data.train] if isinstance(data.train, str) else data.train
        corpora = [open_corpus(entry, data) for entry in entries]
        corpus, weights = join(corpora), tuple(data.weights)
        sizes = list(map(len, corpora))
    files = isinstance(data.validation, str | list)
    train, held_out = split(sizes, 0.0 if files else data.validation)
    order = Order(train, weights, cfg.training.seed)
    if files:
        validation = open_corpus(data.validation, data, "data.validation")
        if shared := corpus.origins & validation.origins:
            raise UserError(f"data.validation: {min(shared)} is in data.train too; take it out of one of them")
        return corpus, order, (validation, lambda: range(len(validation)))
    if data.validation == 0:
        return corpus, order, None
    drawn = Order(held_out, None, cfg.training.seed)
    return corpus, order, (corpus, lambda: drawn.read(1, range(len(drawn))))


def _check_first(corpus: Corpus, encoder: Encoder) -> None:
    """Check the encoder on the first document that can be used, before a model is built for the others."""
    for number in range(min(len(corpus), 100)):
        try:
            return encoder.check(corpus[number])
        except BadDocument as error:
            if encoder.data.on_error == "fail":
                raise UserError(f"{corpus.where(number)}: {error}") from None


def read_document(
    corpus: Corpus, number: int, encoder: Encoder, start: SlotState, piece: Piece = WHOLE
) -> Document | str:
    """A document of the corpus (`Encoder.document`), or why it is left out.

    UserError, which names its place, for one that cannot be used, unless `data.on_error` is skip.
    """
    try:
        record = corpus[number]
        document = encoder.document(record, start, piece)
    except BadDocument as error:
        if encoder.data.on_error == "fail":
            raise UserError(f"{corpus.where(number)}: {error}") from None
        return error.reason
    return document if document.targets[1:].any() else encoder.why_no_target(record)


@dataclass(frozen=True, eq=False)
class TrainStream(IterableDataset):
    """The rows of some slots, step after step without end; in a worker process those of the worker's own slots.

    Worker w of W reads each W-th slot from w on, so a document is tokenised by one worker only, and what a slot gives
    does not depend on W. A UserError is handed on as an item: raised in a worker, torch would wrap it in a traceback.
    """

    corpus: Corpus
    order: Order
    encoder: Encoder
    global_batch_size: int
    begin: Mapping[int, SlotState]  # by slot

    def __iter__(self) -> Iterator[SlotRows | UserError]:
        worker, slots = get_worker_info(), list(self.begin)
        if worker is not None:
            slots = slots[worker.id :: worker.num_workers]
        streams = {slot: self.encoder.rows(self._documents(slot)) for slot in slots}
        try:
            while True:
                yield {slot: next(stream) for slot, stream in streams.items()}
        except UserError as error:
            yield error

    def _documents(self, slot: int) -> Iterator[Document]:
        """The slot's documents that have something to predict; of the first one what is left of it."""
        begin = self.begin[slot]
        skipped, cut = Counter(begin.skipped), begin.token
        barren = Counter[str]()  # documents in a row that were left out; a slot must not look at them for ever
        for count, (epoch, place, number, piece) in enumerate(self._places(slot, begin), begin.documents):
            start = SlotState(epoch, place, 0, count, dict(skipped))
            document = read_document(self.corpus, number, self.encoder, start, piece)
            if isinstance(document, Document):
                yield document.after(cut)
                cut = 0
                barren.clear()
                continue
            barren[document] += 1
            skipped[document] += 1
            if barren.total() > len(self.order) + 100:
                raise UserError(
                    f"data.train: slot {slot} of training.global_batch_size {self.global_batch_size} finds nothing to "
                    f"predict in the {len(self.order)} documents; it has read {barren.total()} one after the other, "
                    f"many of them several times, and left out {describe(barren)}; give longer documents or other "
                    "ones, more of them, or a smaller batch"
                )

    def _places(self, slot: int, begin: SlotState) -> Iterator[tuple[int, int, int, Piece]]:
        """What the slot reads, epoch after epoch: (epoch, place in its share, document, which piece of it).

        With fewer documents than slots, the slots at places p, p + n, p + 2n, ... (n documents) share the document at
        place p: each reads one of as many equal pieces of its characters, so an epoch still holds each document once.
        """
        n = len(self.order)
        places = range(slot % n, n, self.global_batch_size)
        piece = slot // n, len(range(slot % n, self.global_batch_size, n))
        for epoch in itertools.count(begin.epoch):
            first = begin.place if epoch == begin.epoch else 0
            for place, document in enumerate(self.order.read(epoch, places[first:]), first):
                yield epoch, place, document, piece


def _start(stream: TrainStream, num_workers: int) -> Iterator[SlotRows | UserError]:
    """Iterate over the stream here, or over its parts in worker processes, in the order of workers.

    Workers come from a fork server, a clean process with one thread: forking this one is unsafe under NCCL and gloo
    (threads that hold locks), and spawning would import torch in each. The server imports once what workers need.
    """
    if num_workers == 0:
        return iter(stream)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, type(stream.encoder.tokenizer).__module__])
    loader = DataLoader(
        stream,
        batch_size=None,
        num_workers=num_workers,
        collate_fn=_unchanged,  # the default one moves arrays into shared memory, which is scarce in containers
        multiprocessing_context=context,
        worker_init_fn=_end_with_parent,
        generator=torch.Generator(),  # its seeds are not used here; without this they come from the run's generator
    )
    return iter(loader)


def _end_with_parent(_worker: int) -> None:
    # A killed rank cannot stop its workers; torch has them watch their parent process, but that is the fork server,
    # which in turn lives as long as they do. The rank itself is seen through a pipe that closes when it ends.
    rank = multiprocessing.parent_process()
    assert rank is not None

    def wait() -> None:
        rank.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def _unchanged(item: Any) -> Any:
    return item


@dataclass
class _Reading:
    """How far the batches have been handed out."""

    step: int
    slots: Mapping[int, SlotState]


def _train_batches(
    stream: TrainStream, reading: _Reading, num_workers: int, micro_batch_size: int
) -> Generator[list[Batch], None, None]:
    slots, parts = list(stream.begin), _start(stream, num_workers)
    try:
        for step in itertools.count(reading.step + 1):
            rows: SlotRows = {}
            while len(rows) < len(slots):  # workers take turns, so a step's parts come before the next step's
                part = next(parts)
                if isinstance(part, UserError):
                    raise part
                assert rows.keys().isdisjoint(part)
                rows.update(part)
            reading.step, reading.slots = step, {slot: rows[slot][1] for slot in slots}
            yield _microbatches([rows[slot][0] for slot in slots], slots, micro_batch_size, step)
    finally:
        # The last reference: workers end here. Left to a traceback, and so to the garbage collector, it would be freed
        # after the queues that tell the workers to end, and torch would wait five seconds for each of them.
        del parts


def _microbatches(rows: list[np.ndarray], slots: Sequence[int], micro_batch_size: int, step: int) -> list[Batch]:
    starts = range(0, len(slots), micro_batch_size)
    pieces = [slice(start, start + micro_batch_size) for start in starts]
    return [to_batch(np.stack(rows[piece]), slots[piece], step) for piece in pieces]


@dataclass(eq=False)
class Validation:
    """For each global batch of the validation set the rank's micro-batches (`step` is 0), as many on every rank.

    Row r of all goes to slot r mod G of global batch r // G; missing ones at the end are empty. Whose a row is shows
    only when all before it are tokenised, so every rank tokenises all the documents (or `eval_batches` global batches
    of them), and each time anew: rows that were kept would take memory.
    """

    corpus: Corpus
    documents: Callable[[], Iterable[int]]
    encoder: Encoder
    training: Training
    slots: range
    read: Counts = field(default_factory=lambda: Counts(0, 0, 0, {}))
    """What the last time has read, on every rank the same."""
    _all: Counts = field(init=False)

    def __iter__(self) -> Iterator[list[Batch]]:
        batch_size, size = self.training.global_batch_size, self.training.micro_batch_size
        filler = empty_row(self.encoder.data.sequence_length, self.encoder.fill)
        limit = self.training.eval_batches * batch_size or None
        rows = itertools.islice(self.encoder.rows(self._documents()), limit)
        num_rows, at = 0, SlotState()
        while taken := list(itertools.islice(rows, batch_size)):
            num_rows, at = num_rows + len(taken), taken[-1][1]
            self.read = Counts(num_rows, at.begun, at.documents, at.skipped)
            batch = [row for row, _ in taken] + [filler] * (batch_size - len(taken))
            yield _microbatches([batch[slot] for slot in self.slots], self.slots, size, step=0)
        if num_rows != limit:  # all was read, also what is left out after the last row
            self.read = replace(self._all, rows=num_rows)
        if num_rows == 0:
            raise UserError(
                f"data.validation: no document has anything to predict (left out: {describe(self.read.skipped)}); "
                "give more text"
            )

    def _documents(self) -> Iterator[Document]:
        skipped, count = Counter[str](), 0
        for count, number in enumerate(self.documents(), 1):
            start = SlotState(documents=count - 1, skipped=dict(skipped))
            document = read_document(self.corpus, number, self.encoder, start)
            if isinstance(document, Document):
                yield document
            else:
                skipped[document] += 1
        self._all = Counts(0, count, count, dict(skipped))
