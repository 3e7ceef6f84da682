"""From documents to rows of one length, and from rows to batches.

A row is an int32 array [3, sequence_length + 1]: the tokens; for each the number of its document within the row
(counted from 0), or -1 where the row is filled up; and whether it is a target, 1 or 0. Each row begins with the last
token of the row before it (of the same document, or of the joined stream), so every token but the first one stands once
where it can be predicted. A row in which nothing is predicted is left out: nothing would be learnt from it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch

from shardwise.data.state import SlotState
from shardwise.interfaces import IGNORED, Batch

FILLED = -1
"""The document number of a position that holds no document."""


@dataclass(frozen=True, eq=False)
class Document:
    """The tokens of a document, or what is left of them, and where they begin in the stream of a slot."""

    tokens: np.ndarray  # [tokens] int32
    targets: np.ndarray  # [tokens] bool
    start: SlotState

    def __len__(self) -> int:
        return len(self.tokens)

    def after(self, count: int) -> Document:
        """The document without its first `count` tokens."""
        start = replace(self.start, token=self.start.token + count)
        return Document(self.tokens[count:], self.targets[count:], start)

    def end(self) -> SlotState:
        """Where the document after this one begins."""
        start = self.start
        return replace(start, place=start.place + 1, token=0, documents=start.documents + 1)


Row = tuple[np.ndarray, SlotState]
"""A row [3, T+1], and where the next one of its slot begins."""


def pack_none(documents: Iterable[Document], sequence_length: int, fill: int) -> Iterator[Row]:
    """Rows of one document each; a long document goes on in the next row, its last row is filled up."""
    for document in documents:
        while len(document) > 1:
            row, rest = _row([document], sequence_length, fill), document.after(sequence_length)
            if row[2, 1:].any():
                yield row, rest.start if len(rest) > 1 else document.end()
            document = rest


def pack_joined(documents: Iterable[Document], sequence_length: int, fill: int) -> Iterator[Row]:
    """Full rows of the documents' tokens joined; only the last row of all, if there is one, is filled up."""
    held: list[Document] = []  # what no row has begun after yet
    size = 0  # tokens in them
    for document in documents:
        held.append(document)
        size += len(document)
        while size > sequence_length:
            row = _row(held, sequence_length, fill)
            held, size = _drop(held, sequence_length), size - sequence_length
            if row[2, 1:].any():
                yield row, held[0].start
    row = _row(held, sequence_length, fill)
    if row[2, 1:].any():
        yield row, held[-1].end()


def _drop(documents: list[Document], count: int) -> list[Document]:
    for index, document in enumerate(documents):
        if count < len(document):
            return [document.after(count), *documents[index + 1 :]]
        count -= len(document)
    raise AssertionError("a row keeps the last token for the next one")


def _row(documents: list[Document], sequence_length: int, fill: int) -> np.ndarray:
    row, end = empty_row(sequence_length, fill), 0
    for number, document in enumerate(documents):
        start, end = end, min(end + len(document), sequence_length + 1)
        row[0, start:end] = document.tokens[: end - start]
        row[1, start:end] = number
        row[2, start:end] = document.targets[: end - start]
    return row


def empty_row(sequence_length: int, fill: int) -> np.ndarray:
    """A row [3, T+1] that holds no document: no position of it has a target."""
    row = np.zeros((3, sequence_length + 1), np.int32)
    row[0], row[1] = fill, FILLED
    return row


def to_batch(rows: np.ndarray, slots: Iterable[int], step: int) -> Batch:
    """The batch of rows [B, 3, T+1] of these B slots; this is where labels are shifted.

    A position has a target if the token after it is one.
    """
    tokens, owners, targets = torch.from_numpy(rows).long().unbind(dim=1)
    return Batch(
        input_ids=tokens[:, :-1].contiguous(),
        labels=torch.where(targets[:, 1:] == 1, tokens[:, 1:], IGNORED),
        document_ids=owners[:, :-1].contiguous(),
        slots=tuple(slots),
        step=step,
    )
