"""Pack documents into rows of one length, and rows into batches.

A row is an int32 array [3, T+1] with T = `data.sequence_length`. row[0] are tokens. row[1] are the
numbers of their documents within the row, counted from 0, or -1 where the row is padded. row[2] is
1 where a token is a target, else 0. Of pairs (`data.format: preference`) the chosen side of pair k
has the number 2k, and the rejected one behind it 2k + 1; of answers with a label, answer k has one
of the two. Their rows are [6, T+1]: behind the three, a row of the same prompts, each with another
document's answer.

Each row begins with the last token of the row before it (of the same document, or of the joined
stream). So every token except the first is exactly once at a position where it can be predicted. A
row without a target is dropped, since nothing is learnt from it.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from shardwise.base.batches import IGNORED, Batch
from shardwise.base.layouts import layout_of, length_steps
from shardwise.config import RunConfig
from shardwise.data.state import SlotState

PADDING = -1
"""The document number of a position without a document."""


@dataclass(frozen=True, eq=False)
class Document:
    """The tokens of a document, or the rest of them, and their place in the stream of a slot."""

    tokens: np.ndarray  # [tokens] int32
    targets: np.ndarray  # [tokens] bool
    start: SlotState
    siblings: int = 1  # documents with a target that its record gives
    is_last: bool = True  # the last of these; of documents that a resume reads again, the last one
    read_before: SlotState | None = None  # the state of the slot, if a resume reads it again
    is_long: bool = False  # a part of what did not fit into a row
    rejected_at: int | None = None  # the first token of the rejected side, where there are sides
    other: "Document | None" = None  # the prompt with another answer, where answers have labels

    def __len__(self) -> int:
        return max(len(self.tokens), 0 if self.other is None else len(self.other))

    def has_target(self) -> bool:
        """Return whether a token other than the first is a target."""
        return bool(self.targets[1:].any())

    def after(self, count: int) -> "Document":
        """Return the document without its first `count` tokens."""
        start = replace(self.start, token=self.start.token + count)
        tokens, targets = self.tokens[count:], self.targets[count:]
        other = None if self.other is None else self.other.after(count)
        return replace(self, tokens=tokens, targets=targets, start=start, other=other)

    def end(self) -> SlotState:
        """Return the state of the slot at the next document."""
        start = self.start
        if self.read_before is not None:
            return self.read_before
        if not self.is_last:
            return replace(start, part=start.part + 1, token=0)
        return replace(start, place=start.place + 1, part=0, token=0)


Row = tuple[np.ndarray, SlotState]
"""A row [3 or 6, T+1], and the state of its slot behind it."""


def pack_none(documents: Iterable[Document], sequence_length: int, fill: int) -> Iterator[Row]:
    """Yield rows of one document each. A long document takes several; its last one is padded."""
    for document in documents:
        while len(document) > 1:
            row, rest = row_of([document], sequence_length, fill), document.after(sequence_length)
            if row[2, 1:].any():
                yield row, rest.start if len(rest) > 1 else document.end()
            document = rest


def pack_joined(documents: Iterable[Document], sequence_length: int, fill: int) -> Iterator[Row]:
    """Yield rows of the joined tokens of all documents. Only the very last row can be padded."""
    waiting: list[Document] = []  # behind the start of the last row
    num_tokens = 0  # in them
    for document in documents:
        waiting.append(document)
        num_tokens += len(document)
        while num_tokens > sequence_length:
            row = row_of(waiting, sequence_length, fill)
            waiting = _without(waiting, sequence_length)
            num_tokens -= sequence_length
            if row[2, 1:].any():
                yield row, replace(waiting[0].start, is_begun=True)
    row = row_of(waiting, sequence_length, fill)
    if row[2, 1:].any():
        yield row, waiting[-1].end()


def _without(documents: list[Document], count: int) -> list[Document]:
    """Remove the first `count` tokens."""
    for index, document in enumerate(documents):
        if count < len(document):
            return [document.after(count), *documents[index + 1 :]]
        count -= len(document)
    raise AssertionError("a row leaves its last token to the next one")


def row_of(documents: list[Document], sequence_length: int, fill: int) -> np.ndarray:
    """Return the first T+1 tokens of these documents as a row [3, T+1], or [6, T+1] of answers with
    a label.
    """
    row, end = empty_row(sequence_length, fill), 0
    for number, document in enumerate(documents):
        start, end = end, min(end + len(document.tokens), sequence_length + 1)
        row[0, start:end] = document.tokens[: end - start]
        row[1, start:end] = number
        if document.rejected_at is not None:
            row[1, start:end] = 2 * number + (np.arange(end - start) >= document.rejected_at)
        row[2, start:end] = document.targets[: end - start]
    others = [document.other for document in documents if document.other is not None]
    return np.concatenate([row, row_of(others, sequence_length, fill)]) if others else row


def empty_row(sequence_length: int, fill: int) -> np.ndarray:
    """Return a row [3, T+1] of padding, which has no target."""
    row = np.zeros((3, sequence_length + 1), np.int32)
    row[0], row[1] = fill, PADDING
    return row


def to_batch(rows: np.ndarray, slots: Iterable[int], step: int) -> Batch:
    """Return the batch of rows [B, 3 or 6, T+1] of B slots. Labels are shifted here alone.

    A position has a target if the token after it is one.
    """
    slots = tuple(slots)
    tokens, document_ids, targets = torch.from_numpy(rows[:, :3]).long().unbind(dim=1)
    return Batch(
        input_ids=tokens[:, :-1].contiguous(),
        labels=torch.where(targets[:, 1:] == 1, tokens[:, 1:], IGNORED),
        document_ids=document_ids[:, :-1].contiguous(),
        slots=slots,
        step=step,
        most_pairs=int(rows[:, 1].max(initial=PADDING)) // 2 + 1,
        mismatched=to_batch(rows[:, 3:], slots, step) if rows.shape[1] > 3 else None,
    )


@dataclass(frozen=True)
class RowLengths:
    """How many positions of their rows micro-batches have.

    Where each document has a row of its own, a micro-batch ends with the longest of its documents:
    what follows is padding, which has no target and which nothing before it sees.
    """

    full: int
    """`data.sequence_length`."""
    multiple: int | None
    """Number of which every length is a multiple; None: all rows have their full length."""
    is_of_step: bool
    """Whether all micro-batches of a rank's step have one length, as the stages of a pipeline pass
    tensors of one shape on."""

    @staticmethod
    def of(cfg: RunConfig) -> "RowLengths":
        """Return the lengths of a run: equal on all ranks that share the tokens of a row."""
        # Compiled layers would be compiled again for each length.
        may_differ = cfg.data.packed == "none" and not cfg.training.is_compiled
        multiple = length_steps(cfg.parallel) if may_differ else None
        return RowLengths(cfg.data.sequence_length, multiple, "pp" in layout_of(cfg.parallel))

    def cut(self, rows: list[np.ndarray]) -> np.ndarray:
        """Stack rows [3 or 6, T+1] without what is padding in all: [B, 3 or 6, at most T+1]."""
        stacked, length = np.stack(rows), self.full
        if self.multiple is not None:
            used = np.flatnonzero((stacked[:, 1::3] != PADDING).any((0, 1)))
            last = int(used[-1]) + 1 if len(used) else 1
            length = min(length, -(-last // self.multiple) * self.multiple)
        return stacked[..., : length + 1]


def to_microbatches(
    rows: list[np.ndarray],
    slots: Sequence[int],
    micro_batch_size: int,
    step: int,
    lengths: RowLengths,
) -> list[Batch]:
    """Stack the rows [3, T+1] of these slots into micro-batches."""
    begins = range(0, len(slots), micro_batch_size)
    pieces = [slice(begin, begin + micro_batch_size) for begin in begins]
    if lengths.is_of_step:
        all_rows = lengths.cut(rows)
        return [to_batch(all_rows[piece], slots[piece], step) for piece in pieces]
    return [to_batch(lengths.cut(rows[piece]), slots[piece], step) for piece in pieces]
