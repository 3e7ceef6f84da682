import csv
import gzip
import json
import os
import pickle
import sys
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shardwise.config import Data, RunConfig, UserError
from shardwise.data.corpus import Corpus, open_corpus, open_groups
from shardwise.data.loader import build_loaders, open_data
from tests.data.test_formats import dialogue
from tests.data.test_loader import predicted, rows_of
from tests.data.test_text import write

MakeConfig = Callable[..., RunConfig]


@pytest.fixture(autouse=True)
def datasets_cache(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


def parquet(path: Path, columns: dict[str, Any], row_group_size: int = 2) -> Path:
    pq.write_table(pa.table(columns), path, row_group_size=row_group_size)
    return path


def saved(path: Path, columns: dict[str, Any]) -> Path:
    datasets.disable_progress_bar()
    datasets.Dataset.from_dict(columns).save_to_disk(str(path))
    datasets.enable_progress_bar()
    return path


def texts(corpus: Corpus) -> list[str]:
    return [corpus[i]["text"] for i in range(len(corpus))]


def data(**keys: Any) -> Data:
    return Data(train="unused", **keys)


def test_sources_of_every_kind_are_one_corpus(tmp_path, capfd):
    files = tmp_path / "files"
    write(files / "b.JSONL", '{"text": "in JSONL"}\n')
    parquet(files / "a.Parquet", {"id": [1, 2, 3], "text": ["p0", "p1", "p2"]})
    write(files / "c.txt", "plain")
    write(tmp_path / "builder" / "rows.csv", "text,id\nc0,1\nc1,2\n")
    saved(tmp_path / "saved", {"text": ["s0", "s1"], "id": [1, 2]})
    capfd.readouterr()
    corpus = open_corpus([str(tmp_path / name) for name in ("saved", "files", "builder")], data())
    assert texts(corpus) == ["in JSONL", "plain", "c0", "c1", "p0", "p1", "p2", "s0", "s1"]
    assert [corpus.where(i).removeprefix(f"{tmp_path}/") for i in (0, 1, 5, 8)] == [
        "files/b.JSONL:1",
        "files/c.txt",
        "files/a.Parquet: row 1",
        "saved: row 1",
    ]
    again = pickle.loads(pickle.dumps(corpus))  # as a worker process gets it
    assert texts(again) == texts(corpus)
    assert again.fingerprint() == corpus.fingerprint()
    assert capfd.readouterr() == ("", "")  # no progress bar of datasets


def test_a_pickled_table_holds_no_rows(tmp_path):
    path = parquet(tmp_path / "a.parquet", {"text": ["x" * 10_000] * 100}, row_group_size=10)
    corpus = open_corpus(str(path), data())
    assert corpus[99] == {"text": "x" * 10_000}
    assert len(pickle.dumps(corpus)) < 4_000


def test_folder_of_a_dataset_that_its_readme_describes(tmp_path):
    write(tmp_path / "data" / "rows.jsonl", '{"text": "of the train split"}\n')
    write(tmp_path / "data" / "other.jsonl", '{"text": "of another"}\n')
    files = "  data_files:\n  - split: train\n    path: data/rows.jsonl\n"
    write(tmp_path / "README.md", f"---\nconfigs:\n- config_name: default\n{files}---\n# Rows\n")
    assert texts(open_corpus(str(tmp_path), data())) == ["of the train split"]


def test_a_saved_dataset_with_several_splits_must_name_one(tmp_path):
    splits = {name: datasets.Dataset.from_dict({"text": [name]}) for name in ("train", "test")}
    datasets.disable_progress_bar()
    datasets.DatasetDict(splits).save_to_disk(str(tmp_path / "both"))
    datasets.DatasetDict(test=splits["test"]).save_to_disk(str(tmp_path / "one"))
    datasets.enable_progress_bar()
    assert texts(open_corpus(str(tmp_path / "one"), data())) == ["test"]
    assert texts(open_corpus(str(tmp_path / "both" / "test"), data())) == ["test"]
    both = str(tmp_path / "both")
    assert texts(open_corpus(f"{both}::test", data())) == ["test"]
    assert texts(open_corpus([f"{both}::train", f"{both}::test"], data())) == ["train", "test"]
    with pytest.raises(UserError, match=r"both was saved to disk without configurations; .*::test"):
        open_corpus(f"{both}:de:test", data())
    with pytest.raises(UserError, match=r"both has no split dev: train, test; .*both::train"):
        open_corpus(f"{both}::dev", data())
    with pytest.raises(UserError, match=r"both has several splits: train, test; .*both::train"):
        open_corpus(both, data())
    with pytest.raises(UserError, match=r"one has no split train: test; .*one::test"):
        open_corpus(f"{tmp_path / 'one'}::train", data())


def test_the_first_documents_of_all_sources_or_of_each_weighted_entry(
    tmp_path, run_config, tokenizer
):
    first = str(write(tmp_path / "a.jsonl", '{"text": "a0"}\n{"text": "a1"}\n{"text": "a2"}'))
    second = str(write(tmp_path / "b.jsonl", '{"text": "b0"}\n{"text": "b1"}'))
    rows = str(parquet(tmp_path / "c.parquet", {"text": ["c0", "c1"]}, row_group_size=1))
    entries = [second, rows, first]
    for most, expected in ((2, ["a0", "a1"]), (4, ["a0", "a1", "a2", "b0"]), (9, None)):
        corpus, *_ = open_data(run_config(entries, max_documents=most))
        everything = texts(open_corpus(entries, data()))
        assert texts(corpus) == (expected or everything)
    weighted = run_config(entries, max_documents=1, weights=[1, 1, 1])
    joined, *_ = open_data(weighted)
    assert texts(joined) == ["b0", "c0", "a0"]
    assert joined.where(2) == f"{first}:1"
    # What is for validation files is not limited, and a share is one of the first documents.
    held_out = run_config([second], max_documents=1, validation=[first])
    (validation,) = open_groups(held_out.data, "validation")
    assert len(validation) == 3
    cfg = run_config(entries, max_documents=4, validation=0.5, global_batch_size=1)
    loaders = build_loaders(cfg, tokenizer, range(1))
    assert loaders.validation is not None
    list(loaders.validation)
    assert loaders.validation.read.finished == 2
    assert loaders.state()["read_from"]["documents to train on"] == 2


CELLS = [
    *(
        "007",
        "4.10",
        "1e5",
        "True",
        "None",
        "NA",
        "N/A",
        "null",
        "nan",
        "#N/A",
        "",
        " ",
        "-",
        "1_0",
    ),
    *("a,b", 'a "b"', "a\nb", "a\tb", "2024-01-01", "inf", "0x1F", "1,000", "äöü", "x" * 200_000),
]


@pytest.mark.parametrize("suffix", ["csv", "tsv"])
@pytest.mark.parametrize("before", [[], ["words"] * 3, ["7"] * 10_000])
def test_every_cell_of_a_csv_file_is_the_text_that_was_written(
    tmp_path: Path, suffix: str, before: list[str]
) -> None:
    # Right by Python's own writer. Readers that guess types do so anew for each 10,000 rows.
    cells = [*before, *CELLS]
    with (tmp_path / f"a.{suffix}").open("w", newline="", encoding="utf-8-sig") as file:
        writer = csv.writer(file, delimiter="\t" if suffix == "tsv" else ",")
        writer.writerows([["", "text"], *([i, cell] for i, cell in enumerate(cells))])
    assert texts(open_corpus(str(tmp_path / f"a.{suffix}"), data())) == cells
    for cell in CELLS[:8]:  # a column that has nothing else
        path = write(tmp_path / "one.csv", f"id,text\n1,{cell}\n2,{cell}\n")
        assert texts(open_corpus(str(path), data())) == [cell] * 2


@pytest.mark.parametrize(
    ("content", "part"),
    [
        ("id,text\n1,a\n2,a,b\n", r"line 3 has 3 cells, not 2"),
        ("id,text\n1\n", "line 2 has 1 cells"),
        ("text,text\na,b\n", "2 columns are called 'text'"),
        (b"text\n\xff\n", "'utf-8' codec"),
        (b"\x1f\x8b\x08\x00\x00", "gzip -d"),
    ],
)
def test_a_csv_file_that_cannot_be_read(tmp_path, content, part):
    path = write(tmp_path / "a.csv", content)
    with pytest.raises(UserError, match=rf"^{path}: .*{part}"):
        open_corpus(str(path), data())


def test_a_changed_csv_file_is_read_anew(tmp_path):
    for number, cell in enumerate(("a", "b", "cc")):
        path = write(tmp_path / "a.csv", f"text\n{cell}\n")
        os.utime(path, ns=(0, number))
        assert texts(open_corpus(str(path), data())) == [cell]


def test_dialogues_in_a_csv_file_are_text_in_json(tmp_path):
    messages = json.dumps(dialogue("hi", "yes")["messages"])
    with (tmp_path / "a.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["messages", "system"], [messages, "be brief"]])
    corpus = open_corpus(str(tmp_path / "a.csv"), data(format="chat"))
    assert corpus[0] == {"messages": messages, "system": "be brief"}


def test_compressed_dialogues_are_no_plain_text(tmp_path):
    path = write(tmp_path / "a.jsonl.gz", gzip.compress(b"{}"))
    with pytest.raises(UserError, match=r"a\.jsonl\.gz: .* gzip -d"):
        open_corpus(str(path), data(format="chat"))


def test_an_input_beside_an_instruction_is_seen_in_every_table(tmp_path):
    rows = {"instruction": ["add"], "input": ["2 2"], "output": ["four"], "id": ["a"]}
    parquet(tmp_path / "a.parquet", rows)
    write(tmp_path / "b.csv", "instruction,input,output,id\nadd,2 2,four,a\n")
    saved(tmp_path / "saved", rows)
    alone = {"prompt": "instruction", "completion": "output"}
    joined = {"prompt": ["instruction", "input"], "completion": "output"}
    for name in ("a.parquet", "b.csv", "saved"):
        for names in (alone, joined):
            corpus = open_corpus(str(tmp_path / name), data(format="completion", fields=names))
            assert corpus[0] == {"instruction": "add", "input": "2 2", "output": "four"}
        corpus = open_corpus(str(tmp_path / name), data(text_field="output"))
        assert corpus[0] == {"output": "four"}


def test_batches_are_those_of_the_same_rows_in_jsonl_also_from_workers(
    tmp_path, tokenizer, run_config
):
    rows = [f"row {i} " * (i % 5 + 1) for i in range(30)]
    path = parquet(tmp_path / "a.parquet", {"text": rows}, row_group_size=7)
    jsonl = write(tmp_path / "b.jsonl", "".join(json.dumps({"text": row}) + "\n" for row in rows))
    read = []
    for train, workers in ((path, 0), (path, 2), (jsonl, 0)):
        cfg = run_config(str(train), workers=workers, sequence_length=8, global_batch_size=4)
        loaders = build_loaders(cfg, tokenizer, range(4))
        read.append([rows_of(batches) for batches in islice(loaders.train, 12)])
        loaders.train.close()
    assert read[0] == read[1] == read[2]
    assert predicted(read[0][0])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"no parquet", r"a\.parquet: cannot be read as Parquet \(.*\); "),
        (
            {"body": ["a"]},
            r"a\.parquet: no column 'text', only body; .*data\.format.*data\.text_field",
        ),
        ({"text": []}, r"a\.parquet: .*without rows; "),
    ],
)
def test_bad_parquet(tmp_path, content, message):
    path = tmp_path / "a.parquet"
    path.write_bytes(content) if isinstance(content, bytes) else parquet(path, content)
    with pytest.raises(UserError, match=message):
        open_corpus(str(path), data())


