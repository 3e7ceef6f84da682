"""Each document is counted once, and the first step can be read again."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from shardwise.config import RunConfig
from shardwise.data.loader import Loaders, build_loaders
from shardwise.data.state import Counts, LoaderState, counts, merge_states
from tests.data.templates import CHATML
from tests.data.test_formats import chat_tokenizer, dialogue
from tests.data.test_loader import Row, rows_of

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
    _, state = read([loaders], loaders.num_steps(range(2), lambda value: [value]))
    counted = counts(state)
    assert (counted.finished, counted.skipped, counted.epochs) == (25, {"no target": 15}, 5.0)


def test_the_first_step_can_be_read_again(tokenizer, write_corpus, run_config):
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
