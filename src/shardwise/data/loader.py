"""The batches of a run: a function of (corpus, seed, step) alone.

They do not depend on the number of ranks, micro-batches or workers. Slot j of every global batch
reads a stream of documents of its own, and a rank reads the streams of its slots. (seed, epoch)
gives all documents of an epoch an order, and epochs follow one another. Slot j takes the documents
at the numbers j, j + G, j + 2G, ... of all epochs (G is the global batch size). So an epoch has
each document once (`Order` explains weights). A slot does not wait for the other slots. A
document that is left out leaves its place empty: no other document changes its slot. Where
`training.epochs` end, the slots share what is left (`Rest`).

The position of a slot in its stream travels with its rows. So the saved state (`Loaders.state`)
belongs to the last batch that was given out, however far workers have read ahead. A resume starts
there, on any number of ranks, and reads nothing before it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from shardwise.base.batches import Batch
from shardwise.config import RunConfig, UserError
from shardwise.data.corpus import Corpus, join, open_groups
from shardwise.data.dealing import Gather, deal
from shardwise.data.formats import Encoder
from shardwise.data.order import Order, draws, split
from shardwise.data.packing import PADDING, RowLengths, to_microbatches
from shardwise.data.record import BadDocument
from shardwise.data.slots import Documents, SlotRows, TrainStream, encoded, items
from shardwise.data.start import read_from, starts
from shardwise.data.state import LoaderState, Position, SlotState
from shardwise.data.streaming import Streamed, StreamOrder, StreamPass, StreamSample
from shardwise.data.survey import MOST_SOURCES, sample, spread
from shardwise.data.validation import Validation

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


FIRST, MOST_TRIED = 2, 100
"""The documents of a source that are read before the model is built; and, where these cannot be
used and are skipped, how many more may be looked at for one that can."""

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
    """Returns the rank's micro-batches of step 1, read again, with rows of their full length: the
    most that a step of this run can take."""
    again: Callable[[], Generator[list[Batch], None, None]]
    """Returns the rank's micro-batches of each step from 1, read again, as `train` is."""
    num_steps: Callable[[range, Gather], int]
    """Deals out the rows up to the end of `training.epochs`, a collective of all ranks, and returns
    the last step. Each rank tokenises what its share of the slots has not read yet."""
    notes: tuple[str, ...] = ()
    """Notes that a reader of the record must know."""
    sample: Callable[[], str] = str
    """Returns in words what a sample of the documents comes to; nothing of a stream."""


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
    encoder = Encoder.of(tokenizer, cfg.data, num_rows, cfg.training.reads_labels)
    corpus, order, held_out = open_data(cfg)
    validation = None if held_out is None else held_out[0]
    for documents in (corpus, validation if validation is not corpus else None):
        if documents is not None:  # a resume has read them before
            check_first(documents, encoder, FIRST if state is None else 0)
    source = read_from(cfg, corpus, validation, order, tokenizer)
    position = starts(state, source, slots, order)

    def stream(at: Position) -> TrainStream:
        return TrainStream(corpus, order, encoder, batch_size, at.step, dict(at.slots), at.rest)

    lengths = RowLengths.of(cfg)

    def batches(
        at: Position, workers: int, lengths: RowLengths
    ) -> Generator[list[Batch], None, None]:
        return _train_batches(stream, at, workers, micro_batch_size, lengths)

    def again(
        workers: int = cfg.data.workers, lengths: RowLengths = lengths
    ) -> Generator[list[Batch], None, None]:
        at = starts(None, source, slots, order)
        if position.rest is not None:
            at.rest = replace(position.rest, row=0, state=SlotState())
        return batches(at, workers, lengths)

    def num_steps(slots: range, gather: Gather) -> int:
        if position.rest is None:
            at = starts(state, source, slots, order)
            position.rest = deal(stream(at), cfg.data.workers, gather)
        return position.rest.num_steps

    return Loaders(
        batches(position, cfg.data.workers, lengths),
        None if held_out is None else Validation(*held_out, encoder, cfg.training, slots, lengths),
        lambda: position.to_dict(source),
        lambda: next(again(0, replace(lengths, multiple=None))),
        again,
        num_steps,
        _notes(cfg, order),
        partial(sample, corpus, encoder) if isinstance(corpus, Corpus) else str,
    )


def _notes(cfg: RunConfig, order: Order | StreamOrder) -> tuple[str, ...]:
    """Return what a reader would not expect of the documents that are read."""
    notes, batch_size = [], cfg.training.global_batch_size
    if order.num_documents and order.num_documents < batch_size and order.epochs is None:
        notes.append(
            f"data.train: {order.num_documents} documents are fewer than the {batch_size} rows of "
            "training.global_batch_size, so a step reads documents more than once"
        )
    if order.sizes and order.epochs and isinstance(order, Order):
        drawn = draws(order.num_read, cfg.data.shares or ())
        names = [name for (name,), _ in cfg.data.groups("train")]
        notes += [
            f"data.train: {size - number:,} of the {size:,} documents of {name} are never read "
            f"in training.epochs {order.epochs:g}, and others several times, by the weights"
            for name, size, number in zip(names, order.sizes, drawn)
            if number < size
        ]
    return tuple(notes)


