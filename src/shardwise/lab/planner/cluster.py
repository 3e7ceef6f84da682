"""Devices, links, and clusters of equal nodes: presets, or this machine as it was measured."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import yaml

from shardwise.config import UserError, require
from shardwise.config.run_file import read_yaml
from shardwise.lab.planner import HERE
from shardwise.lab.planner.calibration import Calibration, calibration_here
from shardwise.metrics.hardware import published_flops

BASE_LATENCY = 8.4e-6
"""Seconds before the first step of a collective: NCCL's own figure (src/graph/tuning.cc)."""
MOST_DEVICES = 1_000_000
"""More than any cluster has; a search takes longer the more numbers divide them."""


@dataclass(frozen=True)
class Device:
    """A device and what its datasheet says."""

    name: str
    memory_bytes: int
    flops: dict[str, float]
    """Dense FLOP/s by dtype."""
    memory_bandwidth: float
    """Bytes per second."""
    source: str
    """The datasheet."""
    assumed: Mapping[str, float] = field(default_factory=lambda: _table()["assumed"]["any"])
    """Shares of these figures that a run reaches, as `devices.yaml` says of this kind of device."""

    @property
    def reached_bandwidth(self) -> float:
        """Bytes per second that a long copy reads and writes."""
        return self.memory_bandwidth * self.assumed["memory"]

    def rate(self, dtype: torch.dtype) -> float:
        """Return the FLOP/s in a dtype, or those in float32 where it has none of its own."""
        return self.flops.get(str(dtype).removeprefix("torch."), self.flops["float32"])


@dataclass(frozen=True)
class Link:
    """The link that joins ranks: bus bandwidth as nccl-tests define it, in bytes per second and
    rank.
    """

    bandwidth: float
    latency: float
    """Seconds of a step: from one rank to the next one of a ring or tree."""


