"""What a unit of a model takes, measured: the peak's sums are tested apart from its formulas."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch

from shardwise.assembly.describe import describe
from shardwise.assembly.profiles import unit_keys
from shardwise.config import Parallel, RunConfig
from shardwise.interfaces import Mesh
from shardwise.metrics.memory import PeakMemory
from shardwise.models.activations import UnitMemory
from shardwise.models.spec import ModelSpec
from shardwise.planner.profile import make_bench

CPU = torch.device("cpu")


@dataclass
class MeasuredUnits:
    """A `unit_memory` that runs each distinct unit in this process, without its strategies."""

    mesh: Mesh
    known: dict[tuple[str, str], UnitMemory] = field(default_factory=dict)

    def __call__(
        self, cfg: RunConfig, hf: Any, spec: ModelSpec, unit_index: int, tp_rank: int = 0
    ) -> UnitMemory:
        """See `unit_memory`."""
        assert cfg.parallel.tp == cfg.parallel.cp == 1, "a unit is measured complete"
        rows = cfg.training.micro_batch_size
        alone = replace(
            cfg, parallel=Parallel(), training=replace(cfg.training, global_batch_size=rows)
        )
        run = describe(alone, 1)
        key = str(alone.to_dict()), unit_keys(run.hf, run.spec, "1f1b")[unit_index]
        if key not in self.known:
            self.known[key] = self._measured(alone, run, unit_index)
        return self.known[key]

    def _measured(self, cfg: RunConfig, run: Any, unit_index: int) -> UnitMemory:
        places = sorted({0, unit_index})
        bench = make_bench(cfg, self.mesh, run, places)
        place = len(places) - 1
        bench.backward(place, *bench.forward(place), halves=False)  # gradients are there now
        kept = bench.kept_bytes(place)
        with PeakMemory(CPU) as forward:
            carried, output = bench.forward(place)
        with PeakMemory(CPU) as backward:
            bench.backward(place, carried, output, halves=False)
        return UnitMemory(kept, forward.added_bytes(), backward.added_bytes())
