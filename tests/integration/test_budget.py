"""Whole runs within a budget of memory: what is chosen, printed, kept in the record and needed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from shardwise.assembly.describe import describe
from shardwise.config import Parallel, Recomputation, RunConfig
from shardwise.lab.planner.memory import USABLE
from shardwise.lab.planner.peak import memory_of_run
from shardwise.lab.planner.recompute import as_way
from shardwise.lab.planner.share import counts_of
from shardwise.metrics.flops import hardware_flops_per_token
from tests.integration.test_train import config, replace_measure, run_on

RANKS = 2


def sized(folder: Any, name: str, budget: float | None, **parallel: Any) -> RunConfig:
    """Return a run whose peak is its activations', which tiny models need long rows for."""
    cfg = config(folder, name, steps=3, micro_batch_size=1)
    return replace(
        cfg,
        data=replace(cfg.data, sequence_length=256, validation=0.0),
        parallel=Parallel(**parallel),
        measure=replace(cfg.measure, memory=True, warmup_steps=0),
        training=replace(
            cfg.training,
            eval_every=0,
            checkpointing="none" if budget is None else Recomputation(budget_gib=budget),
        ),
    )


@pytest.mark.slow  # tests/planner/test_recompute.py has the choice, and peaks within it
@pytest.mark.parametrize("parallel", [{"data": "fsdp2"}, {"pp": 2}], ids=["fsdp2", "pp"])
def test_a_run_stays_within_its_budget(parallel, folder, capfd):
    plain = sized(folder, f"plain-{'-'.join(parallel)}", None, **parallel)
    described = describe(plain, RANKS)
    low, high = (memory_of_run(as_way(plain, w), described).total for w in ("full", "none"))
    budget = (low + high) / 2 / USABLE / 2**30
    cfg = sized(folder, f"budget-{'-'.join(parallel)}", budget, **parallel)
    record = run_on(RANKS, cfg)
    assert record.config["training"]["checkpointing"]["budget_gib"] == budget
    chosen = record.recomputation
    assert chosen is not None
    layers = [*chosen["full"], *chosen["operators"], *chosen["none"]]
    assert sorted(layers) == list(range(len(described.spec.layers)))
    assert chosen["full"]
    assert chosen["none"]
    assert chosen["prices"] == "FLOPs"
    assert 0 < max(record.peak_memory_bytes or []) <= budget * 2**30
    assert f"full: layers {chosen['full'][0]}" in capfd.readouterr().out
    ways = Recomputation(full=tuple(chosen["full"]), operators=tuple(chosen["operators"]))
    counts, length = counts_of(described.hf, described.spec), cfg.data.sequence_length
    assert record.flops is not None
    assert record.flops["hardware_per_token"] == hardware_flops_per_token(counts, length, ways)


def test_a_mistake_of_the_formulas_is_a_note_of_a_run_that_is_done(folder, monkeypatch):
    def mistaken(*_: object) -> int:
        raise AssertionError("the layers have not been chosen")

    monkeypatch.setattr("shardwise.lab.planner.collectives.predicted_bytes", mistaken)
    cfg = config(folder, "mistaken", steps=1, global_batch_size=2, eval_every=0)
    record = run_on(1, replace_measure(cfg, memory=True, warmup_steps=0))
    assert record.status == "ok"
    assert record.peak_memory_bytes
    assert record.sent_bytes_by_formula is None
    assert any("the layers have not been chosen" in note for note in record.notes)
