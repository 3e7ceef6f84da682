"""The batches of a run: a function of (corpus, seed, step) alone.

They do not depend on the number of ranks, micro-batches or workers. Slot j of every global batch
reads a stream of documents of its own, and a rank reads the streams of its slots. In each epoch
(seed, epoch) gives all documents an order, and slot j takes those at places j, j + G, j + 2G, ...
(G is the global batch size). So an epoch has each document once (`Order` explains `data.weights`).
A slot that has read its share continues with its share of the next epoch, and does not wait for
the other slots. A document that is left out leaves its place empty: no other document changes its
slot.

The position of a slot in its stream travels with its rows. So the saved state (`Loaders.state`)
belongs to the last batch that was given out, however far workers have read ahead. A resume starts
there, on any number of ranks, and reads nothing before it.
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
from shardwise.data.formats import ALL, Encoder, Piece
from shardwise.data.order import Order, split
from shardwise.data.packing import Document, Row, empty_row, to_batch
from shardwise.data.record import BadDocument
from shardwise.data.state import (
    Counts,
    LoaderState,
    SlotState,
    describe,
    loader_state,
    read_from,
    starts,
)
from shardwise.interfaces import Batch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SlotRows = dict[int, Row]
"""The next row of some slots, by slot."""

HeldOut = tuple[Corpus, Callable[[], Iterable[int]]]
"""A corpus for validation, and a function that returns the documents to read in an evaluation."""


@dataclass(frozen=True)
class Loaders:
    """The data of a rank: batches for training, without end, and for evaluation."""

    train: Generator[list[Batch], None, None]
    """The rank's micro-batches of each optimizer step, from 1; `close()` ends its workers."""
    validation: Validation | None
    """None where nothing is held out."""
    state: Callable[[], LoaderState]
    """Returns the state of the rank's slots after the last step from `train`; safe for JSON."""


def build_loaders(
    cfg: RunConfig,
    tokenizer: PreTrainedTokenizerBase,
    slots: range,
    state: LoaderState | None = None,
) -> Loaders:
    """Return the data of the rank that reads these slots of each global batch.

    It starts with the step after the step of `state`. That has all slots of the global batch
    (`merge_states`), so a run can continue with other numbers of ranks, workers and micro-batches.

    Text is tokenised as it is read. For training this happens in worker processes, which start with
    the first step; there are at most as many as the rank has slots. Call `train.close()` at the
    end, also after an error.

    UserError for files or a tokenizer that cannot be used, and for the state of a run with other
    data. The batches raise it for documents.
    """
    batch_size, micro_batch_size = cfg.training.global_batch_size, cfg.training.micro_batch_size
    assert len(slots) % micro_batch_size == 0, "a rule refuses it: the global batch over the ranks"
    encoder = Encoder.of(tokenizer, cfg.data)
    corpus, order, held_out = _documents(cfg)
    # No rule of rules/: only the files say how many documents there are.
    if len(order) < batch_size and cfg.data.format != "text":
        raise UserError(
            f"data.train: {len(order)} documents are fewer than the {batch_size} rows of "
            f"training.global_batch_size, and with data.format {cfg.data.format} rows cannot share "
            "a document; give more documents or a smaller batch"
        )
    _check_first(corpus, encoder)
    validation = None if held_out is None else held_out[0]
    source = read_from(cfg, corpus, validation, len(order), tokenizer)
    step, begin = starts(state, source, slots)
    stream = TrainStream(corpus, order, encoder, batch_size, begin)
    progress = _Progress(step, begin)
    num_workers = min(cfg.data.workers, len(slots))
    return Loaders(
        _train_batches(stream, progress, num_workers, micro_batch_size),
        None if held_out is None else Validation(*held_out, encoder, cfg.training, slots),
        lambda: loader_state(progress.step, source, progress.slots),
    )


def _documents(cfg: RunConfig) -> tuple[Corpus, Order, HeldOut | None]:
    """Open the documents of a run: the corpus and its order for training, and what is held out."""
    data, weights = cfg.data, None
    if data.weights is None:
        corpus = open_corpus(data.train, data)
        sizes = [len(corpus)]
    else:
        entries = [data.train] if isinstance(data.train, str) else data.train
        corpora = [open_corpus(entry, data) for entry in entries]
        corpus, weights = join(corpora), tuple(data.weights)
        sizes = list(map(len, corpora))
    has_files = isinstance(data.validation, str | list)
    train, held_out = split(sizes, 0.0 if has_files else data.validation)
    order = Order(train, weights, cfg.training.seed)
    if has_files:
        validation = open_corpus(data.validation, data, "data.validation")
        if shared := corpus.origins & validation.origins:
            name = min(shared)
            raise UserError(f"data.validation: {name} is in data.train too; keep it in one of them")
        return corpus, order, (validation, lambda: range(len(validation)))
    if data.validation == 0:
        return corpus, order, None
    held_out_order = Order(held_out, None, cfg.training.seed)
    return corpus, order, (corpus, lambda: held_out_order.read(1, range(len(held_out_order))))


