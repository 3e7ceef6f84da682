"""Whole runs with tensor parallelism: alone, in a pipeline, and what their records say."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import yaml

from shardwise.base.records.record import RunRecord
from shardwise.commands.cli import main
from shardwise.config import Parallel
from tests.integration.test_train import config, replace_measure, run_on
from tests.notes import beside_random_base

PROMPT = "the state of"
STEPS = 3
"""One more than those of the warm-up, after which rates are measured."""


@pytest.fixture(scope="module")
def single(folder) -> RunRecord:
    return run_on(1, config(folder, "single", steps=STEPS, sample=PROMPT))


@pytest.fixture(scope="module")
def noise(folder) -> RunRecord:
    return run_on(
        1, replace_measure(config(folder, "noise", steps=STEPS), reverse_microbatches=True)
    )


def follows(record: RunRecord, single: RunRecord, noise: RunRecord) -> None:
    """The curve, as in test_train, and all else that does not depend on the layout."""
    bound = max(1e-6, *(10 * abs(a - b) for a, b in zip(noise.losses, single.losses)))
    assert max(abs(a - b) for a, b in zip(record.losses, single.losses, strict=True)) <= bound
    assert math.isclose(record.losses[0], single.losses[0], rel_tol=1e-6)
    assert math.isclose(record.eval[0]["loss"], single.eval[0]["loss"], rel_tol=1e-6)
    assert [e["tokens"] for e in record.eval] == [e["tokens"] for e in single.eval]
    assert (record.sample, record.data) == (single.sample, single.data)
    assert record.parameters == single.parameters
    assert beside_random_base(record.notes) == ()


def rates(record: RunRecord, num_processes: int) -> None:
    """Each of 8 rows of 32 positions has a target, and counts once however many ranks compute it
    together."""
    positions_per_second = 8 * 32 / record.step_seconds["mean"]
    assert record.tokens_per_second == pytest.approx(positions_per_second)
    peak = record.flops["peak_per_second"] * num_processes
    assert record.mfu == pytest.approx(
        record.flops["model_per_token"] * positions_per_second / peak
    )


def test_a_run_with_shares_of_layers(folder, single, noise):
    """Through the command: tests/benchmark/test_runner.py."""
    cfg = replace_measure(config(folder, "tp", steps=STEPS, sample=PROMPT), memory=True)
    record = run_on(2, replace(cfg, parallel=Parallel(tp=2, sequence_parallel=True)))
    follows(record, single, noise)
    rates(single, 1)
    rates(record, 2)
    assert record.flops["model_per_token"] == single.flops["model_per_token"]
    assert record.mesh == {"pp": 1, "dp_replicate": 1, "dp_shard": 1, "cp": 1, "tp": 2}
    assert len(record.peak_memory_bytes) == len(record.state_bytes) == 2
    (held,) = {
        tuple(sorted(state.items())) for state in record.state_bytes
    }  # as much on either rank
    # Of 4-byte weights more than half, since norms and small factors are whole, but little more.
    whole = 4 * record.parameters["total"]
    assert whole / 2 < dict(held)["weights"] < 0.55 * whole


@pytest.mark.slow  # test_resume.py has both, one after the other
def test_a_pipeline_that_is_cut_by_costs_with_shares_of_layers(folder, single, noise):
    cfg = config(folder, "pp-tp", steps=STEPS, micro_batch_size=2, sample=PROMPT)
    record = run_on(4, replace(cfg, parallel=Parallel(pp=2, tp=2)))
    follows(record, single, noise)
    rates(record, 4)
    assert (record.mesh["pp"], record.mesh["tp"]) == (2, 2)
    assert record.pipeline["split"] == "balanced"
    assert sum(record.pipeline["layers"]) == 4
    assert record.pipeline["measured"]["seconds"] > 0


def test_a_split_is_for_one_copy_of_the_model(folder, tmp_path, capsys):
    cfg = config(folder, "unused")
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(json.loads(json.dumps(cfg.to_dict()))))
    assert main(["split", str(tmp_path / "run.yaml"), "--parallel.pp=2", "--parallel.tp=2"]) == 0
    shown = capsys.readouterr().out
    assert "those of whole layers, before 2 tensor-parallel ranks shard them" in shown
