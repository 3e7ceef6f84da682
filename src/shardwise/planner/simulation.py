"""A second opinion on the peak by simulation: a stand-in that repeats the formulas."""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter

from shardwise.assembly.describe import describe
from shardwise.config import RunConfig
from shardwise.planner.peak import memory_of_run


@dataclass(frozen=True)
class Simulated:
    """The peak of one rank."""

    peak_bytes: int
    parts: dict[str, int]
    seconds: float


def simulate(cfg: RunConfig, num_ranks: int, rank: int) -> Simulated:
    """Return the peak of a rank."""
    start = perf_counter()
    memory = memory_of_run(cfg, describe(cfg, num_ranks))
    parts = {name: size for name, size in vars(memory).items() if name != "moment"}
    return Simulated(memory.total, parts, perf_counter() - start)
