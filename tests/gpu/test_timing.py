"""The timing's own arithmetic and its behaviour when something goes wrong, without a model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu import __main__ as lora_step
from tests.gpu.processes import Deadline, Worker
from tests.gpu.suite import python
from tests.gpu.timing import comparisons, time_sides, with_figures
from tests.gpu.workload import REHEARSAL

# A worker without torch: a step takes 10 ms, or 20 on the other side; `dies` ends it at the second
# timed round.
WORKER = """
import json, sys
seconds, dies, rounds = float(sys.argv[1]), sys.argv[2] == "dies", 0
for line in sys.stdin:
    request = json.loads(line)
    reply = {"adapters": 31}
    if request["do"] == "steps":
        rounds += not request["figures"] and not request["memory"]
        if dies and rounds == 3:
            sys.exit("out of luck")
        reply = {"peak_bytes": 10} if request["memory"] else {"seconds": seconds * request["steps"]}
        reply |= {"losses": [5.0], "grad_norms": [1.0]}
    print(json.dumps(reply), flush=True)
"""


def start(tmp_path: Path, seconds: float, dies: str = "") -> Worker:
    command = [sys.executable, "-c", WORKER, str(seconds), dies]
    return Worker(command, tmp_path / f"{seconds}.log")


def timed(tmp_path: Path, dies: str = "") -> tuple[list[dict[str, Any]], int]:
    saved: list[list[dict[str, Any]]] = []

    def starting(side: str, gdn: str) -> Worker:
        return start(tmp_path, 0.01) if side == "shardwise" else start(tmp_path, 0.02, dies)

    keep = saved.append
    time_sides(
        "torch", REHEARSAL, starting, Deadline(30), lambda rows: keep(json.loads(json.dumps(rows)))
    )
    return saved[-1], len(saved)


def test_a_pair_is_timed_in_rounds_and_compared(tmp_path):
    rows, saves = timed(tmp_path)
    assert saves > 2 * REHEARSAL.rounds  # after every round of both modes
    assert [(row["side"], row["checkpointing"], row["status"]) for row in rows] == [
        ("shardwise", "none", "ok"),
        ("transformers", "none", "ok"),
        ("shardwise", "full", "ok"),
        ("transformers", "full", "ok"),
    ]
    # 0.1 s per round over 0.02 s a step of the slower side: 5 steps for both.
    assert {row["steps_per_round"] for row in rows} == {5}
    assert rows[0]["rounds"] == pytest.approx([0.01] * REHEARSAL.rounds)
    facts = {"flops": {"model_per_token": 50.0}, "peaks": {"published": {"flops_per_second": 7e6}}}
    row = with_figures(rows[0], REHEARSAL, facts)
    # 2 x 70 tokens in 0.01 s are 14,000 a second; x 50 FLOPs = 7e5 of 7e6.
    assert row["tokens_per_second"] == pytest.approx(14000)
    assert row["mfu"]["published"] == pytest.approx(0.1)
    entries = comparisons(rows, "green")
    assert [entry["checkpointing"] for entry in entries] == ["none", "full"]
    assert entries[0]["time"]["median"] == pytest.approx(2.0)
    assert entries[0]["peak_memory"] == 1.0
    assert all(entries[0]["equal"].values())


def test_no_ratio_on_a_red_gate_or_unequal_work(tmp_path):
    rows, _ = timed(tmp_path)
    assert all("time" not in entry for entry in comparisons(rows, "red"))
    rows[0]["facts"]["adapters"] = 30
    rows[2]["warmup"]["losses"] = [5.0 * (1 + 2**-7)]  # two roundings off
    none, full = comparisons(rows, "green")
    assert "time" not in none
    assert none["equal"] == {
        "adapters": False,
        "first of losses": True,
        "first of grad_norms": True,
    }
    assert "time" not in full
    assert full["equal"] == {
        "adapters": True,
        "first of losses": False,
        "first of grad_norms": True,
    }


def test_a_side_that_dies_keeps_its_reason_and_the_other_is_timed(tmp_path):
    rows, _ = timed(tmp_path, "dies")
    assert [row["status"] for row in rows] == ["ok", "failed", "ok", "failed"]
    assert rows[1]["reason"] == "out of luck"
    assert len(rows[1]["rounds"]) == 1  # what it had done stays
    assert "time" not in comparisons(rows, "green")[0]


def test_without_a_device_it_says_so_in_one_line(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["tests.gpu"])
    assert lora_step.main() == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1


CHOICE = """
import importlib, sys, torch
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
from tests.gpu import kernels
for gdn in ("torch", "fla"):
    for name in ("transformers.models.qwen3_5.modeling_qwen3_5", *kernels.OPTIONAL):
        sys.modules.pop(name, None)
    kernels.choose(gdn)
    module = importlib.import_module("transformers.models.qwen3_5.modeling_qwen3_5")
    with torch.device("meta"):
        config = Qwen3_5TextConfig(num_hidden_layers=1, layer_types=["linear_attention"])
        model = module.Qwen3_5ForCausalLM(config)
    print(kernels.check(model, gdn)["torch_chunk_gated_delta_rule"])
"""


def test_transformers_takes_the_kernels_that_were_chosen(tmp_path, monkeypatch):
    package = tmp_path / "fla" / "ops" / "gated_delta_rule"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(
        "def chunk_gated_delta_rule(q, k, v, g, beta, **kwargs): ...\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "choice.py").write_text(CHOICE)
    done = subprocess.run(python("choice"), capture_output=True, text=True, check=True)
    torch_code = "transformers.models.qwen3_5.modeling_qwen3_5"
    assert done.stdout.split() == [torch_code, "fla.ops.gated_delta_rule"]
