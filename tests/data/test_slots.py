"""`training.epochs` end after exactly as many documents, and each is counted once."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from shardwise.batches import IGNORED
from shardwise.config import RunConfig
from shardwise.data.loader import Loaders, build_loaders
from shardwise.data.state import Counts, LoaderState, counts, merge_states
from tests.data.templates import CHATML
from tests.data.test_formats import chat_tokenizer, dialogue
from tests.data.test_loader import (
    EOS,
    Row,
    all_packings,
    corpora,
    divisors,
    lengths,
    over_ranks,
    predicted,
    rows_of,
)

WriteCorpus = Callable[[Sequence[str]], str]
MakeConfig = Callable[..., RunConfig]


def read(loaders: Sequence[Loaders], num_steps: int) -> tuple[list[list[Row]], LoaderState]:
    """The rows of each global batch, in the order of slots, and the state after the last one."""
    steps = [
        [row for rank in loaders for row in rows_of(next(rank.train))] for _ in range(num_steps)
    ]
    state = json.loads(json.dumps(merge_states(rank.state() for rank in loaders)))
    for rank in loaders:
        rank.train.close()
    return steps, state


def has_targets(rows: Sequence[Row]) -> bool:
    return any(label != IGNORED for row in rows for label in row[3])


@given(
    data=st.data(),
    case=corpora(),
    packing=all_packings,
    sequence_length=lengths,
    epochs=st.sampled_from([0.4, 1.0, 1.5, 2.0]),
)
@settings(deadline=None, max_examples=20, derandomize=True)
def test_epochs_end_where_every_document_was_finished_and_go_on_there(
    tokenizer: PreTrainedTokenizerFast,
    write_corpus: WriteCorpus,
    run_config: MakeConfig,
    data: st.DataObject,
    case: tuple[list[str], int],
    packing: str,
    sequence_length: int,
    epochs: float,
) -> None:
    texts, batch_size = case
    texts = [*texts, "the cat", "the dog sat"]
    cfg = run_config(
        write_corpus(texts),
        packing=packing,
        sequence_length=max(sequence_length, 2),
        global_batch_size=batch_size,
        epochs=epochs,
    )

    def on_ranks(state: LoaderState | None = None) -> list[Loaders]:
        shares = over_ranks(batch_size, data.draw(divisors(batch_size)))
        return [build_loaders(cfg, tokenizer, slots, state) for slots in shares]

    loaders = on_ranks()
    num_steps = max(rank.num_steps(slots) for rank, slots in zip(loaders, [range(batch_size)]))
    by_share = [loaders[0].num_steps(range(k, batch_size, 3)) for k in range(min(3, batch_size))]
    assert num_steps == max(by_share)
    if num_steps == 0:  # a part of an epoch that has only empty documents
        return
    steps, state = read(loaders, num_steps + 1)
    assert [has_targets(rows) for rows in steps] == [True] * num_steps + [False]
    counted = counts(state)
    assert counted.begun == counted.finished
    if len(texts) >= batch_size:
        assert counted.finished == max(round(epochs * len(texts)), 1)
    if epochs in (1.0, 2.0):
        assert (counted.epochs, counted.finished) == (epochs, epochs * len(texts))
    if packing == "none" and epochs in (1.0, 2.0) and len(texts) >= batch_size:
        documents = ([*tokenizer(text)["input_ids"][1:], EOS] for text in texts if text)
        expected = Counter(token for tokens in documents for token in tokens)
        read_tokens = Counter(predicted([row for rows in steps for row in rows]))
        assert read_tokens == {token: epochs * n for token, n in expected.items()}
    before = data.draw(st.integers(0, num_steps))
    first, middle = read(on_ranks(), before)
    then, end = read(on_ranks(middle), num_steps + 1 - before)
    assert (first + then, end) == (steps, state)


def test_workers_count_the_steps_of_epochs_too(
    tokenizer: PreTrainedTokenizerFast, write_corpus: WriteCorpus, run_config: MakeConfig
) -> None:
    train = write_corpus([f"the text number {i} " * (i % 7) for i in range(40)])
    keys: dict[str, Any] = {"sequence_length": 16, "global_batch_size": 6, "epochs": 2.0}
    read_by = []
    for workers in (0, 2):
        loaders = build_loaders(run_config(train, workers=workers, **keys), tokenizer, range(6))
        num_steps = loaders.num_steps(range(6))
        read_by.append((num_steps, read([loaders], num_steps)))
    assert read_by[0] == read_by[1]
    assert read_by[0][0] > 10


def test_more_epochs_than_a_state_was_of(
    tokenizer: PreTrainedTokenizerFast, write_corpus: WriteCorpus, run_config: MakeConfig
) -> None:
    # Slots end at other steps, so the second epoch begins at the same step for both.
    train = write_corpus(["a" * length for length in (2, 30, 4, 5, 60, 3, 9, 2)])
    keys: dict[str, Any] = {"packing": "none", "sequence_length": 4, "global_batch_size": 2}
    one = run_config(train, epochs=1.0, **keys)
    loaders = build_loaders(one, tokenizer, range(2))
    _, state = read([loaders], loaders.num_steps(range(2)))
    two = build_loaders(run_config(train, epochs=2.0, **keys), tokenizer, range(2), state)
    num_steps = max(two.num_steps(range(1)), two.num_steps(range(1, 2)))
    steps, end = read([two], num_steps - state["step"] + 1)
    assert [has_targets(rows) for rows in steps] == [True] * (len(steps) - 1) + [False]
    assert counts(end).finished == 16
    assert two.num_steps(range(2)) == num_steps
    again = build_loaders(one, tokenizer, range(2), end)
    assert again.num_steps(range(2)) == end["step"]  # nothing is left


def test_documents_behind_the_last_row_are_counted(
    tokenizer: PreTrainedTokenizerFast, write_corpus: WriteCorpus, run_config: MakeConfig
) -> None:
    # In one of three epochs or more an empty document is the last one of a slot.
    cfg = run_config(
        write_corpus(["ab", "", "cd", "", ""]),
        packing="none",
        global_batch_size=2,
        sequence_length=1,
        epochs=5.0,
    )
    loaders = build_loaders(cfg, tokenizer, range(2))
    _, state = read([loaders], loaders.num_steps(range(2)))
    counted = counts(state)
    assert (counted.finished, counted.skipped, counted.epochs) == (25, {"no target": 15}, 5.0)


def test_the_first_step_can_be_read_again(
    tokenizer: PreTrainedTokenizerFast, write_corpus: WriteCorpus, run_config: MakeConfig
) -> None:
    cfg = run_config(write_corpus(["abc" * 9] * 5), sequence_length=4, global_batch_size=2)
    loaders = build_loaders(cfg, tokenizer, range(2))
    steps = [rows_of(batches) for batches in islice(loaders.train, 3)]
    state = loaders.state()
    assert rows_of(loaders.first_step()) == steps[0]
    assert loaders.state() == state


def chat_counts(
    tokenizer: PreTrainedTokenizerFast,
    run_config: MakeConfig,
    path: Any,
    records: Sequence[dict[str, Any]],
    steps: Sequence[int],
    **keys: Any,
) -> list[Counts]:
    """What was read up to each of these steps, which a run reaches one after the other."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    cfg = run_config(str(path), format="chat", global_batch_size=1, **keys)
    chat = chat_tokenizer(tokenizer, CHATML)
    counted, state, done = [], None, 0
    for step in steps:
        _, state = read([build_loaders(cfg, chat, range(1), state)], step - done)
        counted.append(counts(state))
        done = step
    return counted


