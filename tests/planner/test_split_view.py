"""`shardwise split`, from the command to what it prints and writes."""

from __future__ import annotations

import errno
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GemmaConfig

from shardwise.base.words import size
from shardwise.commands import cli
from shardwise.config import RunConfig
from shardwise.lab.planner import profile, split_view
from shardwise.parallel.mesh import build_mesh
from tests.assembly.test_costs import tiny
from tests.distributed import run_ranks

RUN = """
model: {path: MODEL, init: random}
data: {train: no-such-corpus.jsonl, sequence_length: 32}
parallel: {pp: 2}
training: {output_dir: out, global_batch_size: 16}
"""


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    (tmp_path / "tiny.yaml").write_text(RUN.replace("MODEL", tiny("qwen3_5")))
    (tmp_path / "tied.yaml").write_text(RUN.replace("MODEL", tiny("qwen3_5-tied")))
    (tmp_path / "other.yaml").write_text(RUN.replace("MODEL", "./gemma"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "100")
    return tmp_path


def test_costs_are_counted_where_nothing_is_measured(folder, capsys):
    assert cli.main(["split", "tiny.yaml", "--parallel.schedule=interleaved-1f1b"]) == 0
    told = capsys.readouterr().out
    stages = re.findall(r"^ (\d)  +(\d) ", told, flags=re.MULTILINE)
    assert stages == [("0", "0"), ("1", "1"), ("2", "0"), ("3", "1")]
    assert "1 x gated_delta_net" in told
    assert "interleaved-1f1b, 16 micro-batches, split balanced: step " in told
    assert "\nuniform: " in told
    assert "\nparameters: " in told
    assert "\nno split can beat " in told
    assert "\ncosts: counted FLOPs at " in told
    chart = told.partition("█ forward  ▒ backward  · idle\n")[2].splitlines()
    assert [line.split()[0] for line in chart[:7]] == [
        "uniform",
        "rank",
        "rank",
        "balanced",
        "rank",
        "rank",
        "-o",
    ]
    # Waits for rank 0's first forward.
    assert re.fullmatch(r"  rank 1  ·[█▒·]+ +\d+\.\d% idle", chart[5])
    assert chart[6] == "-o DIR draws it, and writes it for Perfetto"
    assert "\x1b" not in told  # plain in a pipe
    assert "over the limit" not in told
    assert not (folder / "out").exists()


def test_what_is_written_says_that_layers_are_whole_where_ranks_share_them(folder, capsys):
    assert cli.main(["split", "tiny.yaml", "-o", "cut", "--parallel.tp=2"]) == 0
    note = "are those of whole layers, before 2 tensor-parallel ranks"
    assert note in capsys.readouterr().out
    assert note in "".join(json.loads((folder / "cut" / "split.json").read_text())["notes"])
    titles = [f"{name}, of whole layers, before tp shards them" for name in ("uniform", "balanced")]
    assert all(f">{title}</text>" in (folder / "cut" / "split.svg").read_text() for title in titles)
    events = json.loads((folder / "cut" / "trace.json").read_text())["traceEvents"]
    assert [event["args"]["name"] for event in events if event["name"] == "process_name"] == titles


def test_experts_are_spread_over_the_fewest_processes(folder, capsys):
    """Of deepseek_v3's 4 layers the first is dense; each other one has 8 experts of 24 KiB."""
    (folder / "moe.yaml").write_text(RUN.replace("MODEL", tiny("deepseek_v3")))
    weights = {}
    for ep, arguments in ((1, ["--nproc=8"]), (4, [])):
        split = ["split", "moe.yaml", "-o", "cut", "--parallel.data=ddp", f"--parallel.ep={ep}"]
        assert cli.main([*split, *arguments]) == 0
        told = capsys.readouterr().out
        assert "1 x full_attention + moe " in told
        assert ("with 1/4 of each layer's experts" in told) == (ep == 4)
        written = json.loads((folder / "cut" / "split.json").read_text())
        assert written["num_microbatches"] == 4
        chunks = written["splits"]["uniform"]["chunks"]
        weights[ep] = sum(chunk["weight_bytes"] for chunk in chunks)
    assert weights[1] - weights[4] == 3 * 6 * 24 * 2**10


def test_other_splits_that_break_the_limit_are_marked(folder, capsys):
    """Of three ranks the first keeps most micro-batches in flight, too many for two layers."""
    arguments = ["split", "tiny.yaml", "-o", "cut", "--parallel.pp=3"]
    assert cli.main([*arguments, "--parallel.memory_limit_gib=1e-5"]) == 2
    least = capsys.readouterr().err.split()[-3]
    assert cli.main([*arguments, f"--parallel.memory_limit_gib={least}"]) == 0
    told = capsys.readouterr().out
    splits = json.loads((folder / "cut" / "split.json").read_text())["splits"]
    assert (splits["uniform"]["layers"], splits["balanced"]["layers"][0]) == ([2, 1, 1], 1)
    over = size(max(splits["uniform"]["memory_bytes"]))
    assert re.search(rf"^uniform: .*\(over the limit: {over} .*\)$", told, flags=re.MULTILINE)
    assert max(splits["balanced"]["memory_bytes"]) <= float(least) * 2**30


def test_a_folder_that_takes_no_files_is_told(folder, capsys, monkeypatch):
    def refuse(**_: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(split_view.tempfile, "TemporaryFile", refuse)  # root may write anywhere
    assert cli.main(["split", "tiny.yaml", "-o", "cut"]) == 2
    output = capsys.readouterr()
    assert (
        output.err
        == "error: --out cut: cannot write there (Permission denied); give another folder\n"
    )
    assert output.out == ""


def on_mesh(train: Any, cfg: RunConfig) -> None:
    train(cfg, build_mesh(cfg, torch.device("cpu")))


def test_a_profile_is_measured_kept_and_used(folder, capsys, monkeypatch):
    def start_processes(cfg: RunConfig, nproc: int, train: Any) -> int:
        run_ranks(nproc, on_mesh, train, cfg)
        return 0

    monkeypatch.setattr("shardwise.launch.local.start_processes", start_processes)
    monkeypatch.setattr(profile, "FEWEST", 3)
    monkeypatch.setattr(profile, "MOST", 3)
    assert cli.main(["split", "tiny.yaml", "--profile", "-o", "cut"]) == 0
    told = capsys.readouterr().out
    (kept,) = (folder / "cache" / "profiles").iterdir()
    assert f"costs: profile {kept.stem}, 2 processes" in told
    assert told.endswith("wrote split.json, split.svg, trace.json to cut\n")
    written = json.loads((folder / "cut" / "split.json").read_text())
    splits = written["splits"]
    assert written["notes"] == []
    assert set(splits) == {"uniform", "parameters", "balanced"}
    assert splits["uniform"]["boundaries"] == [0, 3, 6]
    assert (
        written["bound_seconds"]
        <= splits["balanced"]["step_seconds"]
        <= splits["uniform"]["step_seconds"]
    )
    assert ">balanced</text>" in (folder / "cut" / "split.svg").read_text()
    names = [
        e["args"]["name"]
        for e in json.loads((folder / "cut" / "trace.json").read_text())["traceEvents"][:1]
    ]
    assert names == ["uniform"]
    # Found again, for another split.
    assert cli.main(["split", "tiny.yaml", "--parallel.split=[1, 3]"]) == 0
    told = capsys.readouterr().out
    assert f"costs: profile {kept.stem}" in told
    assert "split given" in told


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (
            ["tiny.yaml", "--parallel.pp=1"],
            "parallel.pp is 1, so there is nothing to split; set it to 2 or more",
        ),
        (
            ["tiny.yaml", "--parallel.pp=5"],
            "5 pipeline stages (5 ranks x 1) are more than the model's 4 layers",
        ),
        (
            ["tiny.yaml", "--profile", "--parallel.pp=5"],
            "5 pipeline stages (5 ranks x 1) are more than the model's",
        ),
        (
            ["tiny.yaml", "--parallel.split=[1, 2]"],
            "the split [1, 2] does not cover the model; give 2 numbers of la",
        ),
        (
            ["tiny.yaml", "--parallel.memory_limit_gib=1e-4"],
            "no split over 2 ranks keeps each within 0.0001 GiB; set p",
        ),
        (
            [
                "tied.yaml",
                "--parallel={data: fsdp2, pp: 2, schedule: zbv, reshard_after_forward: false}",
            ],
            "zbv has the embedding and the head on one rank, where they share their tied weight",
        ),
        (
            [
                "tiny.yaml",
                "--model.dtype=bfloat16",
                "--training.accumulation=float32",
                "--parallel.schedule=zbv",
            ],
            "training.accumulation is float32, but in a pipeline with fsdp2",
        ),
        (
            ["tiny.yaml", "--nproc=3"],
            "parallel.pp is 2, which does not divide the 3 processes; use --nproc 2",
        ),
        (
            ["tiny.yaml", "--training.global_batch_size=1"],
            "1f1b on 2 ranks needs 2 micro-batches or more, not 1",
        ),
        (["other.yaml"], "pp is not offered for gemma"),
        (
            ["tiny.yaml", "-o", "tiny.yaml"],
            "--out tiny.yaml: cannot write there (File exists); give another folder",
        ),
        (
            ["tiny.yaml", "--profile", "-o", "tiny.yaml/cut"],
            "--out tiny.yaml/cut: cannot write there (Not a directory)",
        ),
        (["tiny.yaml", "--profil"], "unknown argument --profil; did you mean --profile?"),
    ],
)
def test_a_mistake_is_one_line(arguments, told, folder, capsys):
    GemmaConfig(
        num_hidden_layers=4,
        hidden_size=64,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=16,
    ).save_pretrained("gemma")
    assert cli.main(["split", *arguments]) == 2
    output = capsys.readouterr()
    assert output.err.startswith(f"error: {told}")
    assert (output.out, output.err.count("\n")) == ("", 1)
