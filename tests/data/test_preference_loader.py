"""The batches of pairs: the same on any ranks and workers, and after a resume."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import islice
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from shardwise.base.batches import IGNORED
from shardwise.config import Parallel, RunConfig
from shardwise.data.loader import build_loaders
from shardwise.data.packing import PADDING
from shardwise.data.state import counts
from tests.data.test_corpus import datasets_cache  # noqa: F401
from tests.data.test_loader import Row, divisors, rows_of, train_rows, without_padding
from tests.data.test_state import read
from tests.left_out import some_now

WritePairs = Callable[[list[dict[str, Any]]], str]
WORDS = st.text("the ab", max_size=12)
EOS = 1


@pytest.fixture(scope="session")
def write_pairs(tmp_path_factory: pytest.TempPathFactory) -> WritePairs:
    """A function that writes records to a new JSONL file and returns its path."""

    def write(records: list[dict[str, Any]]) -> str:
        path = tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        return str(path)

    return write


def pair(number: int) -> dict[str, Any]:
    """A pair whose answers nothing else has, and of several lengths."""
    words = [f"{side}{number}" * (1 + number % 3) for side in "yn"]
    return {"prompt": f"{number}?" * (1 + number % 4), "chosen": words[0], "rejected": words[1]}


@st.composite
def records(draw: st.DrawFn) -> tuple[list[dict[str, Any]], int]:
    """Pairs and labelled answers, some to be left out, and a global batch size."""
    pairs = st.fixed_dictionaries({"prompt": WORDS, "chosen": WORDS, "rejected": WORDS})
    answers = st.fixed_dictionaries(
        {"prompt": WORDS, "completion": WORDS, "label": st.sampled_from([True, False])}
    )
    found = draw(st.lists(st.one_of(pairs, answers), max_size=10))
    return [*found, pair(1), pair(2)], draw(st.sampled_from([1, 2, 4]))


def settled(run_config: Callable[..., RunConfig], train: str | list[str], **keys: Any) -> RunConfig:
    return run_config(train, format="preference", **keys)


def parts_of(row: Row) -> dict[int, tuple[list[int], list[int]]]:
    """By the number of a side, its tokens that are read, and those that are predicted."""
    found: dict[int, tuple[list[int], list[int]]] = {}
    for token, label, number in zip(*row[2:5]):
        if number != PADDING:
            tokens, labels = found.setdefault(number, ([], []))
            tokens.append(token)
            if label != IGNORED:
                labels.append(label)
    return found


@given(
    data=st.data(),
    case=records(),
    packing=st.sampled_from(["auto", "none", "documents"]),
    long=st.sampled_from(["cut", "skip"]),
    sequence_length=st.sampled_from([9, 16, 40]),
    before=st.integers(0, 4),
    objective=st.sampled_from(["dpo", "kto"]),
)
@settings(deadline=None, max_examples=15, derandomize=True)
def test_resume_and_ranks_change_nothing(
    tokenizer,
    write_pairs,
    run_config,
    data,
    case,
    packing,
    long,
    sequence_length,
    before,
    objective,
):
    found, batch_size = case
    keys = {"packing": packing, "long": long, "sequence_length": sequence_length}
    keys |= {"on_error": "skip", "objective": objective}  # of which one reads labels
    if long == "skip":
        keys["sequence_length"] = 40
    cfg = settled(run_config, write_pairs(found), global_batch_size=batch_size, **keys)
    expected, end = read(cfg, tokenizer, 1, before + 3)
    first, state = read(cfg, tokenizer, data.draw(divisors(batch_size)), before)
    then, then_state = read(cfg, tokenizer, data.draw(divisors(batch_size)), 3, state)
    rows, wanted = (
        [sorted(map(without_padding, step)) for step in steps] for steps in (first + then, expected)
    )
    assert rows == wanted
    assert then_state == end
    sizes = [counts(state).finished for state in (state, end)]
    assert sizes == sorted(sizes)


@pytest.mark.parametrize("workers", some_now((1, 2), (2,)))
def test_workers_change_nothing(tokenizer, write_pairs, run_config, workers):
    train = write_pairs([pair(number) for number in range(20)])
    keys = {"sequence_length": 40, "global_batch_size": 4}
    expected = train_rows(settled(run_config, train, **keys), tokenizer, range(4), 8)
    cfg = settled(run_config, train, workers=workers, **keys)
    assert train_rows(cfg, tokenizer, range(4), 8) == expected


@pytest.mark.parametrize("packing", ["none", "documents"])
def test_an_epoch_has_each_pair_once_and_whole(tokenizer, write_pairs, run_config, packing):
    pairs = [pair(number) for number in range(11)]
    cfg = settled(
        run_config,
        write_pairs(pairs),
        packing=packing,
        sequence_length=64,
        global_batch_size=2,
        epochs=1,
    )
    loaders = build_loaders(cfg, tokenizer, range(2))
    steps = loaders.num_steps(range(2), lambda mine: [mine])
    rows = [row for batches in islice(loaders.train, steps) for row in rows_of(batches)]
    by_answer = {p["chosen"]: p for p in pairs}
    read_answers = []
    for row in rows:
        parts = parts_of(row)
        assert [*parts] == [*range(len(parts))]  # in their order, and both of each
        assert len(parts) % 2 == 0
        assert packing == "documents" or len(parts) <= 2
        for number in range(0, len(parts), 2):
            answers = [tokenizer.decode(parts[number + side][1]) for side in (0, 1)]
            assert all(answer.endswith("<eos>") for answer in answers)
            found = by_answer[answers[0].removesuffix("<eos>")]
            assert answers[1] == found["rejected"] + "<eos>"
            for side, name in enumerate(("chosen", "rejected")):
                text = tokenizer.decode(parts[number + side][0])
                assert (found["prompt"] + found[name]).startswith(text.removesuffix("<eos>"))
                assert text.startswith(found["prompt"])
            read_answers.append(found["chosen"])
    assert sorted(read_answers) == sorted(by_answer)


def test_no_label_crosses_from_one_side_to_the_other(tokenizer, write_pairs, run_config):
    train = write_pairs([{"prompt": "ab", "chosen": "h", "rejected": "e"}])
    cfg = settled(run_config, train, sequence_length=8, global_batch_size=1)
    ((row,),) = train_rows(cfg, tokenizer, range(1), 1)
    a, b, h, e = (tokenizer.convert_tokens_to_ids(letter) for letter in "abhe")
    none = IGNORED
    assert row[2] == (a, b, h, EOS, a, b, e, EOS)
    assert row[3] == (none, h, EOS, none, none, e, EOS, none)
    assert row[4] == (0, 0, 0, 0, 1, 1, 1, 1)


def test_a_share_for_validation_and_weights(tokenizer, write_pairs, run_config):
    pairs = [pair(number) for number in range(10)]
    cfg = settled(
        run_config, write_pairs(pairs), validation=0.3, sequence_length=40, global_batch_size=1
    )
    loaders = build_loaders(cfg, tokenizer, range(1))
    assert loaders.validation is not None

    def answers(steps: Any) -> set[str]:
        rows = [row for batches in steps for row in rows_of(batches)]
        return {tokenizer.decode(part[1]) for row in rows for part in parts_of(row).values()}

    held_out = answers(loaders.validation)
    trained = answers(islice(loaders.train, 30))
    assert (len(held_out), len(trained)) == (6, 14)
    assert not held_out & trained
    # Pairs of one entry come three times as often as those of the other.
    entries = [write_pairs(pairs[:5]), write_pairs(pairs[5:])]
    cfg = settled(
        run_config,
        entries,
        weights=[3.0, 1.0],
        packing="none",
        sequence_length=40,
        global_batch_size=4,
    )
    rows = [row for step in train_rows(cfg, tokenizer, range(4), 5) for row in step]
    said = [tokenizer.decode(parts_of(row)[0][1]).removesuffix("<eos>") for row in rows]
    first = {p["chosen"] for p in pairs[:5]}
    assert sum(words in first for words in said) == 15


def test_validation_compares_each_answer_with_the_next_one_of_its_own(
    tokenizer, write_pairs, run_config
):
    labelled = [{"prompt": f"{n}", "completion": "x" * n, "label": n % 2 == 0} for n in range(1, 4)]
    train = write_pairs([pair(number) for number in range(4)])
    cfg = settled(
        run_config,
        train,
        validation=[write_pairs(labelled)],
        objective="kto",
        packing="none",
        sequence_length=40,
        global_batch_size=3,
        micro_batch_size=3,
    )
    loaders = build_loaders(cfg, tokenizer, range(3))
    assert loaders.validation is not None
    ((batch,),) = loaders.validation
    answers = [
        tokenizer.decode([label for label in labels if label != IGNORED])
        for given in (batch, batch.mismatched)
        for labels in given.labels.tolist()
    ]
    said = [f"{'x' * n}<eos>" for n in (1, 2, 3, 2, 3, 1)]
    assert answers == said
    for batches in islice(loaders.train, 3):  # never an answer that is held out
        for _, _, ids, *_ in rows_of(batches):
            assert "x" not in tokenizer.decode([*ids])


def test_a_stream_has_the_same_pairs(
    tokenizer,
    run_config,
    tmp_path,
    datasets_cache,  # noqa: F811
):
    lines = [json.dumps(pair(number)) for number in range(12)]
    (tmp_path / "pairs.jsonl").write_text("\n".join(lines))
    cfg = settled(
        run_config, str(tmp_path), streaming=True, sequence_length=40, global_batch_size=2
    )
    expected, end = read(cfg, tokenizer, 1, 9)
    first, state = read(cfg, tokenizer, 2, 4)
    then, last = read(cfg, tokenizer, 1, 5, state)
    assert (first + then, last) == (expected, end)
    said = {
        tokenizer.decode(part[1]).removesuffix("<eos>")
        for step in expected
        for row in step
        for part in parts_of(row).values()
    }
    assert said == {p[side] for p in map(pair, range(12)) for side in ("chosen", "rejected")}


def test_rows_of_one_pair_end_with_the_longest_of_a_micro_batch(
    tokenizer: PreTrainedTokenizerFast, write_pairs: WritePairs, run_config
) -> None:
    train = write_pairs([{"prompt": "ab", "chosen": "h", "rejected": "e"}])
    cfg = settled(run_config, train, packing="none", sequence_length=64, global_batch_size=1)
    assert cfg.parallel == Parallel()
    (batch,) = next(build_loaders(cfg, tokenizer, range(1)).train)
    assert batch.input_ids.shape == (1, 8)
    assert cfg.data.keeps_documents_apart