@pytest.mark.parametrize("long", ["cut", "split"])
def test_a_long_document_is_counted_with_its_first_row(
    tmp_path, tokenizer: PreTrainedTokenizerFast, run_config: MakeConfig, long: str
) -> None:
    # A row of its own for each dialogue; the first is short, and the long ones are read ahead.
    long_ones = [dialogue("q", "a" * 150)] * 3
    counted = chat_counts(
        tokenizer,
        run_config,
        tmp_path / "a.jsonl",
        long_ones,
        [1, 2, 3, 6, 12],
        sequence_length=120,
        long=long,
    )
    for read_up_to in counted:
        assert read_up_to.long == read_up_to.begun
    assert counted[-1].long > counted[0].long


def test_a_turn_that_is_left_out_is_counted(
    tmp_path, tokenizer: PreTrainedTokenizerFast, run_config: MakeConfig
) -> None:
    # The second turn is longer than a row, since it has the first one before it.
    record = dialogue("q", "a", "q" * 60, "a")
    keys: dict[str, Any] = {"sequence_length": 100, "turns": "separate", "long": "skip"}
    counted = chat_counts(
        tokenizer, run_config, tmp_path / "a.jsonl", [record] * 2, [2, 3], epochs=2.0, **keys
    )
    assert [c.skipped for c in counted] == [{"longer than a row": 4}] * 2
    keys["long"] = "cut"
    (counted_cut,) = chat_counts(
        tokenizer, run_config, tmp_path / "a.jsonl", [record] * 2, [1], epochs=2.0, **keys
    )
    assert counted_cut.skipped == {}  # its beginning is cut off
