"""Devices and the links between them, as datasheets state them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from shardwise.config import UserError, require


@dataclass(frozen=True)
class Device:
    """A device and what its datasheet says."""

    name: str
    memory_bytes: int
    flops: dict[str, float]
    """Dense FLOP/s by dtype."""
    memory_bandwidth: float
    source: str


@dataclass(frozen=True)
class Link:
    """What joins ranks."""

    bandwidth: float
    """Bytes per second and rank."""
    latency: float
    """Seconds."""


@dataclass(frozen=True)
class Cluster:
    """Equal nodes of equal devices."""

    device: Device
    per_node: int
    nodes: int
    inside: Link
    between: Link
    calibration: Any = None

    @property
    def num_devices(self) -> int:
        """All devices."""
        return self.per_node * self.nodes


@cache
def _table() -> dict[str, Any]:
    return yaml.safe_load((Path(__file__).parent / "devices.yaml").read_text(encoding="utf-8"))


def cluster_of(devices: str, nodes: int = 1, link: str | None = None) -> Cluster:
    """Return the cluster of `8xH100-80GB`, so many such nodes, and a link such as `400Gbps`."""
    count, _, name = devices.rpartition("x")
    table = _table()
    known = name in table and (not count or (count.isdigit() and int(count) > 0))
    require(
        known, f"--devices {devices[:80]}: write them as 8xH100-80GB; known are {', '.join(table)}"
    )
    require(nodes >= 1, f"--nodes is {nodes}; give at least 1")
    row = table[name]
    device = Device(
        name, int(row["gib"] * 2**30), row["flops"], row["memory_bandwidth"], row["source"]
    )
    gigabits = 400.0
    if link is not None:
        match = re.fullmatch(r"(\d+(?:\.\d+)?)Gbps", link)
        if match is None:
            raise UserError(f"--link {link[:80]}: write it as 400Gbps")
        gigabits = float(match[1])
    between = Link(gigabits * 1e9 / 8, 10e-6)
    return Cluster(device, int(count or 1), nodes, Link(row["link"], 5e-6), between)
