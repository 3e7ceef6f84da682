"""`shardwise prove`: 0 for every kind of layout, 1 for one with a bug in it, 2 for a mistake."""

from __future__ import annotations

import json
import os
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardwise.lab.proof import prove as proof_of_run
from tests.command import run_command
from tests.distributed import PATIENCE
from tests.left_out import some_now
from tests.parity.harness import CONFIGS
from tests.parity.test_sensitivity import fsdp_mean_instead_of_sum, missing_world_size_factor

RUN = """
model: {path: %s, init: random}
data: {train: no-such-corpus.jsonl}
lora: {r: 4}
training: {output_dir: no-such-folder}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run file, and a folder that is empty as long as nothing is left behind."""
    (tmp_path / "run.yaml").write_text(RUN % (CONFIGS / "tiny-llama"))
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    return tmp_path


def prove(
    folder: Path, *options: str, before: Callable[[], None] | None = None
) -> tuple[int, str, Any]:
    """The exit code, what is printed, and what is written."""
    arguments = ["prove", str(folder / "run.yaml"), "--json", str(folder / "out.json"), *options]
    done = run_command(arguments, before=before)
    assert [*(folder / "tmp").glob("shardwise-*")] == []
    assert not Path("no-such-folder").exists()
    path = folder / "out.json"
    return (
        done.returncode,
        done.stdout + done.stderr,
        path.exists() and json.loads(path.read_text()),
    )


OPTIONS = {
    "ddp": ("--parallel.data=ddp",),
    "fsdp2": ("--parallel.data=fsdp2", "--lora=null", "--training.checkpointing=full"),
    "tp": ("--parallel.tp=2", "--parallel.sequence_parallel=true"),
    "pp": ("--parallel.pp=2", "--data.packing=documents"),
    "bfloat16": ("--parallel.data=fsdp2", "--training.precision=bfloat16", "--precision=run"),
}
"""Planted bugs are looked for in the first two, which `make parity` proves without."""


@pytest.mark.parametrize("name", some_now(OPTIONS, ("tp", "pp", "bfloat16")))
def test_a_layout_is_proven(name, folder):
    code, text, data = prove(folder, *OPTIONS[name])
    assert code == 0, text
    assert data["equal"] is True
    assert data["wrong"] == []
    assert data["num_ranks"] == 2
    assert {
        kind: len(by_name) > 0 for kind, by_name in data["differences"].items()
    } == dict.fromkeys(("loss", "grad", "norm", "param", "saved"), True)
    assert "equal: " in text


@pytest.mark.parametrize(
    ("bug", "options", "axes"),
    [
        (fsdp_mean_instead_of_sum, ("--parallel.data=fsdp2", "--lora=null"), ["dp_shard"]),
        pytest.param(
            missing_world_size_factor, ("--parallel.data=ddp",), [], marks=pytest.mark.slow
        ),
    ],
)
def test_a_bug_is_caught_and_its_tensors_are_named(bug, options, axes, folder):
    code, text, data = prove(folder, *options, before=bug)
    assert code == 1, text
    assert data["equal"] is False
    wrong = {one["name"]: one["axes"] for one in data["wrong"] if one["kind"] == "grad"}
    assert wrong == dict.fromkeys(data["differences"]["grad"], axes)
    assert min(data["differences"]["grad"].values()) > 0.4  # a half of it, or twice as much
    assert "WRONG" in text
    assert "self_attn" in text


def interrupt() -> None:
    """Let a rank send Ctrl-C to the command while it computes."""

    def compute(*_: Any) -> None:
        os.kill(os.getppid(), signal.SIGINT)
        time.sleep(PATIENCE)

    proof_of_run._compute = compute


def test_ctrl_c_ends_it_and_leaves_nothing(folder):
    code, text, data = prove(folder, "--parallel.data=ddp", before=interrupt)
    assert code == 128 + signal.SIGINT
    assert "Traceback" not in text
    assert not data


@pytest.mark.parametrize(
    ("options", "fragment"),
    [
        (("--parallel.tp=3",), "parallel.tp is 3, but this llama has 8 attention heads"),
        (("--nproc=two",), "argument --nproc: invalid int value"),
        (("--precision=half",), "argument --precision: invalid choice: 'half'"),
        (("--json", "no/such/folder.json"), "--json no/such/folder.json: cannot write there"),
        (("--json", "."), "--json .: cannot write there (it is a folder)"),
        (("--model.path=/no/such",), "/no/such: the path of the model is no"),
    ],
)
def test_a_mistake_is_one_line(options, fragment, folder):
    code, text, data = prove(folder, *options)
    assert code == 2
    assert fragment in text
    assert len(text.splitlines()) == 1
    assert not data
