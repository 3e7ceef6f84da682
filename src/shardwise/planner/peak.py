"""The most memory that a rank needs in a step: a stand-in by units' costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from shardwise.assembly.costs import choose_split, counted_costs
from shardwise.assembly.describe import Description
from shardwise.config import RunConfig
from shardwise.planner.units import shard_axis
from shardwise.schedule.simulate import in_flight

_COSTS: dict[object, Any] = {}


def stand_in_costs(cfg: RunConfig, run: Description):
    """Return counted costs, kept by what they depend on."""
    training = cfg.training
    key = (id(run.hf), training.micro_batch_size, str(training.checkpointing), cfg.parallel.cp)
    key += (cfg.parallel.schedule, cfg.data.sequence_length, training.precision)
    if key not in _COSTS:
        _COSTS[key] = run.hf, counted_costs(cfg, run.hf, run.spec)
    return _COSTS[key][1]


@dataclass(frozen=True)
class Memory:
    """The bytes that are alive on a rank at the peak of a step."""

    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    buffers: int = 0
    temporary: int = 0
    overhead: int = 0
    moment: str = ""

    @property
    def total(self) -> int:
        """All bytes."""
        return sum(size for part, size in asdict(self).items() if part != "moment")


def memory_of_run(cfg: RunConfig, run: Description) -> Memory:
    """Return the memory of the rank with the most."""
    units = stand_in_costs(cfg, run)
    boundaries = None
    if run.pipeline is not None:
        boundaries = choose_split(cfg, units, run.pipeline.num_microbatches).boundaries
    first = dict.fromkeys(run.sizes, 0)
    ranks = [first | {"pp": stage} for stage in range(run.sizes["pp"])]
    memories = [memory_of_rank(cfg, run, rank, boundaries) for rank in ranks]
    return max(memories, key=lambda memory: memory.total)


def memory_of_rank(
    cfg: RunConfig,
    run: Description,
    coordinates: Mapping[str, int],
    boundaries: Sequence[int] | None = None,
) -> Memory:
    """Return the memory of the rank at these coordinates."""
    units = stand_in_costs(cfg, run)
    mine, most = list(units), 1
    if run.pipeline is not None:
        assert boundaries is not None
        chunks = list(run.pipeline.chunks_of(coordinates["pp"]))
        mine = [u for c in chunks for u in units[boundaries[c] : boundaries[c + 1]]]
        most = max(in_flight(run.pipeline)[c] for c in chunks)
    tp, data = run.sizes["tp"], cfg.parallel.data
    shards = run.sizes[shard_axis(cfg)] if data != "single" else 1
    weights = sum(u.weight_bytes for u in mine) // tp
    gradients = sum(u.gradient_bytes for u in mine) // tp
    optimizer = sum(u.optimizer_bytes for u in mine) // tp
    largest = max(u.weight_bytes for u in mine) // tp
    is_fsdp = data in ("fsdp1", "fsdp2")
    return Memory(
        weights=weights // shards if is_fsdp else weights,
        gradients=gradients // shards if is_fsdp or data == "zero2" else gradients,
        optimizer=optimizer // shards if data not in ("single", "ddp") else optimizer,
        activations=sum(u.activation_bytes for u in mine) * most // tp,
        buffers=(2 * largest if cfg.parallel.reshard_after_forward else weights) if is_fsdp else 0,
        temporary=8 * max(u.output_bytes for u in mine),
        overhead=2**30,
        moment="backward of the head",
    )
