"""The batches of a run: a function of (corpus, seed, step) alone.

They do not depend on the number of ranks, micro-batches or workers. Slot j of every global batch
reads a stream of documents of its own, and a rank reads the streams of its slots. In each epoch
(seed, epoch) gives all documents an order, and slot j takes those at places j, j + G, j + 2G, ...
(G is the global batch size). So an epoch has each document once (`Order` explains `data.weights`).
A slot that has read its share continues with its share of the next epoch, and does not wait for
the other slots; behind the last of `training.epochs` it has rows of padding. A document that is
left out leaves its place empty: no other document changes its slot.

The position of a slot in its stream travels with its rows. So the saved state (`Loaders.state`)
belongs to the last batch that was given out, however far workers have read ahead. A resume starts
there, on any number of ranks, and reads nothing before it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardwise.batches import Batch
from shardwise.config import RunConfig, UserError
from shardwise.data.corpus import Corpus, join, open_corpus
from shardwise.data.formats import Encoder
from shardwise.data.order import Order, split
from shardwise.data.packing import to_microbatches
from shardwise.data.record import BadDocument
from shardwise.data.slots import RowCounts, SlotRows, TrainStream, items
from shardwise.data.state import LoaderState, SlotState, loader_state, read_from, starts
from shardwise.data.streaming import SAMPLE, Streamed, StreamOrder, StreamPass
from shardwise.data.validation import Validation

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


HeldOut = tuple[Corpus | StreamPass, Callable[[], Iterable[int]]]
"""The documents for validation, and a function that returns the numbers of those to read."""


@dataclass(frozen=True)
class Loaders:
    """The data of a rank: batches for training and for evaluation."""

    train: Generator[list[Batch], None, None]
    """The rank's micro-batches of each optimizer step, from 1, without end: after the documents of
    `training.epochs` they are padding. `close()` ends its workers."""
    validation: Validation | None
    """None where nothing is held out."""
    state: Callable[[], LoaderState]
    """Returns the state of the rank's slots after the last step from `train`; safe for JSON."""
    first_step: Callable[[], list[Batch]]
    """Returns the rank's micro-batches of step 1, read again."""
    num_steps: Callable[[range], int]
    """Returns the step in which the last of these slots has read its documents of
    `training.epochs`. All that it has not read yet is tokenised."""


