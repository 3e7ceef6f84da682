"""A view of what a run would train on: counts of each source, and the rows of the first step."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from shardwise.config import RunConfig
from shardwise.data.corpus import Corpus
from shardwise.data.formats import Encoder
from shardwise.data.loader import check_first, open_data
from shardwise.data.order import Order
from shardwise.data.packing import PADDING
from shardwise.data.slots import TrainStream
from shardwise.data.state import SlotState
from shardwise.data.streaming import Streamed, StreamPass, StreamSample
from shardwise.data.survey import Survey, sources_of, spread

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


PAIR, LABELLED = ("chosen", "rejected"), ("desirable", "undesirable")


@dataclass(frozen=True)
class Preview:
    """The sources of a run, and rows [3, T+1] of its first step (see `packing.py`)."""

    train: list[Survey]
    validation: list[Survey]
    rows: list[np.ndarray]
    num_documents: int | None
    """The documents of an epoch; None for a stream."""
    num_held_out: int
    """The documents that are held out of them for validation."""
    sides: tuple[str, str] | None
    """Names of the sides of a pair, or of the labels of an answer; None: documents have none."""

    def epoch(self, cfg: RunConfig) -> str:
        """Return in words what an epoch has; empty for a stream."""
        if self.num_documents is None:
            return ""
        mean_tokens = sum(survey.mean(survey.tokens) for survey in self.train)
        rows = cfg.training.global_batch_size
        steps = math.ceil(mean_tokens * self.num_documents / (rows * cfg.data.sequence_length))
        held_out = f", and {self.num_held_out:,} are held out" if self.num_held_out else ""
        return (
            f"an epoch has {self.num_documents:,} documents{held_out}; its tokens fill at least "
            f"{steps:,} steps of {rows:,} rows"
        )

    def names(self, row: np.ndarray) -> dict[int, str]:
        """Return a name for each document of a row, or for each side of its pairs."""
        names = {number: f"document {number + 1}" for number in sorted({*row[1].tolist()} - {-1})}
        if self.sides is not None:
            what = "pair" if self.sides == PAIR else "answer"
            for number in names:
                names[number] = f"{what} {number // 2 + 1}, {self.sides[number % 2]}"
        return names

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data, safe for JSON."""
        names = ("tokens", "documents", "targets")
        rows = [dict(zip(names, row.tolist())) for row in self.rows]
        sources = {
            key: [survey.to_dict() for survey in getattr(self, key)]
            for key in ("train", "validation")
        }
        counts = {"epoch_documents": self.num_documents, "held_out": self.num_held_out}
        return {**sources, **counts, "rows": rows}


def preview(
    cfg: RunConfig, tokenizer: PreTrainedTokenizerBase, num_documents: int | None, num_rows: int
) -> Preview:
    """Read so many documents of each source, evenly spaced (None: all), and the first rows.

    Of a stream the first documents are read. UserError as a run would give it.
    """
    encoder = Encoder.of(tokenizer, cfg.data, reads_labels=cfg.training.reads_labels)
    corpus, order, held_out = open_data(cfg)
    validation = None if held_out is None or held_out[0] is corpus else held_out[0]
    for documents in (corpus, validation):
        if documents is not None:
            check_first(documents, encoder)
    slots = range(min(num_rows, cfg.training.global_batch_size))
    begin = {slot: SlotState() for slot in slots}
    stream = TrainStream(corpus, order, encoder, cfg.training.global_batch_size, 0, begin, None)
    first = next(iter(stream)) if num_rows else {}
    if isinstance(first, Exception):
        raise first
    has_share = isinstance(corpus, Corpus) and isinstance(order, Order)
    num_held_out = len(corpus) - len(order) if has_share else 0
    return Preview(
        [*_surveys(corpus, encoder, num_documents, cfg.data.shares)],
        [] if validation is None else [*_surveys(validation, encoder, num_documents, None)],
        [first[slot][0] for slot in slots],
        order.num_documents,
        num_held_out,
        (LABELLED if cfg.training.reads_labels else PAIR) if cfg.data.is_preference else None,
    )


def _surveys(
    corpus: Corpus | Streamed | StreamPass,
    encoder: Encoder,
    most: int | None,
    weights: tuple[float, ...] | None,
) -> Iterator[Survey]:
    if isinstance(corpus, Corpus):
        parts = sources_of(corpus)
        sizes = Counter[int]()
        for part in parts:
            sizes[part.group] += len(part.numbers)
        for name, group, numbers in parts:
            share = len(numbers) / len(corpus)
            if weights is not None:
                share = weights[group] / sum(weights) * len(numbers) / sizes[group]
            chosen = numbers if most is None else spread(numbers, most)
            survey = Survey(name, len(numbers), share)
            yield survey.add(corpus, encoder, chosen, math.inf)
        return
    stream = corpus.stream if isinstance(corpus, StreamPass) else corpus
    for alone in stream.alone():
        sample = StreamSample(alone, most)
        numbers = range(len(sample))
        yield Survey(str(alone.entries[0]), None).add(sample, encoder, numbers, math.inf)


def spans_of(
    row: np.ndarray, tokenizer: PreTrainedTokenizerBase
) -> Iterator[tuple[str, int, bool, bool]]:
    """Yield the texts of a row [3, T+1], cut where one of what follows them changes.

    (text, number of the document, whether its tokens are targets, whether it is a special token).
    """
    special = set(tokenizer.all_special_ids)
    tokens, documents, targets = row[:3, row[1] != PADDING]
    kinds = [
        (int(document), bool(target), int(token) in special)
        for token, document, target in zip(tokens, documents, targets)
    ]
    begin = 0
    for end in range(1, len(kinds) + 1):
        is_cut = end == len(kinds) or kinds[end] != kinds[begin] or kinds[begin][2]
        if is_cut:
            yield str(tokenizer.decode(tokens[begin:end].tolist())), *kinds[begin]
            begin = end
