"""A pipeline whose layers move while it trains: it goes on as one process does, and saves itself."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from shardwise.assembly import build as assembly
from shardwise.config import Parallel, RunConfig
from shardwise.models.stage import Stage
from shardwise.parallel.pipeline_stage import Clock
from shardwise.records.record import RunRecord
from tests.distributed import run_ranks
from tests.integration.test_train import config, replace_measure, run

STEPS = 12
LAYER_SECONDS = 1000.0
"""Of a layer's forward, by the clock of these tests: what a move costs is real, and far less."""


def pipeline(folder: Path, name: str, **training: Any) -> RunConfig:
    """Return a run of 4 layers that two ranks share evenly by FLOPs."""
    cfg = replace_measure(config(folder, name, steps=STEPS, **training), warmup_steps=1)
    return replace(cfg, parallel=Parallel(pp=2, split="dynamic"))


def timed(cfg: RunConfig, slow: dict[int, float], costs: Callable[..., Any] | None = None) -> Any:
    """Run `cfg` on this rank, by a clock that only the forwards of layers move on.

    `slow`: how many times LAYER_SECONDS a layer takes on a rank. `costs` stands in for `_costs`.
    """
    seconds, forward = 0.0, Stage.forward

    def slowed(part: Stage, *args: Any, **kwargs: Any) -> Any:
        nonlocal seconds
        seconds += len(part.spec.layers) * LAYER_SECONDS * slow.get(dist.get_rank(), 1.0)
        return forward(part, *args, **kwargs)

    with (
        mock.patch.object(Stage, "forward", slowed),
        mock.patch.object(Clock, "now", lambda clock: seconds),
        mock.patch.object(assembly, "_costs", costs or assembly._costs),
    ):
        return run(cfg)


def test_x(folder):
    single = run_ranks(1, run, config(folder, "single", steps=STEPS))[0]
    cfg = pipeline(folder, "slow", save_every=4)
    record, _ = run_ranks(2, timed, cfg, {1: 3.0})
    print([a - b for a, b in zip(record.losses, single.losses)])
    print(record.resplits, record.pipeline["layers"])
    for line in (folder/"slow"/"metrics.jsonl").read_text().splitlines(): print(line[:300])