def build_loaders(
    cfg: RunConfig,
    tokenizer: PreTrainedTokenizerBase,
    slots: range,
    state: LoaderState | None = None,
    num_rows: int | None = None,
) -> Loaders:
    """Return the data of the rank that reads these slots of each global batch.

    It starts with the step after the step of `state`. That has all slots of the global batch
    (`merge_states`), so a run can continue with other numbers of ranks, workers and micro-batches.

    Text is tokenised as it is read. For training this happens in worker processes, which start with
    the first step; there are at most as many as the rank has slots. Call `train.close()` at the
    end, also after an error.

    `num_rows`: the model's embeddings, where a token of the tokenizer may have none.

    UserError for files or a tokenizer that cannot be used, and for the state of a run with other
    data. The batches raise it for documents.
    """
    batch_size, micro_batch_size = cfg.training.global_batch_size, cfg.training.micro_batch_size
    assert len(slots) % micro_batch_size == 0, "a rule refuses it: the global batch over the ranks"
    encoder = Encoder.of(tokenizer, cfg.data, num_rows)
    corpus, order, held_out = _streams(cfg) if cfg.data.streaming else _documents(cfg)
    num_documents = order.num_documents
    # No rule of rules/: only the files say how many documents there are.
    if num_documents and num_documents < batch_size and cfg.data.format != "text":
        raise UserError(
            f"data.train: {num_documents} documents are fewer than the {batch_size} rows of "
            f"training.global_batch_size, and with data.format {cfg.data.format} rows cannot share "
            "a document; give more documents or a smaller batch"
        )
    _check_first(corpus, encoder)
    validation = None if held_out is None else held_out[0]
    source = read_from(cfg, corpus, validation, order, tokenizer)
    step, begin = starts(state, source, slots)
    num_workers = min(cfg.data.workers, len(slots))

    def stream(begin: Mapping[int, SlotState]) -> TrainStream:
        return TrainStream(corpus, order, encoder, batch_size, begin)

    def first_step() -> list[Batch]:
        start = _Progress(0, {slot: SlotState() for slot in slots})
        return next(_train_batches(stream(start.slots), start, 0, micro_batch_size))

    def num_steps(slots: range) -> int:
        step, begin = starts(state, source, slots)
        return step + _num_rows(stream(begin), num_workers)

    progress = _Progress(step, begin)
    return Loaders(
        _train_batches(stream(begin), progress, num_workers, micro_batch_size),
        None if held_out is None else Validation(*held_out, encoder, cfg.training, slots),
        lambda: loader_state(progress.step, source, progress.slots),
        first_step,
        num_steps,
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
    order = Order(train, weights, cfg.training.seed, cfg.training.epochs)
    if has_files:
        validation = open_corpus(data.validation, data, "data.validation")
        _check_apart(corpus, validation)
        return corpus, order, (validation, lambda: range(len(validation)))
    if data.validation == 0:
        return corpus, order, None
    held_out_order = Order(held_out, None, cfg.training.seed)
    numbers = range(len(held_out_order))
    return corpus, order, (corpus, lambda: held_out_order.read(1, numbers))


def _streams(cfg: RunConfig) -> tuple[Streamed, StreamOrder, HeldOut | None]:
    """Open what is streamed: for training, and for validation."""
    stream = Streamed.of(cfg.data.train, cfg.data, cfg.training.seed)
    if not isinstance(cfg.data.validation, str | list):
        return stream, StreamOrder(), None
    validation = Streamed.of(cfg.data.validation, cfg.data, None, "data.validation")
    _check_apart(stream, validation)
    one_pass = StreamPass(validation)
    return stream, StreamOrder(), (one_pass, one_pass.numbers)


def _check_apart(train: Corpus | Streamed, validation: Corpus | Streamed) -> None:
    if shared := train.origins & validation.origins:
        name = min(shared)
        raise UserError(f"data.validation: {name} is in data.train too; keep it in one of them")


def _check_first(corpus: Corpus | Streamed, encoder: Encoder) -> None:
    """Check the encoder on the first document that can be used, before the model is built."""
    if isinstance(corpus, Streamed):
        records = corpus.first(SAMPLE)
        count, record_of, where = len(records), records.__getitem__, "data.train: record {}".format
    else:
        count, record_of, where = min(len(corpus), 100), corpus.__getitem__, corpus.where
    for number in range(count):
        try:
            return encoder.check(record_of(number))
        except BadDocument as error:
            if encoder.data.on_error == "fail":
                raise UserError(f"{where(number)}: {error}") from None


@dataclass
class _Progress:
    """The last step whose batches were given out, and the slots behind it."""

    step: int
    slots: Mapping[int, SlotState]


def _train_batches(
    stream: TrainStream, progress: _Progress, num_workers: int, micro_batch_size: int
) -> Generator[list[Batch], None, None]:
    slots, parts = list(stream.begin), items(stream, stream.encoder, num_workers)
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
            yield to_microbatches([rows[slot][0] for slot in slots], slots, micro_batch_size, step)
    finally:
        # The last reference, so workers end here. A traceback would keep it until the garbage
        # collector frees it after the queues that tell workers to end, and torch would wait five
        # seconds for each worker.
        del parts


def _num_rows(stream: TrainStream, num_workers: int) -> int:
    """Return the largest number of rows that a slot still has until `training.epochs` end."""
    most = 0
    for num_rows in items(RowCounts(stream), stream.encoder, min(num_workers, len(stream.begin))):
        if isinstance(num_rows, UserError):
            raise num_rows
        most = max(most, num_rows)
    return most
