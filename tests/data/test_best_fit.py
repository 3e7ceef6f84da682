"""`data.packing: documents`: rows of whole documents."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict
from itertools import islice

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.data.best_fit import WINDOW, pack_documents
from shardwise.data.loader import build_loaders
from shardwise.data.packing import Document, Row
from shardwise.data.state import SlotState, counts

FILL = 0


def documents(lengths: Iterable[int]) -> list[Document]:
    """Documents whose tokens are all their number, counted from 1."""
    return [
        Document(
            np.full(length, number + 1, np.int32), np.arange(length) > 0, SlotState(place=number)
        )
        for number, length in enumerate(lengths)
    ]


def contents(row: Row) -> list[tuple[int, int]]:
    """(document, its tokens in the row) of each document, in the order of the row."""
    numbers = row[0][1]
    places = [numbers == i for i in range(numbers.max() + 1)]
    return [(int(row[0][0][place][0]), int(place.sum())) for place in places]


@given(st.lists(st.integers(2, 9), min_size=1, max_size=200))
def test_each_document_is_whole_and_in_one_row(lengths):
    rows = list(pack_documents(documents(lengths), 8, FILL))
    assert sorted(c for row in rows for c in contents(row)) == sorted(enumerate(lengths, 1))
    for row in rows:
        assert all((row[0][0] == FILL) == (row[0][1] == -1))


def test_a_row_begins_with_the_oldest_and_takes_the_longest_that_fits():
    rows = [contents(row) for row in pack_documents(documents([3, 5, 2, 4, 6, 2]), 8, FILL)]
    assert rows == [[(1, 3), (5, 6)], [(2, 5), (4, 4)], [(3, 2), (6, 2)]]


@pytest.mark.parametrize("median", [150, 300, 500])
def test_97_percent_of_the_tokens_are_used(median):
    draw = random.Random(0)
    lengths = [
        min(max(4, int(draw.lognormvariate(math.log(median), 0.8))), 2049) for _ in range(4000)
    ]
    rows = islice(pack_documents(documents(lengths), 2048, FILL), 300)
    assert np.mean([np.mean(row[0][1] >= 0) for row in rows]) >= 0.97


def test_the_state_behind_a_row_names_what_still_waits():
    lengths = [3, 9, 2, 9, 6, 2, *[9] * WINDOW]
    rows = list(islice(pack_documents(documents(lengths), 8, FILL), 3))
    in_rows = {number - 1 for row in rows for number, _ in contents(row)}
    last = rows[-1][1]
    waiting = {place for place, _, _ in last.waiting}
    assert waiting | in_rows == set(range(last.place))
    assert not waiting & in_rows
    assert last.finished == len(in_rows)
    assert SlotState.read(asdict(last)) == last


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_run_resumes_at_any_step(tokenizer, write_corpus, run_config, workers):
    draw = random.Random(1)
    texts = ["x" * draw.randint(1, 30) for _ in range(100)]
    keys = {"packing": "documents", "long": "split", "sequence_length": 16, "global_batch_size": 4}
    cfg = run_config(write_corpus(texts), workers=workers, **keys)
    loaders = build_loaders(cfg, tokenizer, range(4))
    steps, states = [], []
    for batches in islice(loaders.train, 12):
        steps.append([tuple(map(tuple, b.input_ids.tolist())) for b in batches])
        states.append(loaders.state())
    loaders.train.close()
    for done in (1, 5, 11) if workers == 0 else (5,):
        resumed = build_loaders(cfg, tokenizer, range(4), states[done - 1])
        rest = [
            [tuple(map(tuple, b.input_ids.tolist())) for b in batches]
            for batches in islice(resumed.train, 12 - done)
        ]
        assert rest == steps[done:]
        assert resumed.state() == states[-1]
        resumed.train.close()


def test_an_epoch_has_each_document_once(tokenizer, write_corpus, run_config):
    alphabet = [chr(ord("A") + i) for i in range(26)]
    keys = {"packing": "documents", "sequence_length": 8, "global_batch_size": 1}
    cfg = run_config(write_corpus([letter * 3 for letter in alphabet]), **keys)
    loaders = build_loaders(cfg, tokenizer, range(1))
    counts: Counter[str] = Counter()
    for (batch,) in islice(loaders.train, 65):  # two documents of four tokens in a row: 5 epochs
        counts.update(c for c in tokenizer.decode(batch.input_ids[0]) if c in alphabet)
    assert max(counts.values()) - min(counts.values()) <= 3 * math.ceil(WINDOW / 26)


@pytest.mark.parametrize("keys", [{"long": "split"}, {"long": "cut"}])
def test_counts_say_what_rows_have_had(tokenizer, write_corpus, run_config, keys):
    """Documents of 3 rows each, of which a window holds 64 parts."""
    texts = [chr(ord("A") + i) * 20 for i in range(26)]
    cfg = run_config(
        write_corpus(texts), packing="documents", sequence_length=8, global_batch_size=1, **keys
    )
    loaders = build_loaders(cfg, tokenizer, range(1))
    seen: Counter[str] = Counter()
    for step, (batch,) in enumerate(islice(loaders.train, 26), 1):
        text = tokenizer.decode(batch.input_ids[0])
        seen.update({letter for letter in "ABCDEFGHIJKLMNOPQRSTUVWXYZ" if letter in text})
        read = counts(loaders.state())
        assert read.rows == step
        assert read.begun == len(seen)
        assert 0 <= read.finished <= read.begun
    if keys["long"] == "cut":
        assert read.finished == 26
