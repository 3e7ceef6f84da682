"""Where `training.epochs` end: every step but the last is full, and every document is whole."""

from __future__ import annotations

import json
import string
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from shardwise.base.batches import IGNORED
from shardwise.config import RunConfig, UserError
from shardwise.data.formats import Encoder
from shardwise.data.loader import Loaders, build_loaders
from shardwise.data.order import draws
from shardwise.data.state import LoaderState, SlotState, counts, merge_states
from tests.data.templates import CHATML
from tests.data.test_formats import chat_tokenizer, dialogue
from tests.data.test_loader import EOS, Row, over_ranks, predicted, rows_of

WriteCorpus = Callable[[Sequence[str]], str]
MakeConfig = Callable[..., RunConfig]
LETTERS = string.ascii_letters  # one token each; "the" is a token, but never occurs


def alone(value: Any) -> list[Any]:
    """What one rank gathers."""
    return [value]


def dealt(cfg: RunConfig, tokenizer: PreTrainedTokenizerFast) -> tuple[int, LoaderState]:
    """The number of steps, and the state before the first one."""
    slots = range(cfg.training.global_batch_size)
    loaders = build_loaders(cfg, tokenizer, slots)
    num_steps = loaders.num_steps(slots, alone)
    return num_steps, json.loads(json.dumps(loaders.state()))


def read(
    cfg: RunConfig,
    tokenizer: PreTrainedTokenizerFast,
    num_ranks: int,
    num_steps: int,
    state: LoaderState,
) -> tuple[list[list[Row]], list[LoaderState]]:
    """The rows of each global batch in the order of slots, and the state behind each."""
    shares = over_ranks(cfg.training.global_batch_size, num_ranks)
    ranks = [build_loaders(cfg, tokenizer, slots, state) for slots in shares]
    steps, states = [], [state]
    for _ in range(num_steps):
        steps.append([row for rank in ranks for row in rows_of(next(rank.train))])
        merged = merge_states(rank.state() for rank in ranks)
        states.append(json.loads(json.dumps(merged)))
    for rank in ranks:
        rank.train.close()
    return steps, states


def adjacent(rows: Sequence[Row]) -> Counter[tuple[int, int]]:
    """The pairs of a token and the one that is predicted from it, without first tokens."""
    return Counter(
        (token, label)
        for row in rows
        for token, label in zip(row[2], row[3])
        if label != IGNORED and token != EOS
    )


cases = st.fixed_dictionaries(
    {
        "lengths": st.lists(
            st.one_of(st.integers(1, 12), st.integers(1, 90)), min_size=1, max_size=len(LETTERS)
        ),
        "batch_size": st.sampled_from([1, 2, 3, 4, 6, 8]),
        "packing": st.sampled_from(["none", "concat", "isolated", "documents"]),
        "sequence_length": st.integers(2, 20),
        "epochs": st.sampled_from([1.0, 1.0, 2.0]),
    }
)


SEAM = {"lengths": [7, 4, 1, 3, 5], "batch_size": 2, "sequence_length": 4, "epochs": 1.0}
"""A slot's last own row ends on the first token of a document, which the rest goes on with."""


