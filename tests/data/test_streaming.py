"""Streams: each slot reads its own records, whoever reads them and from whichever step on."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import PreTrainedTokenizerFast

from shardwise.config import Data, Entry, RunConfig, UserError
from shardwise.data import streaming
from shardwise.data.corpus import open_corpus
from shardwise.data.loader import Loaders, build_loaders
from shardwise.data.state import LoaderState, counts, merge_states
from shardwise.data.streaming import Streamed
from tests.data.conftest import without_end
from tests.data.test_loader import Row, over_ranks, predicted, rows_of
from tests.data.test_text import write
from tests.left_out import some_now

MakeConfig = Callable[..., RunConfig]
NUM = 24


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A dataset of three files of JSON lines with 24 rows, and a split of two more."""
    path = tmp_path_factory.mktemp("lines")
    for shard in range(3):
        rows = (f"{chr(97 + shard * 8 + i)}" * (2 + i % 3) for i in range(8))
        lines = (json.dumps({"text": row, "id": shard}) for row in rows)
        write(path / f"train-{shard}.jsonl", "\n".join(lines))
    write(path / "test-0.jsonl", '{"text": "xx", "id": 1}\n{"text": "yy", "id": 2}')
    return f"{path}::train"


def read(
    cfg: RunConfig,
    tokenizer: PreTrainedTokenizerFast,
    num_ranks: int,
    num_steps: int,
    state: LoaderState | None = None,
) -> tuple[list[list[Row]], LoaderState]:
    loaders = [
        build_loaders(cfg, tokenizer, slots, state)
        for slots in over_ranks(cfg.training.global_batch_size, num_ranks)
    ]
    steps = [
        [row for rank in loaders for row in rows_of(next(rank.train))] for _ in range(num_steps)
    ]
    merged = json.loads(json.dumps(merge_states(rank.state() for rank in loaders)))
    for rank in loaders:
        rank.train.close()
    return steps, merged


@pytest.mark.parametrize("packing", some_now(("none", "concat", "documents"), ("documents",)))
def test_neither_ranks_nor_a_resume_change_the_rows(
    folder, tokenizer, run_config, monkeypatch, packing
):
    monkeypatch.setattr(streaming, "BUFFER", 5)
    cfg = run_config(
        folder, streaming=True, packing=packing, sequence_length=6, global_batch_size=4
    )
    expected, end = read(cfg, tokenizer, 1, 16)  # several passes
    assert read(cfg, tokenizer, 4, 16) == (expected, end)
    for before in (0, 3, 11):
        first, middle = read(cfg, tokenizer, 2, before)
        then, last = read(cfg, tokenizer, 1, 16 - before, middle)
        assert (first + then, last) == (expected, end)
    counted = counts(end)
    assert (counted.rows, counted.epochs, counted.skipped) == (64, None, {})
    assert counted.finished > NUM


def test_workers_do_not_change_the_rows(folder, tokenizer, run_config):
    keys: dict[str, Any] = {"streaming": True, "sequence_length": 6, "global_batch_size": 4}
    without, with_workers = (
        read(run_config(folder, workers=workers, **keys), tokenizer, 1, 8) for workers in (0, 2)
    )
    assert with_workers == without


def texts(stream: Streamed, count: int) -> list[str]:
    return [record["text"] for record, _ in islice(stream.endless(), count)]


def test_each_pass_has_each_record_once_in_an_order_of_its_own(folder, monkeypatch):
    monkeypatch.setattr(streaming, "BUFFER", 10)
    data = Data(folder, streaming=True)
    read_texts = texts(Streamed.of(data, 3), 2 * NUM)
    first, second = read_texts[:NUM], read_texts[NUM:]
    stored = [record["text"] for record, _ in Streamed.of(data, 3).first(NUM)]
    assert len({tuple(order) for order in (first, second, stored)}) == 3
    assert Counter(first) == Counter(second) == Counter(stored)
    assert len(set(stored)) == NUM
    assert texts(Streamed.of(data, 4), NUM) != first
    assert texts(Streamed.of(data, -3), 1)  # numpy takes no negative seed


