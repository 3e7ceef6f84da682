"""The splits of a folder: which there are, and that they are never mixed in silence."""

from __future__ import annotations

import contextlib
import json
import random
from dataclasses import replace
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import torch
from datasets.data_files import get_data_patterns, resolve_pattern

from shardwise.config import Data, UserError
from shardwise.config.run_file import load_config
from shardwise.data.corpus import open_corpus
from shardwise.data.loader import build_loaders
from shardwise.data.splits import splits_of
from shardwise.data.streaming import Streamed
from tests.data.test_text import write

LAYOUTS = {
    "shards": ["data/train-00000-of-00002.jsonl", "data/train-00001-of-00002.jsonl",
               "data/test-00000-of-00001.jsonl"],
    "files": ["train.jsonl", "train_2.jsonl", "test.jsonl"],
    "folders": ["train/a.jsonl", "train/deeper/b.jsonl", "test/a.jsonl"],
}  # fmt: skip


def lay_out(folder: Path, names: list[str]) -> Path:
    """Write files with one document each, which is the name of the file."""
    for name in names:
        write(folder / name, json.dumps({"text": name}) + "\n")
    return folder


def texts(entry: str) -> list[str]:
    """The documents of an entry; as a stream it must have the same."""
    corpus = open_corpus(entry, Data(entry))
    documents = sorted(corpus[i]["text"] for i in range(len(corpus)))
    stream = Streamed.of(Data(entry, streaming=True), 0)
    assert sorted(record["text"] for record, _ in stream.once()) == documents
    assert stream.origins == corpus.origins
    return documents


def both_refuse(entry: str, fragment: str) -> None:
    for read in (
        lambda: open_corpus(entry, Data(entry)),
        lambda: next(Streamed.of(Data(entry, streaming=True), 0).once()),
    ):
        with pytest.raises(UserError, match=rf"^data\.train: .*{fragment}"):
            read()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_folder_with_several_splits_must_name_one(tmp_path, layout):
    folder = lay_out(tmp_path / "ds", LAYOUTS[layout])
    for split, count in (("train", 2), ("test", 1)):
        documents = texts(f"{folder}::{split}")
        assert len(documents) == count
        assert all(split in name for name in documents)
    both_refuse(str(folder), f"splits train, test; .*{folder}::train")
    both_refuse(f"{folder}::dev", f"no split dev, only train, test; .*{folder}::train")
    both_refuse(f"{folder}:de:test", f"no configurations; give {folder}::test")
    with pytest.raises(UserError, match="splits train, test"):
        open_corpus(str(tmp_path / "d*"), Data("unused"))
    everything = open_corpus(f"{folder}/**/*.jsonl", Data("unused"))
    assert len(everything) == 3


def test_a_folder_without_splits_or_with_one_is_read_whole(tmp_path):
    plain = lay_out(tmp_path / "plain", ["contest.jsonl", "trainer/a.jsonl", "b/latest.jsonl"])
    assert len(texts(str(plain))) == 3
    both_refuse(f"{plain}::train", f"no split train, and no splits at all; give {plain} alone")
    one = lay_out(tmp_path / "one", ["train-0.jsonl", "train-1.jsonl"])
    write(one / "README.md", "# A card\n")
    assert len(texts(str(one))) == 2
    lay_out(one, ["more.jsonl"])
    both_refuse(
        str(one), rf"split train and files of no split, such as more\.jsonl; .*{one}::train"
    )
    assert len(texts(f"{one}::train")) == 2


def test_a_stream_reads_one_kind_of_file(tmp_path):
    write(tmp_path / "a.jsonl", '{"text": "a"}\n'), write(tmp_path / "b.txt", "b")
    entry = str(tmp_path)
    with pytest.raises(UserError, match=r"b\.txt is of another kind; leave data\.streaming out"):
        next(Streamed.of(Data(entry, streaming=True), 0).once())


def resolved(patterns: list[str], folder: Path) -> set[Path]:
    """The files of some patterns, of which each may match none."""
    files: set[Path] = set()
    for pattern in patterns:
        with contextlib.suppress(FileNotFoundError):
            files |= set(map(Path, resolve_pattern(pattern, str(folder))))
    return files


