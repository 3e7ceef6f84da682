"""The bench of the kernels: its arithmetic, its gate, and a rehearsal of all of it."""

from __future__ import annotations

import json
import multiprocessing
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.kernels.lora_linear import torch_backend
from tests.distributed import PATIENCE
from tests.gpu import draw, kernels_bench, lora_rows, loss_rows, suite
from tests.gpu.kernels_bench import Run, with_gains, with_ratios
from tests.gpu.measure import Clock, floors
from tests.gpu.shapes import FULL, Setting
from tests.gpu.suite import Suite

CPU = torch.device("cpu")


def test_the_floor_is_what_flops_or_bytes_take():
    setting = Setting("", "", k=64, n=(32, 16), r=8)
    # 10 tokens. Factors: 2 of 8 x 64 and 8 x (32 + 16), 1408. FLOPs: 2 * 10 * (64 * 48 + 1408),
    # twice the factors in the backward. Bytes: 2 * (10 * (64 + 48) + 64 * 48 + 1408), in the
    # backward x and the factors' gradients too.
    by_flops = floors(setting, 10, {"flops_per_second": 1.0, "bytes_per_second": 1e12})
    assert by_flops == {"forward": 20 * (3072 + 1408), "backward": 20 * (3072 + 2816)}
    by_bytes = floors(setting, 10, {"flops_per_second": 1e12, "bytes_per_second": 1.0})
    assert by_bytes == {
        "forward": 2 * (1120 + 3072 + 1408),
        "backward": 2 * (1120 + 3072 + 1408 + 640 + 1408),
    }


def row(side: str, forward: float, backward: float, status: str = "ok") -> dict[str, Any]:
    times = (
        {"forward": {"median": forward}, "backward": {"median": backward}} if status == "ok" else {}
    )
    floor = {"forward": 1.0, "backward": 1.0}
    return {
        "setting": {"k": 1},
        "side": side,
        "floor": floor,
        "status": status,
        "reason": "",
        **times,
    }


def test_ratios_are_of_forward_and_backward_together():
    rows = with_ratios(
        [
            row("frozen", 1, 1),
            row("peft", 3, 5),
            row("torch", 1, 1.5),
            row("triton", 0, 0, "failed"),
        ]
    )
    assert rows[2]["times_floor"] == 1.25
    assert rows[2]["times_faster_than_peft"] == 3.2
    assert rows[2]["times_faster_than_frozen"] == 0.8
    assert not any(key.startswith("times") for key in rows[3])


def test_gains_of_the_loss():
    head = {"model": "m", "vocabulary": 9, "trained": False}
    ok = {"head": head, "status": "ok", "reason": ""}
    rows = with_gains(
        [
            {**ok, "side": "eager", "peak_bytes": 100, "seconds": {"median": 3.0}},
            {**ok, "side": "torch", "peak_bytes": 20, "seconds": {"median": 2.0}},
            {**ok, "side": "liger", "status": "skipped"},
        ]
    )
    assert (rows[1]["times_less_memory"], rows[1]["times_faster"]) == (5.0, 1.5)
    assert "times_faster" not in rows[2]


def test_all_settings_are_there():
    assert {setting.model for setting in FULL.settings} == {
        "Qwen3.5-2B",
        "Qwen3.5-9B",
        "Jet-Nemotron-2B",
        "Llama-3.1-8B",
    }
    assert {(setting.r, setting.p) for setting in FULL.settings} == {
        (16, 0.0),
        (16, 0.1),
        (64, 0.0),
        (64, 0.1),
    }
    assert len(set(FULL.settings)) == len(FULL.settings)


@pytest.mark.parametrize(
    ("name", "change", "tensors"),
    [
        ("project", lambda h: h * 1.02, "[0, 3]"),  # the output, and B's gradient
        ("input_gradient", lambda dx: dx * 1.02, "[1]"),
        ("factor_gradient", lambda da: da * 1.02, "[2]"),
    ],
)
def test_what_is_wrong_has_a_red_gate_and_no_time(monkeypatch, name, change, tensors):
    problem = lora_rows.Problem(Setting("", "", 48, (40,), 8, 0.1), 70, CPU)
    right = getattr(torch_backend, name)
    monkeypatch.setattr(torch_backend, name, lambda *args: change(right(*args)))
    row = lora_rows.timed(problem, "torch", Clock(CPU, 1))
    assert row["status"] == "failed"
    assert f"errors of the tensors {tensors} are over" in row["reason"]
    assert "forward" not in row


def test_a_loss_that_is_wrong_has_no_time(monkeypatch, tmp_path):
    right = loss_rows.eager
    monkeypatch.setattr(loss_rows, "eager", lambda *args: right(*args) * 1.001)
    loss_rows.main(str(tmp_path / "rows"), "cpu")
    rows = json.loads((tmp_path / "rows").read_text())["rows"].values()
    assert {(r["side"], r["status"]) for r in rows} >= {("eager", "failed"), ("torch", "ok")}
    assert all("seconds" not in r for r in rows if r["status"] != "ok")


class Elsewhere(Run):
    """Times linears and losses in this process, which has imported everything."""

    def rows_stage(self, name: str) -> dict[str, str]:
        {"lora": lora_rows, "loss": loss_rows}[name].main(str(self.file(name)), "cpu")
        return {"status": "ok", "reason": ""}


