"""From the fields of a document to its tokens, and which of the tokens are targets."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from shardwise.config import Data, UserError
from shardwise.data.best_fit import pack_documents
from shardwise.data.chat_format import ChatFormat, Encoded
from shardwise.data.columns import FIELDS, check_all_read, fields_beside
from shardwise.data.completions import encode_completion, encode_text, joined_text, text_of
from shardwise.data.packing import Document, Row, empty_row, pack_joined, pack_none
from shardwise.data.preference import (
    NO_ANSWER,
    NOTHING,
    PreferenceFormat,
    document_of,
    equal_sides,
    mismatched,
)
from shardwise.data.record import BadDocument, Record
from shardwise.data.state import SlotState

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NO_TARGET = "no target"
"""The reason to leave out a document without a target. It is no mistake, whatever `on_error` is."""

TOO_LONG = "longer than a row"
"""The reason to leave out a document that is skipped, or whose targets are all cut off."""

LONGER_ROWS = "raise data.sequence_length, or give shorter documents"
"""The way out where all documents are too long."""

PACK = {
    "none": pack_none,
    "concat": pack_joined,
    "isolated": pack_joined,
    "documents": pack_documents,
}
"""Functions that make rows of documents, by `data.packing`."""

ONE_ENTRY = "{path: FILE, format: ..., fields: ...}"
"""How an entry of `data.train` is written that has keys of its own."""

JOINED = ("concat", "isolated")
"""The packings that put documents one behind the other, and cut them at the end of a row."""

LEFT_OVER = {"none": 0, "concat": 1, "isolated": 1, "documents": 4}
"""How many of the last rows of a stream may be far from full, for want of further documents."""


@dataclass(frozen=True)
class FormatReader:
    """Turns the documents of a group of entries into tokens, by their format and fields."""

    tokenizer: PreTrainedTokenizerBase
    data: Data
    chat: ChatFormat | PreferenceFormat | None

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, data: Data) -> FormatReader:
        """Make the reader of a group; UserError where the tokenizer lacks what it needs."""
        if data.format != "text" and not tokenizer.is_fast:
            raise UserError(
                f"data.format {data.format} needs a fast tokenizer, which knows the characters of "
                "each token; use another tokenizer"
            )
        chats = {"chat": ChatFormat, "preference": PreferenceFormat}.get(data.format)
        return cls(tokenizer, data, None if chats is None else chats.of(tokenizer, data))

    def encode(self, record: Record) -> list[Encoded]:
        """Return the documents of a record, each as tokens and which of them are targets.

        A text ends with the end-of-text token, which is a target. Where documents are joined, it
        follows the others too, and is none.
        """
        return list(itertools.starmap(self._ended, self._encoded(record)))

    def _encoded(self, record: Record) -> list[Encoded]:
        if self.chat is not None:
            return self.chat.encode(record)
        columns = [self.data.columns(name) for name in FIELDS.get(self.data.format, ())]
        if all(name in record for names in columns for name in names[:1]):
            check_all_read(record, fields_beside(self.data), self.data)
        if self.data.format == "completion":
            prompt, completion = (joined_text(record, names, self.data) for names in columns)
            return [encode_completion(self.tokenizer, prompt, completion)]
        text = text_of(record, self.data.text_field, self.data, "text_field")
        return [encode_text(self.tokenizer, text)]

    def _ended(self, tokens: list[int], targets: list[bool]) -> Encoded:
        """Add the end-of-text token where it is missing."""
        is_text = self.data.format == "text"
        needs_end = is_text or self.data.packed in JOINED
        end = self.tokenizer.eos_token_id
        if not needs_end or end is None or not tokens or tokens[-1] == end:
            return tokens, targets
        return [*tokens, end], [*targets, is_text]

    def why_no_target(self, record: Record) -> str:
        """Return the reason why a document that is not too long has no target."""
        if isinstance(self.chat, PreferenceFormat):
            return NO_ANSWER
        if self.chat is not None:
            roles = {message["role"] for message in self.chat.messages(record)}
            if "assistant" not in roles:
                return f"no assistant turn, only {' and '.join(sorted(roles))}"
        return NO_TARGET


@dataclass(frozen=True)
class Encoder:
    """Turns documents into rows, by the tokenizer, the formats and the packing of a run."""

    data: Data
    fill: int  # the token of padding
    readers: tuple[FormatReader, ...]
    """One for each group of entries: of `data.train`, and then of `data.validation`."""
    num_rows: int | None = None  # the model's embeddings, where a token may have none
    reads_labels: bool = False  # whether the objective is of answers with a label

    @classmethod
    def of(
        cls,
        tokenizer: PreTrainedTokenizerBase,
        data: Data,
        num_rows: int | None = None,
        reads_labels: bool = False,
    ) -> Encoder:
        """Make the encoder of a run; UserError where the tokenizer lacks what it needs."""
        # No rules of rules/: only the tokenizer's files say what it lacks.
        pad, eos = tokenizer.pad_token_id, tokenizer.eos_token_id
        if pad is not None and num_rows is not None and pad >= num_rows:
            pad = None  # any other one does, as padding has no target
        if data.packed in JOINED and eos is None:
            need = f"data.packing {data.packed} joins documents with eos_token"
            raise UserError(f"{need}, which the tokenizer lacks; use none")
        fill = pad if pad is not None else eos
        if fill is None:
            raise UserError("the tokenizer has no pad_token and no eos_token to pad rows; add one")
        groups = [*data.groups("train"), *data.groups("validation")]
        readers = [FormatReader.of(tokenizer, keys) for _, keys in groups]
        return cls(data, fill, tuple(readers), num_rows, reads_labels)

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer of the run."""
        return self.readers[0].tokenizer

    def check(self, record: Record, group: int = 0) -> None:
        """Check the chat template on a first dialogue; see `ChatFormat.check`."""
        if (chat := self.readers[group].chat) is not None:
            chat.check(record)

    def documents(self, record: Record, start: SlotState, group: int = 0) -> list[Document]:
        """Return the documents of a record of a group of entries, which begins at `start`.

        BadDocument where the fields cannot be used.
        """
        return self.cut(self.encode(record, group), start)

    def encode(self, record: Record, group: int) -> list[Encoded]:
        """Return the documents of a record of a group, as tokens that the model has embeddings for.

        BadDocument where its fields cannot be used, and for any other token.
        """
        texts = self.readers[group].encode(record)
        if not self.reads_labels and any(tokens is NOTHING[0] for tokens, _ in texts):
            problem = "an answer with a label, which is no pair"
            way_out = "set training.objective: kto, or give pairs, with chosen and rejected"
            raise BadDocument("answer with a label", f"{problem}; {way_out}")
        for tokens, _ in texts:
            self._check_rows(tokens)
        return texts

    def cut(
        self, texts: Iterable[Encoded], start: SlotState, others: Sequence[Encoded] | None = None
    ) -> list[Document]:
        """Return the documents of a record that fit into rows; it begins at `start`.

        Of answers with a label, `others` is what another record gives.
        There are several where a dialogue is trained on turn by turn, or a long document is split.
        Where documents are kept apart, the first token of each is no target, since it would be
        predicted from the document before.
        """
        length = self.data.sequence_length
        if self.data.is_preference:
            return self._with_sides([*texts], start, others)
        documents: list[Document] = []
        for tokens, targets in texts:
            is_long = self.data.packed == "documents" and len(tokens) > length + 1
            for begin, end in self._parts(len(tokens)) if is_long else [(0, len(tokens))]:
                mask = np.array(targets[begin:end], bool)
                if self.data.keeps_documents_apart:
                    mask[:1] = False
                at = replace(start, part=len(documents))
                documents.append(
                    Document(np.array(tokens[begin:end], np.int32), mask, at, is_long=is_long)
                )
        return documents

    def _with_sides(
        self, sides: list[Encoded], start: SlotState, others: Sequence[Encoded] | None
    ) -> list[Document]:
        """Return a pair, or as many answers with a label as a record has."""
        length, skips = self.data.sequence_length, self.data.long == "skip"
        chosen, rejected = sides
        if not self.reads_labels or chosen[0] == rejected[0]:
            return [document_of(sides, length, skips, start)]
        alone = [side for side in ([chosen, NOTHING], [NOTHING, rejected]) if side != [NOTHING] * 2]
        documents = [
            document_of(side, length, skips, replace(start, part=part))
            for part, side in enumerate(alone)
        ]
        if others is None:
            return documents
        return [
            replace(document, other=document_of(mismatched(side, others), length, False, start))
            for document, side in zip(documents, alone)
        ]

    def _check_rows(self, tokens: Sequence[int]) -> None:
        if self.num_rows is not None and (largest := max(tokens, default=0)) >= self.num_rows:
            raise BadDocument(
                "token without an embedding",
                f"{self.tokenizer.convert_ids_to_tokens(largest)!r} is token {largest}, but the "
                f"model has {self.num_rows} embeddings (config.vocab_size); take it out of the "
                "text, or give the tokenizer that belongs to the model (model.tokenizer)",
            )

    def _parts(self, num_tokens: int) -> Sequence[tuple[int, int]]:
        """Return begin and end of the parts of a document that is longer than a row.

        A document that is skipped has an empty part. One that ends with its only turn that is
        trained on loses its beginning, others their end.
        """
        length = self.data.sequence_length
        if self.data.long == "cut" and self.data.turns == "separate":
            return [(num_tokens - length - 1, num_tokens)]
        if self.data.long == "split":
            return [(begin, begin + length + 1) for begin in range(0, num_tokens - 1, length)]
        return [(0, length + 1 if self.data.long == "cut" else 0)]

    def left_out(
        self, record: Record, documents: Sequence[Document], group: int = 0
    ) -> Counter[str]:
        """Count by reason what is left out of a record, since it has no target.

        It is the record, or some of its turns where each turn is a document.
        """
        if not any(document.has_target() for document in documents):
            is_long = any(document.is_long for document in documents)
            reason = TOO_LONG if is_long else self.readers[group].why_no_target(record)
            return Counter([equal_sides(documents[0]) or reason if documents else reason])
        is_one = self.data.turns == "together" and not self.reads_labels
        if is_one or self.data.long == "split":
            return Counter()
        return Counter(
            TOO_LONG if document.is_long else NO_ANSWER if self.reads_labels else NO_TARGET
            for document in documents
            if not document.has_target()
        )

    def with_entry(self, error: BadDocument) -> str:
        """Return an error, with the way to keys for one of several entries where it names keys."""
        keys = ("fields", "format", "text_field", "tools")
        is_mixed = len(self.data.entries("train")) > 1
        is_mixed &= any(f"data.{key}" in str(error) for key in keys)
        return f"{error} (for one entry of data.train: {ONE_ENTRY})" if is_mixed else str(error)

    def padding(self) -> np.ndarray:
        """Return a row of padding, which has no target."""
        row = empty_row(self.data.sequence_length, self.fill)
        return np.concatenate([row, row]) if self.reads_labels else row

    def rows(self, documents: Iterable[Document]) -> Iterator[Row]:
        """Pack these documents into rows."""
        return PACK[self.data.packed](documents, self.data.sequence_length, self.fill)