@dataclass(frozen=True)
class Cluster:
    """Equal nodes of equal devices."""

    device: Device
    per_node: int
    nodes: int
    inside: Link
    between: Link
    host: Link
    """The link between a device and the memory of its host."""
    calibration: Calibration | None = None
    """The measures of this machine; None for a preset."""

    @property
    def num_devices(self) -> int:
        """All devices."""
        return self.per_node * self.nodes

    def link_of(self, span: int, ports: int = 1) -> Link:
        """Return the slowest link among any so many neighbouring ranks.

        `ports`: the ranks of a node that send to other nodes at the same time, each through a port
        of its own.
        """
        if self._is_inside(span):
            return self.inside
        bandwidth = min(ports * self.between.bandwidth, self.inside.bandwidth)
        return Link(bandwidth, self.between.latency)

    def latency(self, kind: str, num_ranks: int, span: int) -> float:
        """Return the seconds of a collective beyond those of its bytes.

        A ring of n ranks gathers or scatters in n - 1 steps, some of them between nodes. A sum goes
        twice round the ring, or up and down a tree of nodes. Others take one step. NCCL chooses its
        algorithms by the same model (github.com/NVIDIA/nccl, src/graph/tuning.cc).
        `span`: see `link_of`.
        """
        num_nodes = 1 if self._is_inside(span) else min(num_ranks, max(2, span // self.per_node))
        ring = (num_ranks - num_nodes) * self.inside.latency
        ring += (num_nodes - 1) * self.between.latency
        if kind.startswith(("all-gather", "reduce-scatter")):
            return BASE_LATENCY + ring
        if kind == "all-reduce":
            depth = (num_nodes - 1).bit_length()
            tree = (num_ranks / num_nodes - 1) * self.inside.latency + depth * self.between.latency
            return BASE_LATENCY + 2 * min(ring, tree)
        return BASE_LATENCY + (self.inside if num_nodes == 1 else self.between).latency

    def _is_inside(self, span: int) -> bool:
        """Return whether any so many neighbouring ranks are in one node."""
        return self.nodes == 1 or (span <= self.per_node and self.per_node % span == 0)


def cluster_of(devices: str, nodes: int = 1, link: str | None = None) -> Cluster:
    """Return a cluster of nodes such as `8xH100-80GB`, or of `here`: this machine, as calibrated.

    A device that has no name may be given as a YAML file of its figures, such as `8xcard.yaml`.
    `link`: a network such as `400Gbps` joins nodes, any other link the devices of a node. UserError
    for a name that is not known, or where this machine was not calibrated.
    """
    require(nodes >= 1, f"--nodes is {nodes}; give at least 1")
    table = _table()
    if link is not None and link not in table["links"]:
        raise UserError(f"--link {link[:80]} is not known; give one of {', '.join(table['links'])}")
    if devices == HERE:
        require(link is None, f"--link {link}: the links of {HERE} are measured; leave --link out")
        return _here(nodes)
    match = re.fullmatch(r"(?:(\d{1,5})x)?([\w-]+|.+\.ya?ml)", devices)
    row = _row(match[2] if match else devices)
    if match is None or row is None:
        name = (match[2] if match else devices).upper()
        meant = [known for known in table["devices"] if known.upper().startswith(name)]
        meant = meant or get_close_matches(name, table["devices"], 1)
        raise UserError(
            f"--devices {devices[:80]} is not known"
            + (f" (did you mean {' or '.join(meant)}?)" if meant else "")
            + f"; give {HERE}, or a number and one of {', '.join(table['devices'])}, such as "
            "8xH100-80GB, or a YAML file of its figures (docs/concepts/planning.md)"
        )
    number = int(match[1] or 1)
    require(number >= 1, f"--devices {devices}: give at least one device")
    require(
        number * nodes <= MOST_DEVICES,
        f"--devices {devices} on {nodes:,} nodes are {number * nodes:,} devices; give at most "
        f"{MOST_DEVICES:,}",
    )
    inside, between = row["inside"], "400Gbps"
    if link is not None and table["links"][link].get("network"):
        require(
            nodes > 1,
            f"--link {link} joins nodes, and there is one; give --nodes, or a link within a node "
            "such as PCIe4",
        )
        between = link
    elif link is not None:
        inside = link
    inner, outer, host = map(_link, (inside, between, row["host"]))
    return Cluster(_device(row), number, nodes, inner, outer, host)


def efficiency(part: str) -> float:
    """Return the share of a figure that a run is assumed to reach, whatever the device."""
    return _table()["assumed"]["any"][part]


def preset_of(torch_name: str) -> str | None:
    """Return the name of the preset of a device, by torch's name of it."""
    rows = _table()["devices"].items()
    return next((name for name, row in rows if row.get("torch_name") == torch_name), None)


@cache
def _table() -> dict[str, Any]:
    return yaml.safe_load(Path(__file__).with_name("devices.yaml").read_text(encoding="utf-8"))


def _row(name: str) -> dict[str, Any] | None:
    """Return what the table or the user's file says of a device, None if there is neither."""
    if name.endswith((".yaml", ".yml")):
        return {"name": Path(name).stem, "source": name} | _own_figures(name)
    names = {known.lower(): known for known in _table()["devices"]}
    known = names.get(name.lower())
    return None if known is None else {"name": known} | _table()["devices"][known]


def _own_figures(path: str) -> dict[str, Any]:
    import pydantic  # late: names of devices do not need it

    def figure(least: float) -> Any:
        return Annotated[float, pydantic.Field(ge=least, allow_inf_nan=False, strict=True)]

    dtypes: Any = Literal["bfloat16", "float16", "float32"]
    links: Any = Literal.__getitem__(tuple(_table()["links"]))
    keys: dict[str, Any] = {
        "gib": (figure(0.1), ...),
        "memory_bandwidth": (figure(1e8), ...),
        "flops": (dict.__class_getitem__((dtypes, figure(1e9))), ...),
        **dict.fromkeys(("inside", "host"), (links, "PCIe4")),
        "source": (str, path),
    }
    form: Any = pydantic.create_model("Figures", __config__={"extra": "forbid"}, **keys)
    try:
        row = form(**read_yaml(path, "give gib, memory_bandwidth and flops of a device"))
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))[:80]
        raise UserError(
            f"{path}: {place}: {first['msg'][:200]}; give gib, memory_bandwidth in bytes/s and "
            "flops in FLOP/s by dtype, such as {float32: 3.6e+13, bfloat16: 7.1e+13}"
        ) from None
    require("float32" in row.flops, f"{path}: flops has no float32; add its FLOP/s")
    return row.model_dump()


def _device(row: dict[str, Any]) -> Device:
    flops = row.get("flops") or published_flops(row["torch_name"])
    gib = int(row["gib"] * 2**30)
    table = _table()["assumed"]
    assumed = table["any"] | (table[row["kind"]] if "kind" in row else {})
    return Device(row["name"], gib, flops, row["memory_bandwidth"], row["source"], assumed)


def _link(name: str) -> Link:
    row = _table()["links"][name]
    return Link(row["bandwidth"] * efficiency("link"), row["latency"])


def _here(nodes: int) -> Cluster:
    require(nodes == 1, f"--nodes is {nodes}: --devices {HERE} is one machine; leave --nodes out")
    calibration = calibration_here()
    rate, name = calibration.best_rate, calibration.environment["device"]
    is_gpu = calibration.device == "cuda"
    device = Device(
        HERE,
        calibration.memory_bytes,
        {"bfloat16": rate, "float16": rate} if is_gpu else {"float32": rate},
        calibration.memory_bandwidth,
        "measured by shardwise calibrate",
    )
    # By links layouts are compared roughly, before messages are priced as measured.
    links = {"inside": "loopback", "host": "loopback"}
    if is_gpu:
        preset = preset_of(name)
        links = _table()["devices"][preset] if preset else {"inside": "PCIe4", "host": "PCIe4"}
    inside, host = (_link(links[side]) for side in ("inside", "host"))
    return Cluster(device, calibration.num_processes, 1, inside, inside, host, calibration)