class Forking(Suite):
    """Draws the model in a fork of this process."""

    def run(self, stage: str, command: Sequence[str]) -> dict[str, str]:
        assert stage == "draw"
        arguments = command[command.index(draw.__name__) + 1 :]
        process = multiprocessing.get_context("fork").Process(target=draw.main, args=arguments)
        process.start()
        process.join()
        return {"status": "failed" if process.exitcode else "ok", "reason": ""}


def run_in(folder: Path, kind: type[Run] = Run, suite_kind: type[Suite] = Suite) -> Run:
    (folder / "scratch").mkdir()
    limits = dict.fromkeys(kernels_bench.LIMITS, PATIENCE)
    return kind(suite_kind("cpu", folder / "out", folder / "scratch", limits))


def test_a_rehearsal_goes_through_all_of_it(tmp_path, monkeypatch):
    monkeypatch.chdir(kernels_bench.ROOT)
    # However busy this machine is.
    monkeypatch.setattr(suite, "TOTAL_SECONDS", 10 * PATIENCE)
    sides = ("shardwise:torch", "shardwise:triton", "transformers")
    monkeypatch.setattr(kernels_bench, "STEP_SIDES", sides)
    run = run_in(tmp_path, Elsewhere, Forking)
    run.all()
    run.save()
    assert run.exit_code() == 0
    lora, loss, step = (
        json.loads((tmp_path / "out" / f"kernels-{name}.json").read_text())
        for name in ("lora", "loss", "step")
    )
    assert {r["side"]: r["status"] for r in lora["rows"]} == {
        **dict.fromkeys(("frozen", "peft", "peft bfloat16", "torch"), "ok"),
        "triton": "skipped",
    }
    assert all("times_faster_than_peft" in r for r in lora["rows"] if r["side"] == "torch")
    assert {r["side"]: r["status"] for r in loss["rows"]}["torch"] == "ok"
    assert {r["side"]: r["status"] for r in step["rows"]} == {
        "shardwise:torch": "ok",
        "transformers": "ok",
        "shardwise:triton": "skipped",
    }
    (compared,) = step["comparisons"]
    assert compared["gate"] == "green"
    assert all(compared["equal"].values())
    assert "time" in compared
    assert lora["environment"]["torch"] == torch.__version__
    text = (tmp_path / "out" / "kernels.md").read_text()
    assert "a rehearsal on a CPU: nothing here is a speed" in text
    assert "| toy, gate, up | 48 | 33 + 24 | 4 | 0.1 | torch |" in text


def test_a_side_is_left_out_of_the_step_if_its_kernels_were_wrong_or_not_compared(tmp_path):
    run = run_in(tmp_path)
    assert run.gate("shardwise:triton") == "triton was compared nowhere"
    gate = {"kind": "gate", "side": "triton", "status": "green", "reason": ""}
    wrong = {"kind": "row", "side": "triton", "status": "failed", "reason": "red gate: runs differ"}
    write(run, "lora", [gate, wrong])
    assert run.gate("shardwise:triton") == "red gate: runs differ"
    assert run.gate("shardwise:peft") == run.gate("transformers") == "green"


def test_what_auto_takes_is_left_out_if_it_was_wrong(tmp_path):
    run = run_in(tmp_path)
    gate = {"kind": "gate", "side": "triton", "status": "red", "reason": "errors"}
    row = {"kind": "row", "side": "triton", "status": "skipped", "reason": "red gate: errors"}
    write(run, "lora", [gate, row], auto="triton")
    assert run.gate("shardwise") == "errors"
    write(run, "lora", [{**row, "status": "ok", "reason": ""}], auto="triton")
    assert run.gate("shardwise") == "green"
    write(run, "loss", [{"side": "triton", "status": "failed", "reason": "red gate: dw"}])
    assert run.gate("shardwise") == "red gate: dw"
    assert run.gate("shardwise:peft") == "green"


def write(run: Run, stage: str, rows: list[dict[str, Any]], **more: str) -> None:
    content = {**more, "rows": {str(i): row for i, row in enumerate(rows)}}
    run.file(stage).write_text(json.dumps(content))


def test_half_a_run_is_whole_json(tmp_path):
    run = run_in(tmp_path)
    run.save()
    folder = tmp_path / "out"
    assert json.loads((folder / "kernels-loss.json").read_text())["reason"] == "not reached"
    assert "Stage loss: skipped (not reached)." in (folder / "kernels.md").read_text()


def test_a_rehearsal_never_writes_where_results_of_gpus_are(monkeypatch, capsys):
    for folder in ("results/gpu", "results/gpu/more"):
        monkeypatch.setattr(sys, "argv", ["bench", "--rehearse", str(kernels_bench.ROOT / folder)])
        assert kernels_bench.main() == 2
        assert "rehearse into another folder" in capsys.readouterr().err
    assert not Path(kernels_bench.ROOT, "results", "gpu", "more").exists()


def test_without_a_device_it_says_so_in_one_line(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["bench"])
    assert kernels_bench.main() == 2
    assert capsys.readouterr().err.startswith("error: ")