@given(case=cases, picks=st.tuples(*[st.integers(0, 99)] * 3))
@example(case={**SEAM, "packing": "concat"}, picks=(0, 1, 2))
@example(case={**SEAM, "packing": "isolated"}, picks=(0, 1, 2))
@settings(deadline=None, max_examples=25, derandomize=True)
def test_all_steps_but_the_last_are_full_and_each_document_is_whole(
    tokenizer, write_corpus, run_config, case, picks
):
    texts = [letter * length for letter, length in zip(LETTERS, case["lengths"])]
    size, packing, epochs = case["batch_size"], case["packing"], case["epochs"]
    length = case["sequence_length"]
    keys = {key: case[key] for key in ("packing", "sequence_length", "epochs")}
    cfg = run_config(write_corpus(texts), global_batch_size=size, long="split", seed=0, **keys)
    divisors = [number for number in range(1, size + 1) if size % number == 0]
    ranks, resumed_ranks = (divisors[pick % len(divisors)] for pick in picks[:2])
    documents = [[*tokenizer(text)["input_ids"], EOS] for text in texts]
    pairs = Counter(pair for document in documents for pair in pairwise(document))
    num_steps, start = dealt(cfg, tokenizer)
    if not pairs:
        assert num_steps == 0
        return
    steps, states = read(cfg, tokenizer, ranks, num_steps + 1, start)
    # Every slot has a row in every step but the last, and no step comes behind it.
    filled = [[any(label != IGNORED for label in row[3]) for row in rows] for rows in steps]
    assert all(all(rows) for rows in filled[:-2])
    assert any(filled[-2])
    assert not any(filled[-1])
    # Each pair of neighbours of each document, its end among them, is there once an epoch.
    rows = [row for rows in steps for row in rows]
    assert adjacent(rows) == Counter({pair: epochs * n for pair, n in pairs.items()})
    # As many steps as one stream needs, within a row a slot.
    encoder = Encoder.of(tokenizer, cfg.data)
    encoded = [
        document
        for place, text in enumerate(texts * int(epochs))
        for document in encoder.documents({"text": text}, SlotState(place))
    ]
    num_rows = sum(1 for _ in encoder.rows(d for d in encoded if d.has_target()))
    assert num_steps <= -(-(num_rows + size * (packing != "none")) // size)
    if packing == "concat":
        # A first token, which is predicted from the end before it, is taught once an epoch at most.
        first = Counter(b for row in rows for a, b in zip(row[2], row[3]) if a == EOS)
        del first[IGNORED]
        assert max(first.values(), default=0) <= epochs
        in_full_steps = [row for rows in steps[: num_steps - 1] for row in rows]
        # A slot's first token is no target, nor is the one with which its part of the rest begins.
        assert len(predicted(in_full_steps)) >= len(in_full_steps) * length - 2 * size - 1
    read_documents = counts(states[-1])
    assert (read_documents.begun, read_documents.finished) == (epochs * len(texts),) * 2
    seen: set[int] = set()
    for step, state in zip(steps, states[1:]):
        counted = counts(state)
        assert counted.finished <= counted.begun
        seen |= {t for row in step for t, d in zip(row[2], row[4]) if d >= 0 and t != EOS}
        if epochs == 1 and state["rest"]["row"] == 0:  # a row each, and no other slot's before it
            no_target = counted.skipped.get("no target", 0)
            # A row is a token longer than its inputs, and may end on the first one of a document.
            slots = map(SlotState.read, state["slots"].values())
            unseen = sum(slot.is_begun and slot.part + slot.token == 0 for slot in slots)
            assert counted.begun - no_target - unseen <= len(seen) <= counted.begun
    # A resume on other ranks goes on exactly.
    before = picks[2] % (num_steps + 1)
    then, ends = read(cfg, tokenizer, resumed_ranks, num_steps + 1 - before, states[before])
    assert (then, ends) == (steps[before:], states[before:])


@given(
    lengths=st.lists(st.integers(1, 60), min_size=2, max_size=20),
    second=st.lists(st.integers(1, 60), min_size=2, max_size=5),
    weights=st.tuples(st.floats(0.1, 9), st.floats(0.1, 9)),
    epochs=st.sampled_from([0.4, 1.0, 1.7]),
    size=st.sampled_from([1, 3, 8]),
    packing=st.sampled_from(["none", "concat", "documents"]),
)
@settings(deadline=None, max_examples=20, derandomize=True)
def test_with_weights_too(
    tokenizer, write_corpus, run_config, lengths, second, weights, epochs, size, packing
):
    train = [
        write_corpus(["a" * n + "?" for n in lengths]),
        write_corpus(["b" * n for n in second]),
    ]
    keys: dict[str, Any] = {"packing": packing, "sequence_length": 8, "long": "split"}
    cfg = run_config(train, weights=list(weights), epochs=epochs, global_batch_size=size, **keys)
    num_steps, start = dealt(cfg, tokenizer)
    steps, states = read(cfg, tokenizer, 1, num_steps + 1, start)
    filled = [all(any(label != IGNORED for label in row[3]) for row in rows) for rows in steps]
    assert all(filled[: num_steps - 1])
    counted, total = counts(states[-1]), len(lengths) + len(second)
    assert counted.finished == max(round(epochs * total), 1)
    drawn = draws(counted.finished, weights)
    assert counted.epochs_by_entry == (drawn[0] / len(lengths), drawn[1] / len(second))


def test_the_last_steps_of_packed_documents_are_full(
    tokenizer: PreTrainedTokenizerFast, write_corpus: WriteCorpus, run_config: MakeConfig
) -> None:
    # 1,000 documents of 30 tokens and an end: 157 rows of 205 hold them at 6 a row, at 64 a step
    # three steps. Slots that own 15 or 16 documents each need three rows, and the last two rows of
    # each are half empty.
    texts = ["a" * (12 + 37 * i % 60) for i in range(1000)]
    cfg = run_config(
        write_corpus(texts),
        packing="documents",
        sequence_length=205,
        global_batch_size=64,
        epochs=1.0,
    )
    num_steps, start = dealt(cfg, tokenizer)
    tokens = sum(len(text) + 1 for text in texts)
    assert num_steps == -(-tokens // (64 * 206))
    steps, states = read(cfg, tokenizer, 1, num_steps, start)
    fill = [sum(d >= 0 for row in rows for d in row[4]) / (64 * 205) for rows in steps]
    assert min(fill[:-1]) > 0.95
    padding = counts(states[-1]).padding
    assert padding == pytest.approx(1 - sum(fill) / num_steps)
    assert f"{padding:.1%} padding" in str(counts(states[-1]))


def test_ranks_and_workers_find_the_same_end(tokenizer, write_corpus, run_config):
    texts = [f"the text number {i} " * (i % 9) for i in range(60)]
    keys: dict[str, Any] = {"sequence_length": 16, "global_batch_size": 6, "epochs": 1.5}
    train = write_corpus(texts)
    cfg = run_config(train, **keys)
    num_steps, expected = dealt(cfg, tokenizer)
    with_workers = run_config(train, workers=2, **keys)
    assert dealt(with_workers, tokenizer) == (num_steps, expected)
    steps, states = read(cfg, tokenizer, 1, num_steps, expected)
    assert read(with_workers, tokenizer, 2, num_steps, expected) == (steps, states)
    loaders = build_loaders(cfg, tokenizer, range(6), states[-1])
    assert rows_of(loaders.first_step()) == steps[0]
    # Three ranks count the slots 0 and 3, 1 and 4, 2 and 5.
    barrier, values, found = threading.Barrier(3), {}, {}

    def rank(index: int) -> None:
        def gather(value: Any) -> list[Any]:
            values[index] = value
            barrier.wait()
            gathered = [values[i] for i in range(3)]
            barrier.wait()
            return gathered

        loaders = build_loaders(cfg, tokenizer, range(2 * index, 2 * index + 2))
        found[index] = loaders.num_steps(range(index, 6, 3), gather), loaders.state()

    threads = [threading.Thread(target=rank, args=(index,)) for index in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[index][0] for index in range(3)] == [num_steps] * 3
    merged = merge_states(state for _, (_, state) in sorted(found.items()))
    assert json.loads(json.dumps(merged)) == expected


def test_a_long_document_at_the_end_is_shared_by_all_slots(tokenizer, write_corpus, run_config):
    for packing in ("none", "concat", "documents"):
        cfg = run_config(
            write_corpus(["a" * 400, "bcd"]),
            packing=packing,
            long="split",
            sequence_length=10,
            global_batch_size=8,
            epochs=1.0,
        )
        num_steps, start = dealt(cfg, tokenizer)
        assert num_steps == 6  # 40 rows and a few, of 8 a step
        steps, _ = read(cfg, tokenizer, 1, num_steps, start)
        ends = [row for rows in steps for row in rows if EOS in row[3]]
        assert sum(row[3].count(EOS) for row in ends) == 2


def test_a_row_without_a_text_is_padding(tokenizer, write_corpus, run_config):
    text = "The answer to the question is forty-two, as everyone knows."
    tokens = tokenizer(text)["input_ids"]
    for packing in ("none", "concat", "isolated", "documents"):
        cfg = run_config(
            write_corpus([text]),
            packing=packing,
            sequence_length=128,
            global_batch_size=4,
            epochs=1.0,
        )
        num_steps, start = dealt(cfg, tokenizer)
        (rows,), (_, state) = read(cfg, tokenizer, 1, num_steps, start)
        assert sorted(predicted([row]) for row in rows) == [[], [], [], [*tokens[1:], EOS]]
        assert counts(state).finished == 1


@pytest.mark.parametrize("packing", ["none", "concat", "documents"])
def test_more_and_fewer_epochs_than_a_state_was_of(tokenizer, write_corpus, run_config, packing):
    texts = [letter * (2 + 7 * i % 40) for i, letter in enumerate(LETTERS)]
    keys: dict[str, Any] = {"packing": packing, "sequence_length": 8, "global_batch_size": 3}
    one, two = (
        run_config(write_corpus(texts), epochs=epochs, long="split", **keys)
        for epochs in (1.0, 2.0)
    )
    two = replace(two, data=one.data)
    num_steps, start = dealt(one, tokenizer)
    steps, states = read(one, tokenizer, 1, num_steps, start)
    begun = next(k for k, state in enumerate(states) if state["rest"]["row"])
    assert 0 < begun < num_steps

    def go_on(cfg: RunConfig, state: LoaderState) -> tuple[int, Loaders]:
        loaders = build_loaders(cfg, tokenizer, range(3), state)
        return loaders.num_steps(range(3), alone), loaders

    pairs = adjacent([row for rows in steps for row in rows])
    for before in (0, 1, begun - 1, num_steps):
        last, loaders = go_on(two, states[before])
        more = [rows_of(next(loaders.train)) for _ in range(last - before)]
        rows = [row for rows in [*steps[:before], *more] for row in rows]
        assert adjacent(rows) == Counter({pair: 2 * n for pair, n in pairs.items()})
        read_twice = counts(loaders.state())
        assert read_twice.begun == read_twice.finished == 2 * len(texts)
        assert read_twice.long == 2 * counts(states[-1]).long
    with pytest.raises(UserError, match=r"^training\.epochs: after step .* keep 1, or resume"):
        go_on(two, states[begun])
    assert go_on(one, states[-1])[0] == num_steps  # nothing is left


@pytest.mark.parametrize("turns", ["together", "separate"])
def test_a_resume_encodes_a_record_once_for_all_its_waiting_parts(
    tokenizer, tmp_path, run_config, monkeypatch, turns
):
    if turns == "together":
        records, keys = [{"text": letter * 900} for letter in "abc"], {"long": "split"}
    else:
        turn = ("q", "a" * 5)
        records, keys = [dialogue(*turn * 12)] * 3, {"format": "chat", "turns": turns}
        tokenizer = chat_tokenizer(tokenizer, CHATML)
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    keys |= {"packing": "documents", "sequence_length": 8 if turns == "together" else 900}
    cfg = run_config(str(tmp_path / "a.jsonl"), global_batch_size=1, **keys)
    loaders = build_loaders(cfg, tokenizer, range(1))
    steps = [rows_of(next(loaders.train)) for _ in range(2)]
    state = loaders.state()
    steps.append(rows_of(next(loaders.train)))
    (slot,) = state["slots"].values()
    waiting = {place for place, *_ in slot["waiting"]}
    assert len(slot["waiting"]) > 3 * len(waiting)
    encoded, cut = [], Encoder.cut
    monkeypatch.setattr(Encoder, "cut", lambda *args: encoded.append(args[2].place) or cut(*args))
    resumed = build_loaders(cfg, tokenizer, range(1), state)
    assert rows_of(next(resumed.train)) == steps[-1]
    assert max(Counter(encoded).values()) == 1
    assert waiting <= set(encoded)