def open_data(
    cfg: RunConfig,
) -> tuple[Corpus, Order, HeldOut | None] | tuple[Streamed, StreamOrder, HeldOut | None]:
    """Open the documents of a run: those to train on, their order, and what is held out."""
    return _streams(cfg) if cfg.data.streaming else _documents(cfg)


def _documents(cfg: RunConfig) -> tuple[Corpus, Order, HeldOut | None]:
    data, weights = cfg.data, cfg.data.shares
    corpora = open_groups(data, "train")
    corpus, sizes = join(corpora), list(map(len, corpora))
    if weights is None:
        corpus = corpus if data.max_documents is None else corpus.first(data.max_documents)
        sizes = [len(corpus)]
    has_files = isinstance(data.validation, str | list)
    train, held_out = split(sizes, 0.0 if has_files else data.validation)
    order = Order(train, weights, cfg.training.seed, cfg.training.epochs)
    if has_files:
        validation = join(open_groups(data, "validation"))
        _check_apart(corpus, validation)
        return corpus, order, (validation, lambda: range(len(validation)))
    if data.validation == 0:
        return corpus, order, None
    held_out_order = Order(held_out, None, cfg.training.seed)
    numbers = np.arange(len(held_out_order))
    return corpus, order, (corpus, lambda: held_out_order.documents(numbers))


def _streams(cfg: RunConfig) -> tuple[Streamed, StreamOrder, HeldOut | None]:
    stream = Streamed.of(cfg.data, cfg.training.seed)
    if not isinstance(cfg.data.validation, str | list):
        return stream, StreamOrder(), None
    validation = Streamed.of(cfg.data, None, "validation")
    _check_apart(stream, validation)
    one_pass = StreamPass(validation)
    return stream, StreamOrder(), (one_pass, one_pass.numbers)


def _check_apart(train: Corpus | Streamed, validation: Corpus | Streamed) -> None:
    if shared := train.origins & validation.origins:
        name = min(shared)
        raise UserError(f"data.validation: {name} is in data.train too; keep it in one of them")


def check_first(
    corpus: Corpus | Streamed | StreamPass, encoder: Encoder, count: int = FIRST
) -> None:
    """Read the first `count` documents of each source, before the model is built.

    A chat template runs within limits on the first one of each group of entries that can be used.
    UserError for a document that cannot be, unless `data.on_error` is skip.
    """
    checked: set[int] = set()
    for documents, numbers in _beginnings(corpus):
        for number in numbers:
            try:
                record, group = documents.read(number)
                if group not in checked:
                    encoder.check(record, group)
                    checked.add(group)
                if number in numbers[:count]:
                    encoded(documents, number, encoder)
                elif group in checked:
                    break
            except BadDocument as error:
                if encoder.data.on_error == "fail":
                    problem = encoder.with_entry(error)
                    raise UserError(f"{documents.where(number)}: {problem}") from None


def _beginnings(
    corpus: Corpus | Streamed | StreamPass,
) -> Iterator[tuple[Documents, Sequence[int]]]:
    """Yield the first documents of each source; of many sources, those of some."""
    if isinstance(corpus, Corpus):
        parts = list(corpus.parts())
        for index in spread(range(len(parts)), MOST_SOURCES):
            yield corpus, parts[index].numbers[:MOST_TRIED]
        return
    stream = corpus.stream if isinstance(corpus, StreamPass) else corpus
    for alone in stream.alone():
        records = StreamSample(alone)
        yield records, range(len(records))


def _train_batches(
    stream: Callable[[Position], TrainStream],
    position: Position,
    num_workers: int,
    micro_batch_size: int,
    lengths: RowLengths,
) -> Generator[list[Batch], None, None]:
    """Yield the micro-batches of step after step, and move the position behind them."""
    slots, train = list(position.slots), stream(position)
    parts = items(train, train.encoder, min(num_workers, len(slots)))
    try:
        for step in itertools.count(position.step + 1):
            rows: SlotRows = {}
            # Workers take turns, so all parts of a step come before those of the next step.
            while len(rows) < len(slots):
                part = next(parts)
                if isinstance(part, UserError):
                    raise part
                assert rows.keys().isdisjoint(part)
                rows.update(part)
            position.step = step
            for slot, (row, state) in rows.items():
                position.filled[slot] += int((row[1, :-1] != PADDING).sum())
                if isinstance(state, SlotState):
                    position.slots[slot] = state
                elif position.rest is not None and state[0] >= position.rest.row:
                    position.rest = replace(position.rest, row=state[0], state=state[1])
            rank_rows = [rows[slot][0] for slot in slots]
            yield to_microbatches(rank_rows, slots, micro_batch_size, step, lengths)
    finally:
        # The last reference, so workers end here. A traceback would keep it until the garbage
        # collector frees it after the queues that tell workers to end, and torch would wait five
        # seconds for each worker.
        del parts