def _check_first(corpus: Corpus, encoder: Encoder) -> None:
    """Check the encoder on the first document that can be used, before the model is built."""
    for number in range(min(len(corpus), 100)):
        try:
            return encoder.check(corpus[number])
        except BadDocument as error:
            if encoder.data.on_error == "fail":
                raise UserError(f"{corpus.where(number)}: {error}") from None


def read_documents(
    corpus: Corpus, number: int, encoder: Encoder, start: SlotState, piece: Piece = ALL
) -> list[Document] | str:
    """Return the documents of a record that have a target, or the reason why there is none.

    UserError, with its place, for a record that cannot be used, unless `data.on_error` is skip.
    """
    try:
        record = corpus[number]
        documents = encoder.documents(record, start, piece)
    except BadDocument as error:
        if encoder.data.on_error == "fail":
            raise UserError(f"{corpus.where(number)}: {error}") from None
        return error.reason
    with_targets = [document for document in documents if document.targets[1:].any()]
    if not with_targets:
        return encoder.why_none(record, documents)
    last = len(with_targets) - 1
    return [
        replace(document, siblings=len(with_targets), is_last=i == last)
        for i, document in enumerate(with_targets)
    ]


@dataclass(frozen=True, eq=False)
class TrainStream(IterableDataset):
    """The rows of some slots, step after step, without end; in a worker, of the worker's own slots.

    Worker w of W reads every W-th slot from w on. So one worker alone tokenises a document, and the
    rows of a slot do not depend on W. A UserError is an item of the stream: raised in a worker, it
    would be wrapped in a traceback by torch.
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
        """Yield the documents of a slot that have a target, from where it begins.

        First come those that were read before and still wait for a row. Of the next record come the
        documents from `begin.part` on, and of this one the tokens from `begin.token` on.
        """
        begin = self.begin[slot]
        for index, (epoch, place, part, _) in enumerate(begin.waiting, 1):
            _, _, number, piece = next(self._places(slot, epoch, place))
            at = SlotState(epoch, place)
            read = read_documents(self.corpus, number, self.encoder, at, piece)
            assert not isinstance(read, str), "a document that waits has a target"
            document = next(document for document in read if document.start.part == part)
            is_last = index == len(begin.waiting)
            yield replace(document, is_last=is_last, read_before=replace(begin, waiting=()))
        skipped, num_long = Counter(begin.skipped), begin.long
        # Records that were left out one after the other. Without a limit a slot could search
        # for ever.
        left_out = Counter[str]()
        places = self._places(slot, begin.epoch, begin.place)
        for count, (epoch, place, number, piece) in enumerate(places, begin.documents):
            start = SlotState(epoch, place, documents=count, skipped=dict(skipped), long=num_long)
            read = read_documents(self.corpus, number, self.encoder, start, piece)
            if not isinstance(read, str):
                left_out.clear()
                is_rest = count == begin.documents and begin.part + begin.token > 0
                num_long += any(document.is_long for document in read) and not is_rest
                for document in read:
                    if is_rest and document.start.part < begin.part:
                        continue
                    cut = begin.token if is_rest and document.start.part == begin.part else 0
                    start = replace(document.start, long=num_long)
                    yield replace(document, start=start).after(cut)
                continue
            left_out[read] += 1
            skipped[read] += 1
            if left_out.total() > len(self.order) + 100:
                raise UserError(
                    f"data.train: slot {slot} of training.global_batch_size "
                    f"{self.global_batch_size} finds no target in the {len(self.order)} documents; "
                    f"it left out the last {left_out.total()} that it read: {describe(left_out)}; "
                    "give longer documents, other ones or more of them, or a smaller batch"
                )

    def _places(
        self, slot: int, first_epoch: int, first_place: int
    ) -> Iterator[tuple[int, int, int, Piece]]:
        """Yield the records of a slot, without end: (epoch, place in its share, record, piece).

        They begin with `first_place` of `first_epoch`.

        With fewer documents than slots (n of them), the slots p, p + n, p + 2n, ... share the
        document at place p. Each reads one of as many equal pieces of its characters, so that an
        epoch still has each document once.
        """
        n = len(self.order)
        places = range(slot % n, n, self.global_batch_size)
        piece = slot // n, len(range(slot % n, self.global_batch_size, n))
        for epoch in itertools.count(first_epoch):
            first = first_place if epoch == first_epoch else 0
            for place, document in enumerate(self.order.read(epoch, places[first:]), first):
                yield epoch, place, document, piece


def _start(stream: TrainStream, num_workers: int) -> Iterator[SlotRows | UserError]:
    """Iterate over the stream here, or over its parts in worker processes, worker after worker.

    Workers come from a fork server, a clean process with one thread. To fork this process is unsafe
    under NCCL and gloo, whose threads hold locks, and each spawned process would import torch. The
    server imports once what workers need.
    """
    if num_workers == 0:
        return iter(stream)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, type(stream.encoder.tokenizer).__module__])
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


@dataclass
class _Progress:
    """The last step whose batches were given out, and the slots behind it."""

    step: int
    slots: Mapping[int, SlotState]


def _train_batches(
    stream: TrainStream, progress: _Progress, num_workers: int, micro_batch_size: int
) -> Generator[list[Batch], None, None]:
    slots, parts = list(stream.begin), _start(stream, num_workers)
    try:
        for step in itertools.count(progress.step + 1):
            rows: SlotRows = {}
            # Workers take turns, so all parts of a step come before those of the next step.
            while len(rows) < len(slots):
                part = next(parts)
                if isinstance(part, UserError):
                    raise part
                assert rows.keys().isdisjoint(part)
                rows.update(part)
            progress.step, progress.slots = step, {slot: rows[slot][1] for slot in slots}
            yield _microbatches([rows[slot][0] for slot in slots], slots, micro_batch_size, step)
    finally:
        # The last reference, so workers end here. A traceback would keep it until the garbage
        # collector frees it after the queues that tell workers to end, and torch would wait five
        # seconds for each worker.
        del parts


def _microbatches(
    rows: list[np.ndarray], slots: Sequence[int], micro_batch_size: int, step: int
) -> list[Batch]:
    """Stack the rows [3, T+1] of these slots into micro-batches."""
    begins = range(0, len(slots), micro_batch_size)
    pieces = [slice(begin, begin + micro_batch_size) for begin in begins]
    return [to_batch(np.stack(rows[piece]), slots[piece], step) for piece in pieces]


@dataclass(eq=False)
class Validation:
    """The rank's micro-batches (`step` is 0) of each global batch of the validation set.

    Every rank has equally many. Row r goes to slot r mod G of global batch r // G (G is the global
    batch size), and missing rows at the end are padding. A row is known only when all documents
    before it are tokenised. So every rank tokenises all documents (or `eval_batches` global
    batches), and does so in each evaluation, since it would take memory to keep the rows.
    """

    corpus: Corpus
    documents: Callable[[], Iterable[int]]
    encoder: Encoder
    training: Training
    slots: range
    read: Counts = field(default_factory=lambda: Counts(0, 0, 0, {}))
    """What the last evaluation has read, the same on every rank."""
    _all: Counts = field(init=False)

    def __iter__(self) -> Iterator[list[Batch]]:
        batch_size, size = self.training.global_batch_size, self.training.micro_batch_size
        padding = empty_row(self.encoder.data.sequence_length, self.encoder.fill)
        limit = self.training.eval_batches * batch_size or None
        rows = itertools.islice(self.encoder.rows(self._documents()), limit)
        num_rows, end = 0, SlotState()
        while taken := list(itertools.islice(rows, batch_size)):
            num_rows, end = num_rows + len(taken), taken[-1][1]
            self.read = Counts(num_rows, end.begun, end.finished, end.skipped, end.long)
            batch = [row for row, _ in taken] + [padding] * (batch_size - len(taken))
            yield _microbatches([batch[slot] for slot in self.slots], self.slots, size, step=0)
        if num_rows != limit:
            # Everything was read, also the documents behind the last row that were left out.
            self.read = replace(self._all, rows=num_rows)
        if num_rows == 0:
            skipped = describe(self.read.skipped)
            what = f"data.validation: no document has a target (left out: {skipped})"
            raise UserError(f"{what}; give more text")

    def _documents(self) -> Iterator[Document]:
        skipped, count, num_long = Counter[str](), 0, 0
        for count, number in enumerate(self.documents(), 1):
            start = SlotState(
                place=count - 1, documents=count - 1, skipped=dict(skipped), long=num_long
            )
            read = read_documents(self.corpus, number, self.encoder, start)
            if isinstance(read, str):
                skipped[read] += 1
                continue
            num_long += any(document.is_long for document in read)
            for document in read:
                yield replace(document, start=replace(document.start, long=num_long))
        self._all = Counts(0, count, count, dict(skipped), num_long)
