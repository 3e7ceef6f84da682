"""Entries of `data.train` with keys of their own: each document is read as in a run of its own."""

import json
from collections import Counter
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import PreTrainedTokenizerFast

from shardwise.config import Data, Entry, RunConfig, UserError
from shardwise.data.corpus import open_corpus
from shardwise.data.detect import keys_for
from shardwise.data.formats import Encoder
from shardwise.data.loader import build_loaders, open_data
from shardwise.data.slots import read_documents
from shardwise.data.state import SlotState, counts, merge_states
from shardwise.data.streaming import Streamed
from tests.data.templates import CHATML
from tests.data.test_formats import chat_tokenizer

MakeConfig = Callable[..., RunConfig]

CHATS = [
    {"messages": [{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": f"a{i}"}]}
    for i in range(6)
]
SHAREGPT = [
    {"conversations": [{"from": "human", "value": f"{i}?"}, {"from": "gpt", "value": f"b{i}"}]}
    for i in range(5)
]
PAIRS = [{"instruction": "the", "input": f"{i}", "output": f"c{i}"} for i in range(4)]
TEXTS = [{"text": f"the text {i}"} for i in range(3)]
KEYS: dict[str, dict[str, Any]] = {
    "chats.jsonl": {"format": "chat"},
    "sharegpt.json": {"format": "chat", "fields": {"messages": "conversations"}},
    "pairs.parquet": {
        "format": "completion",
        "fields": {"prompt": ["instruction", "input"], "completion": "output"},
    },
    "texts.jsonl": {"format": "text"},
}
"""The keys of `data` with which each file is read."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixed")
    for name, rows in (("chats.jsonl", CHATS), ("texts.jsonl", TEXTS)):
        (folder / name).write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (folder / "sharegpt.json").write_text(json.dumps(SHAREGPT))
    pq.write_table(pa.Table.from_pylist(PAIRS), folder / "pairs.parquet")
    return folder


def entries_in(folder: Path, **keys: Any) -> list[Entry]:
    return [Entry(str(folder / name), **own, **keys) for name, own in KEYS.items()]


def tokens_alone(
    folder: Path, tokenizer: PreTrainedTokenizerFast, keys: dict[str, Any] | None = None
) -> Counter[tuple[bytes, bytes]]:
    """The tokens and targets of each file, read in a run that has nothing else."""
    found: Counter[tuple[bytes, bytes]] = Counter()
    for name, own in KEYS.items():
        data = Data(str(folder / name), packing="documents", **own, **keys or {})
        corpus, encoder = open_corpus(str(folder / name), data), Encoder.of(tokenizer, data)
        for number in range(len(corpus)):
            for document in read_documents(corpus, number, encoder, SlotState())[0]:
                found[document.tokens.tobytes(), document.targets.tobytes()] += 1
    return found


def tokens_together(
    cfg: RunConfig, tokenizer: PreTrainedTokenizerFast
) -> Counter[tuple[bytes, bytes]]:
    corpus, *_ = open_data(cfg)
    encoder = Encoder.of(tokenizer, cfg.data)
    found: Counter[tuple[bytes, bytes]] = Counter()
    for number in range(len(corpus)):
        for document in read_documents(corpus, number, encoder, SlotState())[0]:
            found[document.tokens.tobytes(), document.targets.tobytes()] += 1
    return found


def test_each_entry_is_read_as_in_a_run_of_its_own(folder, tokenizer, run_config):
    chat = chat_tokenizer(tokenizer, CHATML)
    cfg = run_config(entries_in(folder))
    assert cfg.data.packed == "documents"
    together = tokens_together(cfg, chat)
    assert together == tokens_alone(folder, chat)
    assert together.total() == 18
    # Keys of the section are for entries that have none; texts of the list are one group.
    mixed = [str(folder / "chats.jsonl"), *entries_in(folder)[1:]]
    assert tokens_together(run_config(mixed, format="chat"), chat) == together


def test_a_mixture_has_the_same_rows_on_other_ranks_and_after_a_resume(
    folder, tokenizer, run_config
):
    chat = chat_tokenizer(tokenizer, CHATML)
    cfg = run_config(entries_in(folder), sequence_length=64, global_batch_size=4)

    def rows(slots: range, steps: int, state: Any = None) -> tuple[list[Any], Any]:
        loaders = build_loaders(cfg, chat, slots, state)
        batches = [batch for step in islice(loaders.train, steps) for batch in step]
        loaders.train.close()
        return [(b.input_ids.tolist(), b.labels.tolist()) for b in batches], loaders.state()

    whole, state = rows(range(4), 6)
    halves = [rows(range(first, first + 2), 3) for first in (0, 2)]
    begun = merge_states(json.loads(json.dumps(state)) for _, state in halves)
    assert rows(range(4), 3, begun)[0] == whole[len(whole) // 2 :]
    assert counts(state).finished > 18
    fewer = run_config(entries_in(folder)[:3], sequence_length=64, global_batch_size=4)
    with pytest.raises(UserError, match=r"is not the data of the checkpoint: .*data\.format"):
        build_loaders(fewer, chat, range(4), state)


def test_validation_has_entries_too(folder, tokenizer, run_config):
    chat = chat_tokenizer(tokenizer, CHATML)
    first, *others = entries_in(folder)
    cfg = run_config([first], validation=others, sequence_length=64, global_batch_size=4)
    loaders = build_loaders(cfg, chat, range(4))
    assert loaders.validation is not None
    assert sum(1 for _ in loaders.validation) >= 1
    assert loaders.validation.read.finished == 12
    assert cfg.data.packed == "documents"


def test_a_stream_of_entries_has_the_documents_that_are_read_in_place(folder, tmp_path, tokenizer):
    entries = []
    for name, own in KEYS.items():  # a stream reads folders
        (tmp_path / name).mkdir()
        (tmp_path / name / name).write_bytes((folder / name).read_bytes())
        entries.append(Entry(str(tmp_path / name), **own))
    data = Data(entries, streaming=True)
    chat = chat_tokenizer(tokenizer, CHATML)
    encoder = Encoder.of(chat, data)
    found: Counter[tuple[bytes, bytes]] = Counter()
    for record, group in Streamed.of(data, 3).once():
        for document in encoder.documents(record, SlotState(), group):
            found[document.tokens.tobytes(), document.targets.tobytes()] += 1
    assert found == tokens_alone(folder, chat)


@pytest.mark.parametrize(
    ("entries", "problem"),
    [
        ([Entry("a", weight=1.0), "b"], "1 of 2 entries have a weight; give each of them one"),
        ([Entry("a", fields={"question": "q"})], r"a: fields names question; give names for"),
        ([Entry("a", fields={"prompt": []})], "a: fields has an empty list"),
        ([Entry(" ")], "data.train has an empty name"),
        ([Entry("a", weight=-1.0)], "the weights of its entries are"),
    ],
)
def test_entries_that_cannot_be(entries, problem):
    with pytest.raises(UserError, match=problem):
        Data(entries)


def test_a_weight_for_validation_is_refused():
    with pytest.raises(UserError, match=r"^data\.validation has a weight"):
        Data("a", validation=[Entry("b", weight=1.0)])


def test_a_file_in_two_entries_is_refused(folder, run_config):
    path = str(folder / "chats.jsonl")
    cfg = run_config([path, Entry(path, format="chat")], format="chat")
    with pytest.raises(UserError, match=r"chats\.jsonl is in two entries; keep it in one"):
        open_data(cfg)


def test_the_first_documents_of_each_source_are_read_before_training(
    folder, tmp_path, tokenizer, run_config
):
    """And the way out is for one entry, where a key of the section would break the others."""
    chat = chat_tokenizer(tokenizer, CHATML)
    paths = [str(folder / "chats.jsonl"), str(folder / "sharegpt.json")]
    with pytest.raises(UserError, match=r"sharegpt\.json:1: .*\(for one entry of data\.train: \{"):
        build_loaders(run_config(paths, format="chat"), chat, range(8))
    held_out = run_config(paths[0], format="chat", validation=[paths[1]])
    with pytest.raises(UserError, match=r"sharegpt\.json:1: no field 'messages'"):
        build_loaders(held_out, chat, range(8))
    second = tmp_path / "second.jsonl"
    second.write_text(f"{json.dumps(TEXTS[0])}\nnot JSON\n")
    with pytest.raises(UserError, match=r"second\.jsonl:2: not JSON"):
        build_loaders(run_config([str(second)]), tokenizer, range(8))
    skipping = run_config([str(second)], on_error="skip")
    build_loaders(skipping, tokenizer, range(8)).train.close()


def test_init_writes_an_entry_for_each_form(folder):
    paths = [str(folder / name) for name in KEYS]
    found = keys_for(paths, "--data")
    assert [Entry(**entry) for entry in found["train"]] == entries_in(folder)
    assert keys_for(paths[:1], "--data") == {"format": "chat"}
