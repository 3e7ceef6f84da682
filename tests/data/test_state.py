import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from shardwise.config import RunConfig, UserError
from shardwise.data.loader import build_loaders
from shardwise.data.start import starts
from shardwise.data.state import LoaderState, SlotState, counts, merge_states
from shardwise.data.streaming import StreamOrder
from tests.data.test_loader import Row, corpora, divisors, lengths, over_ranks, rows_of, share_of
from tests.left_out import some_now

WriteCorpus = Callable[[Sequence[str]], str]
MakeConfig = Callable[..., RunConfig]


def read(
    cfg: RunConfig,
    tokenizer: PreTrainedTokenizerFast,
    num_ranks: int,
    num_steps: int,
    state: LoaderState | None = None,
) -> tuple[list[list[Row]], LoaderState]:
    """The rows of each global batch, and the merged state at the end, read back from JSON."""
    ranks = [
        build_loaders(cfg, tokenizer, slots, state)
        for slots in over_ranks(cfg.training.global_batch_size, num_ranks)
    ]
    steps = [
        [row for loaders in ranks for row in rows_of(next(loaders.train))] for _ in range(num_steps)
    ]
    merged = merge_states(loaders.state() for loaders in ranks)
    for loaders in ranks:
        loaders.train.close()
    return steps, json.loads(json.dumps(merged))


@given(
    data=st.data(),
    case=corpora(),
    packing=st.sampled_from(["none", "concat", "isolated", "documents"]),
    long=st.sampled_from(["cut", "split"]),
    sequence_length=lengths,
    before=st.integers(0, 5),
)
@settings(deadline=None, max_examples=20, derandomize=True)
def test_resume_goes_on_exactly_on_any_number_of_ranks(
    tokenizer, write_corpus, run_config, data, case, packing, long, sequence_length, before
):
    texts, batch_size = case
    train = write_corpus([*texts, "the cat"])
    cfg = run_config(
        train,
        packing=packing,
        long=long,
        sequence_length=max(sequence_length, 2),
        global_batch_size=batch_size,
    )
    expected, end = read(cfg, tokenizer, 1, before + 3)
    first, state = read(cfg, tokenizer, data.draw(divisors(batch_size)), before)
    then, then_state = read(cfg, tokenizer, data.draw(divisors(batch_size)), 3, state)
    assert first + then == expected
    assert then_state == end
    assert (state["step"], then_state["step"]) == (before, before + 3)


@pytest.mark.parametrize(("workers", "workers_then"), some_now([(2, 0), (0, 2), (2, 1)], [(2, 1)]))
def test_what_workers_have_read_ahead_is_not_in_the_state(
    tokenizer, write_corpus, run_config, workers, workers_then
):
    train = write_corpus([f"the text number {i} " * (i % 7) for i in range(40)])
    cfg, cfg_then = (
        run_config(train, workers=w, sequence_length=16, global_batch_size=6)
        for w in (workers, workers_then)
    )
    expected, _ = read(cfg, tokenizer, 1, 12)
    first, state = read(cfg, tokenizer, 1, 5)
    assert first + read(cfg_then, tokenizer, 2, 7, state)[0] == expected


def test_resume_reads_no_earlier_document(tokenizer, write_corpus, run_config, monkeypatch):
    texts = [f"{i:03}" for i in range(100)]
    cfg = run_config(write_corpus(texts), packing="none", sequence_length=2, global_batch_size=1)
    _, state = read(cfg, tokenizer, 1, 90)
    read_now: list[str] = []
    call = PreTrainedTokenizerFast.__call__
    monkeypatch.setattr(
        PreTrainedTokenizerFast,
        "__call__",
        lambda self, text, **k: read_now.append(text) or call(self, text, **k),
    )
    (((_, _, ids, _, _),),), _ = read(cfg, tokenizer, 1, 1, state)
    assert len(read_now) == 1  # a row a document: the 91st alone
    assert tokenizer.decode(ids) == read_now[0][:2]


def test_state_before_the_first_step_is_the_beginning(tokenizer, write_corpus, run_config):
    cfg = run_config(write_corpus(["abc" * 20, "the cat"]), global_batch_size=2, sequence_length=4)
    _, state = read(cfg, tokenizer, 2, 0)
    assert state["slots"] == dict.fromkeys(("0", "1"), json.loads(json.dumps(asdict(SlotState()))))
    assert read(cfg, tokenizer, 1, 3, state)[0] == read(cfg, tokenizer, 1, 3)[0]


def test_state_counts_documents_that_rows_have_left_behind(
    tokenizer: PreTrainedTokenizerFast, write_corpus: WriteCorpus, run_config: MakeConfig
) -> None:
    # Documents of 3 tokens and an end-of-text token in rows of 4: row k begins with token 0 of
    # document k, and a second epoch begins after 5 documents.
    cfg = run_config(write_corpus(["abc"] * 5), sequence_length=4, global_batch_size=1)
    states = [read(cfg, tokenizer, 1, steps)[1]["slots"]["0"] for steps in (1, 4, 6)]
    assert [(s["place"], s["token"]) for s in states] == [(1, 0), (4, 0), (6, 0)]


