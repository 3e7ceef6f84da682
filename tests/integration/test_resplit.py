"""A pipeline whose layers move while it trains: its curve goes on, and it can be resumed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from shardwise.assembly.describe import Description
from shardwise.base.records.record import RunRecord
from shardwise.config import Parallel, RunConfig
from shardwise.models.stage import Stage
from shardwise.parallel.pipeline_stage import Clock
from shardwise.training import resplit
from tests.distributed import run_ranks
from tests.integration.test_train import config, replace_measure, run, run_on
from tests.parity.harness import CONFIGS

STEPS, MOVED = 7, 3
"""The first comparison comes after a step of warm-up and two more, the second after three more."""
LAYER_SECONDS = 1000.0
"""Of a layer's forward, by the clock of these tests. What a move costs is real time, far less."""


def small(folder: Path, name: str, **training: Any) -> RunConfig:
    """A run of a model with 4 layers."""
    cfg = config(
        folder,
        name,
        **{"steps": STEPS, "micro_batch_size": 1, "eval_every": STEPS},
        **{"global_batch_size": 4, "save_every": 4, **training},
    )
    model = replace(cfg.model, path=str(CONFIGS / "tiny-llama"))
    return replace(replace_measure(cfg, warmup_steps=1), model=model)


def by_own_clock(cfg: RunConfig, slow: float, wrong: float) -> RunRecord | None:
    """Run `cfg` on this rank, by a clock that only the forwards of layers move on.

    A layer of the last stage takes `slow` times LAYER_SECONDS. The costs of layer 0 are taken to be
    `wrong` times what they are.
    """
    seconds, forward, costs = 0.0, Stage.forward, Description.costs

    def slowed(stage: Stage, *args: Any, **kwargs: Any) -> Any:
        nonlocal seconds
        is_last = 2 * dist.get_rank() >= dist.get_world_size()
        seconds += len(stage.spec.layers) * LAYER_SECONDS * (slow if is_last else 1)
        return forward(stage, *args, **kwargs)

    def now(clock: Clock) -> float:
        return seconds

    def mistaken(*args: Any) -> Any:
        (embedding, first, *others), source = costs(*args)
        times = {
            key: value * wrong for key, value in vars(first).items() if key.endswith("_seconds")
        }
        return (embedding, replace(first, **times), *others), source

    with (
        mock.patch.object(Stage, "forward", slowed),
        mock.patch.object(Clock, "now", now),
        mock.patch.object(Description, "costs", mistaken),
        mock.patch.object(resplit, "FIRST_STEPS", MOVED - 1),
    ):
        return run(cfg)


@pytest.mark.parametrize(
    ("slow", "wrong", "before", "after", "data"),
    [
        pytest.param(3.0, 1.0, [2, 2], [3, 1], "single", id="a slow rank"),
        pytest.param(3.0, 1.0, [2, 2], [3, 1], "zero1", id="shards of states move"),
        pytest.param(1.0, 10.0, [1, 3], [2, 2], "single", marks=pytest.mark.slow, id="wrong costs"),
    ],
)
def test_layers_move_and_the_curve_goes_on(folder, slow, wrong, before, after, data):
    replicas = 2 if data == "zero1" else 1
    rows = {"global_batch_size": 4 * replicas}
    single = run_on(1, small(folder, f"single-{slow:g}-{data}", **rows))
    cfg = small(folder, f"slow-{slow:g}-{data}", **rows)
    cfg = replace(cfg, parallel=Parallel(data, pp=2, split="dynamic"))
    record, *_ = run_ranks(2 * replicas, by_own_clock, cfg, slow, wrong)
    # Ranks add up the norm that clips gradients, which rounds otherwise.
    assert record.losses == pytest.approx(single.losses, rel=1e-6)
    for mine, theirs in zip(record.eval, single.eval, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-6)
    (move,) = record.resplits
    assert (move["step"], move["layers_before"], move["layers"]) == (MOVED, before, after)
    assert record.pipeline["layers"] == after
    # Four micro-batches, and nothing takes time but the forwards of layers.
    busy = [4 * LAYER_SECONDS * layers for layers in (before[0], slow * before[1])]
    assert (move["busy_seconds"], move["step_seconds"]) == (busy, max(busy))
    assert move["measured_seconds"] == 4 * LAYER_SECONDS * max(after[0], slow * after[1])
    assert max(move["measured_seconds"], move["expected_seconds"]) < move["step_seconds"]
    assert move["moved_bytes"] > 0
    lines = (Path(cfg.training.output_dir) / "metrics.jsonl").read_text().splitlines()
    (written,) = (row["resplit"] for row in map(json.loads, lines) if "resplit" in row)
    assert written == {key: value for key, value in move.items() if key != "measured_seconds"}
    # What was saved after the move resumes on one process, and keeps the history.
    checkpoint = Path(cfg.training.output_dir) / "checkpoints" / "step-4"
    again = run_on(1, small(folder, f"resumed-{slow:g}-{data}", resume=str(checkpoint), **rows))
    assert again.losses == pytest.approx(single.losses, rel=1e-6)
    assert again.resplits == [written]