def test_the_end_of_a_shuffled_pass_over_parquet_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What a script of datasets 5.2 alone shows: it sleeps five seconds behind each pass.
    for index in range(3):
        table = pa.table({"text": [f"{index}-{row}" for row in range(4)]})
        pq.write_table(table, tmp_path / f"{index}.parquet")
    slept: list[float] = []
    monkeypatch.setattr(datasets.iterable_dataset.time, "sleep", slept.append)
    stream = Streamed.of(Data(str(tmp_path), streaming=True), 0)
    read_texts = texts(stream, 30)
    assert Counter(Counter(read_texts[:24]).values()) == {2: 12}
    assert sum(slept) <= 5  # of the pass that was given up
    plain = datasets.load_dataset("parquet", data_dir=str(tmp_path), split="train", streaming=True)
    slept.clear()
    assert len(list(plain.shuffle(seed=0, buffer_size=5))) == 12
    assert sum(slept) == 5


def test_several_data_sets_the_first_documents_and_weights(tmp_path):
    names = []
    for name in "ab":
        (tmp_path / name).mkdir()
        rows = {"text": [f"{name}{i}" for i in range(40)]}
        pq.write_table(pa.table(rows), tmp_path / name / "rows.parquet")
        names.append(str(tmp_path / name))
    joined = Streamed.of(Data(names, streaming=True, max_documents=45), 0)
    once = [record["text"] for record, _ in joined.once()]
    assert Counter(text[0] for text in once) == {"a": 40, "b": 5}
    entries = [Entry(name, weight=weight) for name, weight in zip(names, (3.0, 1.0))]
    data = Data(entries, streaming=True, max_documents=20)
    drawn = [record["text"] for record, _ in Streamed.of(data, 0).once()]
    assert set(drawn) == {f"{name}{i}" for name in "ab" for i in range(20)}
    by_name = Counter(text[0] for text in drawn)
    assert by_name["b"] == 20
    assert by_name["a"] > 35


def test_a_split_for_validation_is_streamed_too(folder, tokenizer, run_config):
    tokenizer = without_end(tokenizer)
    cfg = run_config(
        folder,
        streaming=True,
        validation=folder.replace("::train", "::test"),
        packing="none",
        sequence_length=1,
        global_batch_size=2,
    )
    loaders = build_loaders(cfg, tokenizer, range(2))
    assert loaders.validation is not None
    for _ in range(2):
        (batches,) = loaders.validation
        assert tokenizer.decode(predicted(rows_of(batches))) == "xy"
    assert loaders.validation.read.finished == 2
    same = run_config(
        folder, streaming=True, validation=folder, global_batch_size=1, packing="none"
    )
    with pytest.raises(UserError, match=r"^data\.validation: .* is in data\.train too"):
        build_loaders(same, tokenizer, range(1))


def test_a_resume_on_another_stream_is_refused(
    folder, tmp_path, tokenizer, run_config, monkeypatch
):
    keys: dict[str, Any] = {"streaming": True, "sequence_length": 4, "global_batch_size": 1}
    _, state = read(run_config(folder, **keys), tokenizer, 1, 1)
    write(tmp_path / "train.jsonl", '{"text": "another"}')
    with pytest.raises(UserError, match=r"the text of data\.train \(was"):
        read(run_config(str(tmp_path), **keys), tokenizer, 1, 1, state)
    monkeypatch.setattr(datasets, "__version__", "99.0")
    with pytest.raises(UserError, match=r"order of the documents \(was .*, is .*99\.0"):
        read(run_config(folder, **keys), tokenizer, 1, 1, state)


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        ('{"text": "a"}\n{"text": 1\n', r"^data\.train: .*cannot"),
        ('{"words": "a"}\n', r"record 0: no field 'text'"),
    ],
)
def test_a_stream_that_cannot_be_read(tmp_path, tokenizer, run_config, lines, problem):
    write(tmp_path / "train.jsonl", lines)
    cfg = run_config(str(tmp_path), streaming=True, global_batch_size=1)
    with pytest.raises(UserError, match=problem):
        next(build_loaders(cfg, tokenizer, range(1)).train)


