"""The command `shardwise data`: counts by hand, and rows in which targets can be seen."""

import json
from pathlib import Path

import pytest

from shardwise.commands import cli

NO_VALIDATION = ("--data.validation=0", "--training.eval_every=0")


@pytest.fixture
def run_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A run file of a tiny model; its tokenizer has a token for a character or a few."""
    monkeypatch.chdir(tmp_path)
    lines = [{"prompt": f"{i}", "completion": "x " * (1 + 200 * (i == 7))} for i in range(10)]
    lines.append({"prompt": "no answer", "completion": ""})
    (tmp_path / "a.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    (tmp_path / "b.txt").write_text("The end.")
    assert cli.main(["init", "--model", "tiny-llama", "--data", "a.jsonl"]) == 0
    return str(tmp_path / "run.yaml")


def test_counts_of_each_source(run_file, capsys):
    capsys.readouterr()
    train = "--data.train=[a.jsonl, {path: b.txt, format: text}]"
    assert cli.main(["data", run_file, train, "--json", "--rows=3"]) == 0
    found = json.loads(capsys.readouterr().out)
    pairs, text = found["train"]
    assert (pairs["num_documents"], pairs["read"], pairs["cut"]) == (11, 11, 1)
    assert pairs["left_out"] == {"no target": 1}
    assert pairs["where"] == "a.jsonl:8"
    assert pairs["longest"] > 64 >= pairs["tokens"] - 9 * 6
    assert (text["num_documents"], text["cut"]) == (1, 0)
    # Every token of a text is a target but the first, which nothing precedes.
    assert text["targets"] == text["tokens"] - 1
    # The targets of the pairs are those of 11 of the 12 documents of an epoch.
    assert (pairs["share"], text["share"]) == (11 / 12, 1 / 12)
    assert (found["epoch_documents"], found["held_out"]) == (11, 1)
    assert len(found["rows"]) == 3
    row = found["rows"][0]
    assert len(row["tokens"]) == len(row["targets"]) == len(row["documents"]) == 65


def test_no_name_is_cut_in_a_pipe(run_file, capsys):
    name = f"{'long-' * 20}name.jsonl"
    Path(name).write_text(Path("a.jsonl").read_text())
    capsys.readouterr()
    assert cli.main(["data", run_file, f"--data.train={name}", "--rows=0"]) == 0
    assert any(line.startswith(f"{name} ") for line in capsys.readouterr().out.splitlines())


def test_a_sample_is_called_one(run_file, capsys):
    capsys.readouterr()
    assert cli.main(["data", run_file, "--documents=2", "--rows=1"]) == 0
    printed = capsys.readouterr().out
    (row,) = [line.split() for line in printed.splitlines() if line.startswith("a.jsonl")]
    assert row[1] == "11"
    assert row[2].startswith("~")
    assert "2 of 11 documents were read; --all reads all" in printed
    assert "[[" in printed
    assert "]]" in printed


def test_weights_decide_the_share_of_a_source(run_file, capsys):
    capsys.readouterr()
    entries = "[{path: a.jsonl, weight: 1}, {path: b.txt, format: text, weight: 3}]"
    assert cli.main(["data", run_file, f"--data.train={entries}", "--rows=0", *NO_VALIDATION]) == 0
    printed = capsys.readouterr().out
    rows = [line.split() for line in printed.splitlines() if line.startswith(("a.json", "b.txt"))]
    (pairs, text) = rows
    assert (pairs[1], text[1]) == ("11", "1")
    assert int(pairs[-1].rstrip("%")) + int(text[-1].rstrip("%")) == 100
    assert "an epoch has 12 documents; its tokens fill at least" in printed


def test_mistakes_are_those_of_a_run(run_file, capsys):
    for arguments, problem in (
        (["--data.fields={prompt: question}"], "a.jsonl:1: no field 'question'"),
        (["--documents=0"], "give at least 1"),
        (["--data.train=none.jsonl"], "none.jsonl matches no file"),
    ):
        capsys.readouterr()
        assert cli.main(["data", run_file, *arguments]) == 2
        error = capsys.readouterr().err
        assert problem in error
        assert error.count("\n") == 1


def test_pairs_are_shown_side_by_side(run_file, capsys):
    user, end = {"role": "user", "content": "One and one?"}, "<|end|>"
    pair = {
        "prompt": [user],
        "chosen": [{"role": "assistant", "content": "Two."}],
        "rejected": [{"role": "assistant", "content": "No."}],
    }
    same = pair | {"rejected": pair["chosen"]}
    lines = (f"{json.dumps(line)}\n" for line in (pair, same))
    Path("pairs.jsonl").write_text("".join(lines))
    capsys.readouterr()
    keys = ("--data.train=pairs.jsonl", "--data.format=preference", "--data.packing=none")
    keys += (
        "--training.objective=dpo",
        "--data.sequence_length=128",
        *NO_VALIDATION,
        "--training.global_batch_size=2",
    )
    assert cli.main(["data", run_file, *keys, "--training.micro_batch_size=1"]) == 0
    printed = capsys.readouterr().out
    assert "1 chosen equals rejected" in printed
    start = f"user: One and one?{end}assistant: "
    sides = (
        f"-- pair 1, chosen --\n{start}[[Two.{end}]]\n-- pair 1, rejected --\n{start}[[No.{end}]]\n"
    )
    assert sides in printed
    (row,) = [line.split() for line in printed.splitlines() if line.startswith("pairs.jsonl")]
    assert f"longest: {row[4]} tokens, pairs.jsonl:2" in printed
    assert ": 1 pair," in printed.replace("row 1 of step 1,", ":").replace("row 2 of step 1,", ":")
    assert cli.main(["data", run_file, *keys, "--training.micro_batch_size=1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    first = next(row["documents"] for row in found["rows"] if 0 in row["documents"])
    # The pair of two equal sides has the chosen side twice in its row.
    assert found["train"][0]["longest"] == int(row[4]) == 2 * first.count(0)
