"""The seconds of a training step: a stand-in by FLOPs at 40 % of the peak and bytes over links."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from math import prod

from shardwise.assembly.describe import Description
from shardwise.config import RunConfig
from shardwise.layouts import num_microbatches
from shardwise.planner.cluster import Cluster
from shardwise.planner.peak import stand_in_costs


@dataclass(frozen=True)
class StepTime:
    """The seconds of a step by part."""

    layers: float = 0.0
    head: float = 0.0
    recomputation: float = 0.0
    communication: float = 0.0
    bubble: float = 0.0
    optimizer: float = 0.0
    data: float = 0.0
    hidden_communication: float = 0.0

    @property
    def total(self) -> float:
        """All that adds up to the step."""
        return sum(s for part, s in asdict(self).items() if part != "hidden_communication")


def time_of_step(
    cfg: RunConfig, run: Description, cluster: Cluster, boundaries: Sequence[int] | None = None
) -> StepTime:
    """Return the seconds of a step."""
    num_ranks = prod(run.sizes.values())
    rate = 0.4 * cluster.device.flops["bfloat16"]
    units = [
        replace(
            u,
            forward_seconds=u.forward_seconds / rate,
            input_seconds=u.input_seconds / rate,
            weight_seconds=u.weight_seconds / rate,
        )
        for u in stand_in_costs(cfg, run)
    ]
    m, pp, tp = num_microbatches(cfg, num_ranks), run.sizes["pp"], run.sizes["tp"]
    each = m / (pp * tp)
    layers = each * sum(u.seconds for u in units[:-1])
    head = each * units[-1].seconds
    bubble = (layers + head) * (pp - 1) / (m * cfg.parallel.num_virtual)
    hidden = units[1].output_bytes * len(units) * m / pp
    inside = cluster.inside if tp <= cluster.per_node else cluster.between
    exposed = 4 * hidden * (tp - 1) / tp / inside.bandwidth
    num_data = run.sizes["dp_shard"] * run.sizes["dp_replicate"]
    link = cluster.inside if num_ranks <= cluster.per_node else cluster.between
    weights = sum(u.weight_bytes for u in units) / (tp * pp)
    times = 3 * m if cfg.parallel.data == "fsdp2" else 2
    gathered = weights * times * (num_data - 1) / num_data / link.bandwidth
    visible = max(0.0, gathered - layers)
    return StepTime(layers, head, 0.0, exposed + visible, bubble, 0.01, 0.0, gathered - visible)