def test_a_stream_without_a_target_ends(tmp_path, tokenizer, run_config, monkeypatch):
    monkeypatch.setattr(streaming.StreamOrder, "most_left_out", 30)
    write(tmp_path / "train.jsonl", '{"text": ""}')
    cfg = run_config(str(tmp_path), streaming=True, global_batch_size=1)
    loaders: Loaders = build_loaders(cfg, tokenizer, range(1))
    with pytest.raises(UserError, match=r"finds no target in the stream; .* 31 no target"):
        next(loaders.train)


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.parquet"])
def test_a_stream_has_the_rows_that_are_read_in_place(tmp_path: Path, name: str) -> None:
    # A null within an object stays, except in a table; a cell of CSV is text.
    rows = [{"text": text, "deep": {"a": None, "b": text}} for text in ("007", "NA", "")]
    path = tmp_path / "folder" / name
    if name == "a.parquet":
        path.parent.mkdir()
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif name == "a.csv":
        write(path, "id,text\n" + "".join(f"1,{row['text']}\n" for row in rows))
    else:
        lines = json.dumps(rows) if name == "a.json" else "\n".join(map(json.dumps, rows))
        write(path, lines)
    data = Data(str(path.parent), streaming=True)
    streamed = [record for record, _ in Streamed.of(data, None).once()]
    corpus = open_corpus(str(path.parent), data)
    assert streamed == [corpus[i] for i in range(len(corpus))]
    if "json" in name:
        assert streamed == rows
    both = [str(path.parent), str(write(tmp_path / "b" / "b.jsonl", json.dumps(rows[0])).parent)]
    joined = [record for record, _ in Streamed.of(Data(both, streaming=True), None).once()]
    assert joined[3] == rows[0]
    assert [row["text"] for row in joined[:3]] == ["007", "NA", ""]


def test_csv_that_a_page_describes_is_text(tmp_path):
    write(tmp_path / "a.csv", "id,text\n1,007\n2,None\n3,\n")
    files = "data_files: a.csv"
    write(tmp_path / "README.md", f"---\nconfigs:\n- config_name: default\n  {files}\n---\n")
    data = Data(str(tmp_path))
    datasets.load_dataset(str(tmp_path))  # leaves the types that it guesses in its cache
    corpus = open_corpus(str(tmp_path), data)
    streamed = [record for record, _ in Streamed.of(data, None).once()]
    for texts_read in ([corpus[i] for i in range(len(corpus))], list(streamed)):
        assert [row["text"] for row in texts_read] == ["007", "None", ""]


@pytest.mark.parametrize("entry", ["gone", "a.jsonl", "*.parquet"])
def test_what_cannot_be_streamed(tmp_path, entry):
    write(tmp_path / "a.jsonl", '{"text": "a"}')
    with pytest.raises(UserError, match=r"^data\.train: .*; give one, or leave data\.streaming"):
        Streamed.of(Data(str(tmp_path / entry), streaming=True), 0)


def test_without_datasets(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    stream = Streamed.of(Data(folder, streaming=True), 0)
    with pytest.raises(UserError, match=r"pip install datasets"):
        stream.first(1)


def test_a_saved_dataset_is_streamed(tmp_path):
    datasets.disable_progress_bar()
    rows: Sequence[str] = ["a", "b", "c"]
    datasets.Dataset.from_dict({"text": rows}).save_to_disk(str(tmp_path / "saved"))
    datasets.enable_progress_bar()
    stream = Streamed.of(Data(str(tmp_path / "saved"), streaming=True), None)
    assert [record["text"] for record, _ in stream.once()] == rows