def test_the_rule_is_that_of_datasets(tmp_path):
    draw = random.Random(0)
    words = ["train", "test", "dev", "validation", "val", "eval", "training", "other", "latest"]
    several = 0
    for number in range(40):
        folder = tmp_path / str(number)
        names = []
        for _ in range(draw.randint(1, 4)):
            parts = [
                draw.choice(["", "my", "x-", "2", "a.", "b_"])
                + draw.choice(words)
                + draw.choice(["", "", "-1", "_x", "s", " 2", "3"])
                for _ in range(draw.choice([1, 1, 2, 3]))
            ]
            names.append("/".join(parts) + ".jsonl")
        if draw.random() < 0.2:
            names.append(f"data/{draw.choice(words)}-00000-of-00001-x.jsonl")
        lay_out(folder, names)
        expected = {
            str(split): resolved(patterns, folder)
            for split, patterns in get_data_patterns(str(folder)).items()
        }
        files = sorted(folder.rglob("*.jsonl"))
        splits = {split: set(chosen) for split, chosen in splits_of(folder, files).items()}
        several += len(splits) > 1
        assert (splits or {"train": set(files)}) == expected, names
    assert several > 5


def as_wikitext(folder: Path) -> Path:
    """A folder with the card, the files and the columns of Salesforce/wikitext, in which every
    other line of a page is empty; two of its configurations."""
    names, splits = ("wikitext-103-raw-v1", "wikitext-2-raw-v1"), ("test", "train", "validation")
    card = ["---", "configs:"]
    for name in names:
        card += [f"- config_name: {name}", "  data_files:"]
        for split in splits:
            card += [f"  - split: {split}", f"    path: {name}/{split}-*"]
            lines = ["", f" = {name} {split} = \n", "", f" The {split} of {name} . \n"]
            (folder / name).mkdir(parents=True, exist_ok=True)
            table = pyarrow.table({"text": lines})
            pyarrow.parquet.write_table(table, folder / name / f"{split}-00000-of-00001.parquet")
    write(folder / "README.md", "\n".join([*card, "---", "# WikiText", ""]))
    return folder


def test_a_split_of_one_configuration(tmp_path):
    folder = as_wikitext(tmp_path / "wikitext")
    for name in ("wikitext-103-raw-v1", "wikitext-2-raw-v1"):
        for split in ("train", "validation"):
            assert texts(f"{folder}:{name}:{split}") == [
                *("", "", f" = {name} {split} = \n", f" The {split} of {name} . \n")
            ]
    for entry in (str(folder), f"{folder}:wikitext-3:train"):
        both_refuse(entry, "'wikitext-103-raw-v1', 'wikitext-2-raw-v1'.* NAME:CONFIGURATION")
    both_refuse(
        f"{folder}:wikitext-103-raw-v1", "several splits: test, train, validation; .*-v1:test"
    )


def test_the_run_file_on_wikitext_reads_it(tmp_path, tokenizer):
    root = Path(__file__).parents[2] / "configs" / "gpt2-large"
    cfg, other = (load_config(root / name) for name in ("wikitext-8.yaml", "fsdp2-tp-8.yaml"))
    assert (cfg.parallel, cfg.optimizer) == (other.parallel, other.optimizer)
    folder = as_wikitext(tmp_path / "wikitext")
    assert isinstance(cfg.data.train, str)
    entry = cfg.data.train.replace("Salesforce/wikitext", str(folder))
    held_out = str(cfg.data.validation).replace("Salesforce/wikitext", str(folder))
    cfg = replace(cfg, data=replace(cfg.data, train=entry, validation=held_out, sequence_length=64))
    loaders = build_loaders(cfg, tokenizer, range(cfg.training.global_batch_size))
    with contextlib.closing(loaders.train):
        text = "".join(map(tokenizer.decode, torch.cat([b.input_ids for b in next(loaders.train)])))
    assert "The train of wikitext-103-raw-v1 ." in text
    assert loaders.validation is not None
