"""A calibration that two ranks measure, with few small sizes."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch

from shardwise.assembly.describe import describe
from shardwise.commands import cli
from shardwise.config import Lora
from shardwise.lab.planner import measure_machine, measure_messages, measured_models
from shardwise.lab.planner.calibration import FACTORS, read
from shardwise.lab.planner.calibration_view import collectives_table, summary
from shardwise.lab.planner.unit_time import in_bytes
from shardwise.lab.planner.unit_work import RestQuantities, work_of_units
from shardwise.parallel.mesh import build_mesh
from tests.assembly.test_costs import config, tiny
from tests.distributed import PATIENCE, run_ranks


def measure_on_rank(path: Path, folder: Path) -> None:
    mesh = build_mesh(config(tiny("llama"), pp=1, data="ddp"), torch.device("cpu"))
    measure_machine._on_rank(path, folder, config(tiny("llama")), mesh)


def test_two_ranks_measure_every_part(tmp_path, monkeypatch):
    references = {"qwen3_5_text": measure_machine.REFERENCES["qwen3_5_text"]}
    monkeypatch.setattr(measure_machine, "REFERENCES", references)
    monkeypatch.setattr(measure_machine, "OTHERS", {})
    small = measured_models.SCALES["cpu"]._replace(sizes=(8, 16), points=((32, 1, 32), (64, 1, 64)))
    monkeypatch.setitem(measured_models.SCALES, "cpu", small)
    monkeypatch.setitem(measure_messages.MESSAGE_BYTES, "cpu", (64, 256))
    monkeypatch.setattr(measure_messages, "ROUNDS", 1)
    monkeypatch.setitem(measure_messages.COMPUTING, "cpu", 1e-4)
    monkeypatch.setitem(measure_messages.STRETCHES, "cpu", 5)
    path = tmp_path / "cache" / "calibration.json"
    run_ranks(2, measure_on_rank, path, tmp_path)
    made = read(path)
    assert made.num_processes == 2
    assert set(made.speeds) == {1, 2}
    kinds = ("embed", "gated_delta_net, dense", "full_attention, dense", "head")
    for speeds in made.speeds.values():
        assert set(speeds.units) == {
            f"{kind}, {mode}" for kind, mode in product(kinds, ("full", "lora"))
        }
        ways = [prices[way] for prices in speeds.units.values() for way in ("forward", "backward")]
        assert all(min(prices) >= 0 for prices in ways)
        # An embedding has no products whose seconds are subtracted; what is left of a unit this
        # small beyond its products may be nothing.
        assert max(speeds.units["embed, full"]["forward"]) > 0
        assert 0 < speeds.optimizer[0] + speeds.optimizer[1] < PATIENCE
    assert {c.kind for c in made.collectives} == set(FACTORS)
    assert all(0 < c.seconds < PATIENCE for c in made.collectives)
    assert 0 <= made.jitter < PATIENCE
    assert len(collectives_table(made).rows) == 2 * len(FACTORS)
    assert any("GFLOP/s" in line for line in summary(made))


def backward_seconds(folder: Path) -> dict[str, float]:
    """Return the seconds of the backward of each unit that has one, by its key."""
    mesh = build_mesh(config(tiny("llama"), pp=1), torch.device("cpu"))
    cfg = measured_models.reference_run(folder, "cpu", "qwen3_5_text", (32, 1, 32), None)
    units = measure_machine._unit_seconds(cfg, mesh)
    return {work.key: unit.backward_seconds for work, unit, _ in units if work.has_backward}


def test_each_kind_of_unit_takes_time(tmp_path):
    (seconds,) = run_ranks(1, backward_seconds, tmp_path)
    kinds = ("embed", "gated_delta_net, dense", "full_attention, dense", "head")
    assert set(seconds) == {f"{kind}, full" for kind in kinds}
    assert all(0 < of_unit < PATIENCE for of_unit in seconds.values())


def kinds_and_ranks() -> set[tuple[str, int]]:
    return {(row.kind, row.num_ranks) for row in measure_messages.collectives(torch.device("cpu"))}


def test_four_ranks_measure_what_two_of_them_send_too(monkeypatch):
    """Else a plan for four processes would have no price for an axis of two, or for a pipeline."""
    monkeypatch.setitem(measure_messages.MESSAGE_BYTES, "cpu", (64,))
    monkeypatch.setattr(measure_messages, "ROUNDS", 1)
    monkeypatch.setitem(measure_messages.COMPUTING, "cpu", 1e-4)
    monkeypatch.setitem(measure_messages.STRETCHES, "cpu", 1)
    expected = {(kind, n) for kind, n in product(FACTORS, (2, 4)) if (kind, n) != ("send", 4)}
    assert run_ranks(4, kinds_and_ranks) == [expected] * 4


@pytest.mark.parametrize("nproc", ["0", "100000"])
def test_a_wrong_number_of_processes_ends_with_2(nproc, capsys):
    assert cli.main(["calibrate", "--device", "cpu", "--nproc", nproc]) == 2
    error = capsys.readouterr().err
    assert "as many as this machine has cores" in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("lora", [None, Lora(r=8, targets="auto")], ids=["full", "lora"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_measured_models_tell_prices_apart(device, lora, tmp_path):
    """With one row, or one length, a core's FLOPs would be a sum of the other amounts."""
    amounts: dict[str, list[RestQuantities]] = defaultdict(list)
    others = measured_models.OTHERS if device == "cpu" else {}
    points = measured_models.SCALES[device].points
    for model_type, point in product([*measured_models.REFERENCES, *others], points):
        cfg = measured_models.reference_run(tmp_path, device, model_type, point, lora)
        cfg = replace(cfg, training=replace(cfg.training, device="cpu"))
        facts = describe(cfg, 1)
        for place, work in enumerate(work_of_units(cfg, facts.hf, facts.spec)):
            priced = in_bytes(cfg, facts, place, work) if device == "cuda" else work
            amounts[work.key].append(priced.rest_backward)
    for key, rows in amounts.items():
        columns = np.array(rows)
        columns = columns[:, columns.any(axis=0)]
        assert np.linalg.cond(columns / np.linalg.norm(columns, axis=0)) < 100, key