@given(
    data=st.data(),
    texts=st.lists(st.text("the cä", min_size=6, max_size=20), min_size=1, max_size=12),
    batch_size=st.sampled_from([1, 2, 4, 6]),
    sequence_length=lengths,
    steps=st.integers(0, 9),
)
@settings(deadline=None, max_examples=20, derandomize=True)
def test_counts_are_those_of_the_tokens_that_rows_had(
    tokenizer, write_corpus, run_config, data, texts, batch_size, sequence_length, steps
):
    cfg = run_config(
        write_corpus(texts), sequence_length=sequence_length, global_batch_size=batch_size
    )
    _, first = read(cfg, tokenizer, data.draw(divisors(batch_size)), steps // 2)
    _, state = read(cfg, tokenizer, data.draw(divisors(batch_size)), steps - steps // 2, first)
    n = len(texts)
    begun: set[tuple[int, int]] = set()
    finished = 0
    for slot in range(batch_size):
        left = steps * sequence_length  # tokens that its rows had as inputs
        for place, number in enumerate(share_of(slot, batch_size, n, 0, left + 1)):
            # The last target of a row is the token behind its inputs, perhaps a document's first.
            if left < 0 or steps == 0:
                break
            left -= len(tokenizer(texts[number])["input_ids"]) + 1
            begun.add((slot, place))
            finished += left >= 0
    counted = counts(state)
    assert counted.rows == steps * batch_size
    assert (counted.begun, counted.finished) == (len(begun), finished)
    assert counted.skipped == {}


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"seed": 1}, r"training\.seed \(was 0, is 1\)"),
        ({"global_batch_size": 4}, r"training\.global_batch_size \(was 2, is 4\)"),
        ({"sequence_length": 5}, r"data\.sequence_length \(was 4, is 5\)"),
        ({"packing": "none"}, r"data\.packing \(was concat, is none\)"),
        ({"validation": 0.4}, r"documents to train on \(was 5, is 3\)"),
        ({"texts": ["abc"] * 6}, r"documents to train on \(was 5, is 6\), the text of .*"),
        ({"texts": ["abcd"] * 5}, r"the text of data\.train \(was \w+, is \w+\)"),
        ({"texts": ["abd"] * 5}, r"the text of data\.train \(was \w+, is \w+\)"),
        ({"tokenizer": True}, r"the tokenizer \(was \w+, is \w+\)"),
    ],
)
def test_state_of_other_data_is_refused(tokenizer, write_corpus, run_config, change, name):
    keys = {"sequence_length": 4, "global_batch_size": 2}
    _, state = read(run_config(write_corpus(["abc"] * 5), **keys), tokenizer, 1, 1)
    other = tokenizer
    if change.pop("tokenizer", False):
        other = PreTrainedTokenizerFast(
            tokenizer_object=tokenizer.backend_tokenizer, eos_token="<eos>"
        )
    train = write_corpus(change.pop("texts", ["abc"] * 5))
    cfg = run_config(train, **{**keys, **change})
    with pytest.raises(UserError, match=f"checkpoint: {name}; "):
        build_loaders(cfg, other, range(cfg.training.global_batch_size), state)


def test_state_with_other_validation_text_is_refused(tokenizer, write_corpus, run_config):
    held_out = write_corpus(["the cat"] * 3)
    cfg = run_config(
        write_corpus(["abc"] * 5), validation=held_out, sequence_length=4, global_batch_size=2
    )
    _, state = read(cfg, tokenizer, 1, 1)
    build_loaders(cfg, tokenizer, range(2), state)
    Path(held_out).write_text(Path(held_out).read_text().replace("cat", "dog"))
    with pytest.raises(
        UserError, match=r"checkpoint: the text of data\.validation \(was \w+, is \w+\);"
    ):
        build_loaders(cfg, tokenizer, range(2), state)


def test_state_of_another_order_is_refused(tokenizer, write_corpus, run_config):
    cfg = run_config(write_corpus(["abc"] * 5), global_batch_size=2)
    _, state = read(cfg, tokenizer, 1, 1)
    del state["read_from"][
        "the order of the documents"
    ]  # as it was saved before the order had a name
    with pytest.raises(
        UserError, match=r"checkpoint: the order of the documents \(was None, is swap-or-not, .*\);"
    ):
        build_loaders(cfg, tokenizer, range(2), state)


def test_a_resumed_run_may_change_how_the_batch_is_read(tokenizer, write_corpus, run_config):
    cfg = run_config(write_corpus(["abc" * 9] * 5), sequence_length=4, global_batch_size=4)
    expected, _ = read(cfg, tokenizer, 1, 4)
    _, state = read(cfg, tokenizer, 1, 2)
    then = replace(
        cfg,
        data=replace(cfg.data, workers=1),
        training=replace(cfg.training, micro_batch_size=2, steps=7),
    )
    loaders = build_loaders(then, tokenizer, range(4), state)
    assert [rows_of(batches) for batches in islice(loaders.train, 2)] == expected[2:]
    loaders.train.close()


def test_a_state_that_lacks_a_slot_is_refused():
    with pytest.raises(UserError, match="slot 1 of the batch"):
        starts({"step": 1, "read_from": {}, "slots": {"0": {}}}, {}, range(2), StreamOrder())
