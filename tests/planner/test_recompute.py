"""A budget's choice: the cheapest of all, within the budget, and what a run does with it."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from shardwise.assembly.describe import Description, describe
from shardwise.assembly.profiles import Measured, Profile, path_of, unit_keys, write
from shardwise.config import Recomputation, RunConfig, UserError
from shardwise.lab.planner import split_view
from shardwise.lab.planner.candidates import Question
from shardwise.lab.planner.cluster import cluster_of
from shardwise.lab.planner.exact import explain
from shardwise.lab.planner.memory import USABLE
from shardwise.lab.planner.peak import memory_of_run
from shardwise.lab.planner.recompute import MANY_TOKENS, WAYS, as_way, chosen_of, within_budget
from shardwise.lab.planner.share import counts_of
from shardwise.lab.planner.split_view import plan
from shardwise.metrics.flops import unit_flops_per_token
from shardwise.metrics.hardware import PeakFlops
from shardwise.parallel.mesh import build_mesh
from tests.distributed import run_ranks
from tests.planner.grid import Cell, config_of, measure_each

ROOT = Path(__file__).parents[2]
PLACES = [
    ("single", 1, {}),
    ("ddp", 2, {}),
    ("fsdp2", 2, {}),
    ("tp-sp", 2, {}),
    ("cp", 2, {}),
    ("1f1b", 2, {"split": [2, 2]}),
    ("interleaved", 2, {"split": [1, 1, 1, 1]}),
]


QUICK = [("1f1b", "full")]
"""What `make test` runs; the formulas of all layouts and modes are compared elsewhere."""


@cache
def run_of(
    layout: str, num_ranks: int, mode: str, folder: Path, split: tuple[int, ...] = ()
) -> tuple[RunConfig, Description]:
    cell = Cell("qwen3_5", layout, mode, num_ranks, 256, 2, 4, "none", "float32")
    cfg = config_of(cell, folder)
    if split:
        cfg = replace(cfg, parallel=replace(cfg.parallel, split=[*split]))
    return cfg, describe(cfg, num_ranks)


def with_budget(cfg: RunConfig, num_bytes: float) -> RunConfig:
    """Return the run with a budget of which so many bytes are usable."""
    return as_way(cfg, Recomputation(budget_gib=(num_bytes / USABLE + 64) / 2**30))


def by_number(ways: Any) -> Any:
    numbers = {way: tuple(i for i, one in enumerate(ways) if one == way) for way in WAYS[1:]}
    return Recomputation(**numbers) if any(numbers.values()) else "none"


def price_of(cfg: RunConfig, run: Description, checkpointing: Any) -> float:
    units = counts_of(run.hf, run.spec).units
    length = cfg.data.sequence_length
    return sum(unit_flops_per_token(u, length, checkpointing).recomputed for u in units)


@pytest.mark.parametrize(
    ("layout", "num_ranks", "parallel", "mode"),
    [
        pytest.param(*place, mode, marks=[pytest.mark.slow] * ((place[0], mode) not in QUICK))
        for place in PLACES
        for mode in ("lora", "full")
    ],
)
def test_the_choice_is_the_cheapest_of_all(layout, num_ranks, parallel, mode, tmp_path_factory):
    folder = tmp_path_factory.getbasetemp()
    cfg, run = run_of(layout, num_ranks, mode, folder, tuple(parallel.get("split", ())))
    every = [by_number(ways) for ways in product(WAYS, repeat=4)]
    needs = {one: memory_of_run(as_way(cfg, one), run).total for one in every}
    prices = {one: price_of(cfg, run, one) for one in every}
    low, high = min(needs.values()), needs["none"]
    for share in (0.0, 0.2, 0.4, 0.7, 0.9, 1.0):
        most = low + share * (high - low)
        chosen = within_budget(with_budget(cfg, most), run, "cpu")
        ways = by_number(chosen.ways)
        assert max(chosen.peak_bytes) == needs[ways] <= most
        assert prices[ways] == min(prices[one] for one in every if needs[one] <= most)
    with pytest.raises(UserError, match=r"budget_gib is .* the smallest that this run can keep is"):
        within_budget(with_budget(cfg, 0.99 * low), run, "cpu")


def test_the_smallest_budget_that_is_named_is_one(tmp_path):
    cfg, run = run_of("1f1b", 2, "full", tmp_path)
    with pytest.raises(UserError) as caught:
        within_budget(as_way(cfg, Recomputation(budget_gib=1e-6)), run, "cpu")
    least = float(str(caught.value).partition("can keep is ")[2].partition(";")[0])
    chosen = within_budget(as_way(cfg, Recomputation(budget_gib=least)), run, "cpu")
    assert max(chosen.peak_bytes) <= USABLE * least * 2**30
    with pytest.raises(UserError, match=f"can keep is {least}"):
        within_budget(as_way(cfg, Recomputation(budget_gib=0.99 * least)), run, "cpu")


def test_what_rules_refuse_for_all_layers_is_chosen_for_none(tmp_path):
    cell = Cell("llama", "single", "full", 1, 256, 2, 4, "none", "float32")
    cfg = config_of(cell, tmp_path)
    run = describe(cfg, 1)
    budget = with_budget(cfg, memory_of_run(as_way(cfg, "operators"), run).total)
    assert "operators" in within_budget(budget, run, "cpu").ways
    compiled = replace(budget, training=replace(budget.training, compile="aot_eager"))
    assert "operators" not in within_budget(compiled, run, "cpu").ways


def test_measured_seconds_are_prices(tmp_path, monkeypatch):
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path / "cache"))
    cfg, run = run_of("single", 1, "full", tmp_path)
    keys = unit_keys(run.hf, run.spec, cfg.parallel.schedule)
    full = memory_of_run(as_way(cfg, "full"), run).total
    budget = with_budget(cfg, (2 * full + memory_of_run(cfg, run).total) / 3)
    counted = within_budget(budget, run, "cpu")
    assert counted.source == "FLOPs"
    # Where attention takes long to compute again, the others are computed again.
    for way in WAYS:
        of_key = {
            key: Measured(1.0, {"none": 1.0, "operators": 5.0, "full": 6.0}[way], 0.0, 0.0, 0)
            for key in keys
        }
        if way == "full":
            of_key = {k: replace(u, backward_seconds=2.0) for k, u in of_key.items()}
            attention = keys[1 + [layer.kind for layer in run.spec.layers].index("full_attention")]
            of_key[attention] = replace(of_key[attention], backward_seconds=60.0)
        profile = Profile(of_key, 0.0, 0.0, 1, 0.0, 9)
        alike = as_way(cfg, way)
        write(profile, path_of(alike, run.hf, keys, 1))
    measured = within_budget(budget, run, "cpu")
    assert measured.source == "measured seconds"
    kinds = {layer.kind for layer, way in zip(run.spec.layers, measured.ways) if way == "full"}
    assert kinds == {"gated_delta_net"}
    assert measured.price == 1e9 * measured.ways.count("full")


def test_a_plan_takes_a_run_with_a_budget(tmp_path):
    cfg, _ = run_of("fsdp2", 2, "full", tmp_path)
    cluster = cluster_of("2xH100-80GB", 1, None)

    def choice(budget_gib: float) -> Any:
        asked = as_way(cfg, Recomputation(budget_gib=budget_gib))
        return explain(Question(asked, cluster, frozenset({"training.checkpointing"})))[0]

    with pytest.raises(UserError, match="the smallest that this run can keep is"):
        choice(0.1)
    ample = choice(70.0)
    assert ample.fits
    assert ample.applied.training.checkpointing == "none"
    most = 0.97 * (ample.memory.total - ample.memory.overhead) + ample.memory.overhead
    tight = choice(most / USABLE / 2**30)
    assert tight.fits
    assert tight.applied.training.checkpointing != "none"
    assert tight.memory.total <= most < ample.memory.total
    assert tight.cfg.training.checkpointing.budget_gib == most / USABLE / 2**30
    assert "GiB full: layers" in tight.details_in_full


def test_a_split_knows_the_layers_that_a_budget_chooses(tmp_path, monkeypatch):
    # Both plans count with one rate; measured twice, it differs with what else the machine does.
    monkeypatch.setattr(split_view, "peak_flops", lambda *_: PeakFlops(1e12, "not measured"))
    cfg, run = run_of("1f1b", 2, "full", tmp_path)
    budget = with_budget(cfg, memory_of_run(as_way(cfg, "full"), run).total)
    planned, plain = plan(budget, 2), plan(cfg, 2)
    assert planned.chosen.chunks[0].backward_seconds > plain.chosen.chunks[0].backward_seconds
    assert list(planned.chosen.layers) == planned.cfg.parallel.split


def test_measured_peaks_are_within_budgets(tmp_path):
    cell = Cell("qwen3_5", "single", "lora", 1, 128, 2, 1, "none", "float32")
    cfg = config_of(cell, tmp_path)
    run = describe(cfg, 1)
    low, high = memory_of_run(as_way(cfg, "full"), run).total, memory_of_run(cfg, run).total
    budgets, cells = [], []
    for share in (0.1, 0.5):
        budget = with_budget(cfg, low + share * (high - low))
        budgets.append(budget.training.budget_bytes)
        ways = by_number(within_budget(budget, run, "cpu").ways)
        cells.append(replace(cell, checkpointing=ways))
    ((first, second),) = run_ranks(1, measure_each, cells, tmp_path)
    assert first.peak < second.peak
    assert first.peak <= budgets[0]
    assert second.peak <= budgets[1]


def test_the_committed_grid_says_what_the_page_does():
    grid = json.loads((ROOT / "results" / "plan" / "budgets.json").read_text(encoding="utf-8"))
    cells = [cell for row in grid["rows"].values() for cell in row["budgets"]]
    assert grid["summary"]["budgets"] == len(cells) >= 200
    for cell in cells:
        assert cell["peak"] <= cell["budget"]
        least = cell["best_of_three"]
        assert least is None or cell["recomputed_flops"] <= least


def _chosen(cfg: RunConfig) -> None:
    chosen_of(cfg, build_mesh(cfg, torch.device("cpu")))


def test_a_micro_batch_that_no_memory_holds_is_refused_before_weights_are_loaded(
    tmp_path, monkeypatch
):
    cfg, _ = run_of("single", 1, "full", tmp_path)
    cfg = replace(cfg, data=replace(cfg.data, sequence_length=MANY_TOKENS // 2))
    assert cfg.training.micro_batch_size == 2
    needed = memory_of_run(cfg, describe(cfg, 1)).total
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=needed))
    run_ranks(1, _chosen, cfg)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=needed - 1))
    with pytest.raises(RuntimeError, match=r"2 rows of 131,072 tokens .*; lower data\.sequence_l"):
        run_ranks(1, _chosen, cfg)
    # A row less is not looked at: a run of usual size spends no time on it.
    run_ranks(1, _chosen, replace(cfg, training=replace(cfg.training, micro_batch_size=1)))
