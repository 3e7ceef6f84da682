"""From text to tokens, from tokens to rows of one length, and from rows to batches.

A row is an int32 array [2, sequence_length + 1]: the tokens, and for each the number of its document within the row
(counted from 0), or -1 where the row is filled up. Each row begins with the last token of the row before it (of the
same document, or of the joined stream), so every token but the first one is predicted exactly once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from shardwise.config import Data, UserError
from shardwise.interfaces import IGNORED, Batch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FILLED = -1
"""The document number of a position that holds no document."""


@dataclass(frozen=True)
class Encoder:
    """From text to rows: the tokenizer, and how its tokens are packed."""

    tokenizer: PreTrainedTokenizerBase
    data: Data
    fill: int  # token that fills up a row
    end_of_text: int | None  # token after each document, where documents are joined

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, data: Data) -> Encoder:
        """An encoder for `data.packing`; UserError if the tokenizer lacks the special tokens that it takes."""
        pad, eos = tokenizer.pad_token_id, tokenizer.eos_token_id
        if data.packing == "concat" and eos is None:
            raise UserError("data.packing concat joins documents by eos_token, which the tokenizer lacks; use none")
        fill = pad if pad is not None else eos
        if fill is None:
            raise UserError("the tokenizer has neither pad_token nor eos_token to fill up rows with; give it one")
        return cls(tokenizer, data, fill, eos if data.packing == "concat" else None)

    def tokens(self, text: str) -> list[int]:
        """The tokens of one document, with the special tokens that the tokenizer itself adds; none for no text."""
        if not text:
            return []
        encoded = self.tokenizer(text, return_attention_mask=False, return_token_type_ids=False, verbose=False)
        tokens: list[int] = encoded["input_ids"]
        if self.end_of_text is not None and tokens[-1:] != [self.end_of_text]:
            tokens.append(self.end_of_text)
        return tokens

    def rows(self, documents: Iterable[list[int]]) -> Iterator[np.ndarray]:
        """Rows [2, T+1] of these documents' tokens."""
        pack = pack_concat if self.data.packing == "concat" else pack_none
        return pack(documents, self.data.sequence_length, self.fill)


def pack_none(documents: Iterable[list[int]], sequence_length: int, fill: int) -> Iterator[np.ndarray]:
    """Rows [2, T+1] of one document each; a long document goes on in the next row, its last row is filled up.

    A document of fewer than two tokens has nothing to predict and gives no row.
    """
    for tokens in documents:
        for start in range(0, len(tokens) - 1, sequence_length):
            piece = tokens[start : start + sequence_length + 1]
            yield _row(piece, [0] * len(piece), sequence_length, fill)


def pack_concat(documents: Iterable[list[int]], sequence_length: int, fill: int) -> Iterator[np.ndarray]:
    """Full rows [2, T+1] of the documents' tokens joined; only the last row of all, if there is one, is filled up."""
    tokens: list[int] = []
    owners: list[int] = []
    for number, document in enumerate(documents):
        tokens += document
        owners += [number] * len(document)
        start = 0
        while start + sequence_length < len(tokens):
            end = start + sequence_length + 1
            yield _row(tokens[start:end], owners[start:end], sequence_length, fill)
            start += sequence_length
        del tokens[:start], owners[:start]
    if len(tokens) > 1:
        yield _row(tokens, owners, sequence_length, fill)


def _row(tokens: list[int], owners: list[int], sequence_length: int, fill: int) -> np.ndarray:
    row = empty_row(sequence_length, fill)
    row[0, : len(tokens)] = tokens
    row[1, : len(tokens)] = np.array(owners) - owners[0]
    return row


def empty_row(sequence_length: int, fill: int) -> np.ndarray:
    """A row [2, T+1] that holds no document: no position of it has a target."""
    row = np.full((2, sequence_length + 1), fill, np.int32)
    row[1] = FILLED
    return row


def to_batch(rows: np.ndarray, slots: Iterable[int], step: int) -> Batch:
    """The batch of rows [B, 2, T+1] of these B slots; this is where labels are shifted.

    A position has a target if the token after it belongs to a document.
    """
    tokens, owners = torch.from_numpy(rows).long().unbind(dim=1)
    labels = torch.where(owners[:, 1:] == FILLED, IGNORED, tokens[:, 1:])
    return Batch(
        input_ids=tokens[:, :-1].contiguous(),
        labels=labels,
        document_ids=owners[:, :-1].contiguous(),
        slots=tuple(slots),
        step=step,
    )