def test_hub_name_that_cannot_be_reached_is_one_line(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as caught:
        open_corpus("owner/name", data())
    message = str(caught.value)
    assert message.startswith("data.train: owner/name: datasets cannot load it (")
    assert "\n" not in message


def test_plain_text_is_no_dialogue(tmp_path):
    path = write(tmp_path / "a.txt", "hi")
    with pytest.raises(
        UserError, match=rf"^data\.train: {path} is plain text, .*data\.format chat"
    ):
        open_corpus(str(path), data(format="chat"))


@pytest.mark.parametrize(("name", "sep"), [("a.csv", ","), ("a.TSV", "\t")])
def test_csv_is_rows_whether_a_file_or_its_folder_is_named(tmp_path, name, sep):
    content = f'id{sep}text\n1{sep}"a{sep}b\nc"\n2{sep}d\n'
    path = write(tmp_path / "folder" / name, content)
    by_name, by_glob = (
        open_corpus(entry, data()) for entry in (str(path), str(path.parent / "*.[cT][sS][vV]"))
    )
    assert texts(by_name) == [f"a{sep}b\nc", "d"]
    assert by_name.where(1) == f"{path}: row 1"
    if name == "a.csv":
        assert texts(by_glob) == texts(open_corpus(str(path.parent), data())) == texts(by_name)
    with pytest.raises(
        UserError, match=rf"^{path}: no column 'prompt', only id, text; .*data\.format"
    ):
        open_corpus(str(path), data(format="completion"))
    bad = write(tmp_path / name, f'text\n"a{sep}\n')
    with pytest.raises(
        UserError, match=rf"^{bad}: cannot be read as {bad.suffix[1:].upper()} \(.*\); "
    ):
        open_corpus(str(bad), data())


def test_empty_corpus(tmp_path):
    write(tmp_path / "a.jsonl", "\n  \n"), write(tmp_path / "b.txt", "")
    with pytest.raises(UserError, match=r"^data\.train: no document in .*a\.jsonl, .*; "):
        open_corpus(str(tmp_path), data())


def test_reading_tables_without_datasets(tmp_path, monkeypatch):
    path = parquet(tmp_path / "a.parquet", {"text": ["a"]})
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match=r"datasets, .*; pip install datasets$"):
        open_corpus(str(path), data())


def test_a_folder_of_many_tables_says_that_it_opens_them_and_asks_no_hub(
    tmp_path, monkeypatch, capsys
):
    asked: list[Any] = []
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr("socket.getaddrinfo", lambda *args, **_: asked.append(args) or [])
    monkeypatch.setattr("shardwise.data.corpus.MANY_TABLES", 4)
    for index in range(2):
        parquet(tmp_path / f"{index}[1].parquet", {"text": [f"p{index}"]})
        write(tmp_path / f"{index}.csv", f"text\nc{index}\n")
    found = open_corpus(str(tmp_path), data())
    assert sorted(texts(found)) == ["c0", "c1", "p0", "p1"]
    assert capsys.readouterr().out.startswith("opening 4 files of tables, one after the other")
    assert not asked
    open_corpus(str(tmp_path / "0.csv"), data())
    assert not capsys.readouterr().out
    parquet(tmp_path / "0[1].parquet", {"text": ["written again"]})
    assert sorted(texts(open_corpus(str(tmp_path), data())))[2:] == ["p1", "written again"]
