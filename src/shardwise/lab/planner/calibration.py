"""Measures of a machine by `shardwise calibrate`: its file, and seconds looked up in it."""

import itertools
import json
import math
import statistics
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from shardwise.base.safety import cache_folder, write_output
from shardwise.config import UserError, require
from shardwise.lab.planner.unit_work import Product, RestQuantities
from shardwise.metrics.hardware import environment

SCHEMA_VERSION = 2
FACTORS = {
    "all-reduce": lambda n: 2 * (n - 1) / n,
    "all-gather": lambda n: (n - 1) / n,
    "all-gather of weights": lambda n: (n - 1) / n,
    "reduce-scatter": lambda n: (n - 1) / n,
    "reduce-scatter of weights": lambda n: (n - 1) / n,
    "all-to-all": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1.0,
    "reduce": lambda n: 1.0,
    "send": lambda n: 1.0,
    "exchange": lambda n: 1.0,
}
"""Bus bandwidth over algorithm bandwidth among n ranks, as NVIDIA's nccl-tests define them
(doc/PERFORMANCE.md). Those "of weights" have the copies of FSDP and ZeRO in their seconds."""


LEAST_SECONDS = 1e-6
"""Seconds that a message adds to a step at least."""


@dataclass(frozen=True)
class Collective:
    """Seconds that a collective among `num_ranks`, on a tensor of `num_bytes` in all, adds to a
    step.
    """

    kind: str
    num_ranks: int
    num_bytes: int
    seconds: float

    @property
    def algorithm_bandwidth(self) -> float:
        """Bytes per second."""
        return self.num_bytes / self.seconds

    @property
    def bus_bandwidth(self) -> float:
        """Bytes per second of the busiest link, which compares kinds and numbers of ranks."""
        return self.algorithm_bandwidth * FACTORS[self.kind](self.num_ranks)


@dataclass(frozen=True)
class Speeds:
    """The speeds of a process while a number of processes are busy."""

    sizes: tuple[int, ...]
    """The rows, inner sizes and columns of the products that were measured."""
    products: Mapping[str, Any]
    """Seconds of products by pass: [rows, inner, columns], each over `sizes`."""
    units: Mapping[str, Mapping[str, Sequence[float]]]
    """Seconds per each number of `RestQuantities`, by a unit's key and `forward` or `backward`."""
    host: Mapping[str, Mapping[str, float]] = field(kw_only=True, default_factory=dict)
    """Seconds in which the host queues the work of a GPU, in the same way; a CPU is its own."""
    optimizer: Sequence[float]
    """Seconds per tensor, and per element, of the norm, clipping and AdamW."""

    def product_seconds(self, product: Product) -> float:
        """Return the seconds of a product: FLOPs over a rate that is interpolated in logarithms.

        Beyond the largest size that was measured the rate is that of this one.
        """
        rates = self._rates[product.of]
        # One with fewer rows or columns than the smallest that was measured takes as long.
        rows, inner, columns = (max(size, self.sizes[0]) for size in product[1:4])
        places = [self._place(size) for size in (rows, inner, columns)]
        rate = 0.0
        for corner in itertools.product((0, 1), repeat=3):
            share = math.prod(
                weight if upper else 1 - weight
                for upper, (_, weight) in zip(corner, places, strict=True)
            )
            if share:
                index = tuple(low + up for up, (low, _) in zip(corner, places, strict=True))
                rate += share * rates[index]
        return product.times * 2.0 * rows * inner * columns / math.exp(rate)

    def rest_seconds(self, key: str, direction: str, rest: RestQuantities) -> float:
        """Return the seconds of a unit beyond its products; `direction`: forward or backward.

        A layer that was not calibrated takes the mean prices of those of its kind with another
        feed-forward, or else of all.
        """
        prices = np.mean([self.units[k][direction] for k in self._like(key)], axis=0)
        return float(prices @ np.array(rest))

    def host_seconds(self, key: str, direction: str) -> float:
        """Return the seconds in which the host queues a pass of a unit, whatever its size."""
        if not self.host:
            return 0.0
        return statistics.mean(self.host[k][direction] for k in self._like(key))

    def _like(self, key: str) -> list[str]:
        """Return the units by which one is priced: itself, those of its kind, or all layers."""
        if key in self.units:
            return [key]
        kind, mode = key.partition(", ")[0], key.rpartition(", ")[2]
        layers = [k for k in self.units if k.endswith(mode) and k.count(",") == 2]
        return [k for k in layers if k.startswith(f"{kind}, ")] or layers

    @cached_property
    def _rates(self) -> dict[str, Any]:
        sizes = np.array(self.sizes, dtype=float)
        flops = 2 * sizes[:, None, None] * sizes[None, :, None] * sizes[None, None, :]
        return {of: np.log(flops / np.array(table)) for of, table in self.products.items()}

    def _place(self, size: float) -> tuple[int, float]:
        """Return the measured size below, and how far in logarithms it is to the next one."""
        size = min(max(size, self.sizes[0]), self.sizes[-1])
        low = min(bisect_right(self.sizes, size), len(self.sizes) - 1) - 1
        step = math.log(self.sizes[low + 1] / self.sizes[low])
        return low, math.log(size / self.sizes[low]) / step


@dataclass(frozen=True)
class Calibration:
    """A machine, as it was measured."""

    environment: Mapping[str, Any]
    num_processes: int
    memory_bytes: int
    memory_bandwidth: float
    """Bytes per second that a copy reads and writes, while all processes copy."""
    speeds: Mapping[int, Speeds]
    """Values by the number of processes that are busy."""
    collectives: tuple[Collective, ...]
    jitter: float
    """Seconds that a rank waits for others per second of computing."""
    device: Literal["cpu", "cuda"] = "cpu"
    """The device that computes in a process: a core, or a GPU."""
    dtype: str = "float32"
    """The dtype of the products and layers that were measured."""

    @property
    def best_rate(self) -> float:
        """FLOP/s of the fastest product, while all processes are busy."""
        rates = self.for_busy(self.num_processes)._rates.values()
        return float(max(np.exp(table).max() for table in rates))

    def for_busy(self, num_ranks: int) -> Speeds:
        """Return the speeds while so many ranks, or as many as were measured, are busy."""
        return self.speeds[max(n for n in self.speeds if n <= max(1, num_ranks))]

    def message_seconds(self, kind: str, num_ranks: int, num_bytes: float) -> float:
        """Return the seconds of a collective: a latency, and bytes over a bandwidth.

        UserError for more ranks than were measured.
        """
        require(
            (kind, num_ranks) in self._lines,
            f"{kind} among {num_ranks} ranks was not measured on this machine; "
            f"run shardwise calibrate --nproc {num_ranks}",
        )
        latency, per_byte = self._lines[kind, num_ranks]
        return latency + per_byte * num_bytes

    @cached_property
    def _lines(self) -> dict[tuple[str, int], list[float]]:
        """The latency and seconds per byte of each kind, which are least percent off."""
        rows: dict[tuple[str, int], list[Collective]] = defaultdict(list)
        for row in self.collectives:
            rows[row.kind, row.num_ranks].append(row)
        lines = {}
        for key, key_rows in rows.items():
            # Of a message at the floor it is only known that it was lost in noise.
            told = [row for row in key_rows if row.seconds > LEAST_SECONDS] or key_rows
            amounts = np.array([(1.0, row.num_bytes) for row in told])
            seconds = np.array([[row.seconds] for row in told])
            lines[key] = prices_of(amounts / seconds, np.ones(len(told)))
        return lines


def prices_of(amounts: np.ndarray, seconds: np.ndarray) -> list[float]:
    """Return the prices, none negative, by which amounts [points, kinds] best give the seconds.

    Squares of errors are summed. With so few kinds every set of them is tried.
    """
    num_kinds = amounts.shape[1]
    best, best_error = np.zeros(num_kinds), float((seconds**2).sum())
    for size in range(1, num_kinds + 1):
        for kinds in map(list, itertools.combinations(range(num_kinds), size)):
            scale = np.abs(amounts[:, kinds]).max(axis=0)
            if not scale.all():
                continue
            scaled, *_ = np.linalg.lstsq(amounts[:, kinds] / scale, seconds, rcond=None)
            prices = np.zeros(num_kinds)
            prices[kinds] = scaled / scale
            error = float(((amounts @ prices - seconds) ** 2).sum())
            if (scaled >= 0).all() and error < best_error:
                best, best_error = prices, error
    return best.tolist()


def default_path() -> Path:
    """Return the file of this machine in the user's cache."""
    return cache_folder() / "calibration.json"


def calibration_here() -> Calibration:
    """Return the calibration of this machine; UserError where there is none, or another's."""
    path = default_path()
    require(path.exists(), f"{path}: this machine was not measured; run shardwise calibrate")
    return read(path)


def write(calibration: Calibration, path: Path) -> None:
    """Write the file, all or nothing."""
    content = {"schema_version": SCHEMA_VERSION, **asdict(calibration)}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_output(path, json.dumps(content, indent=1) + "\n")


def read(path: Path) -> Calibration:
    """Return the calibration in a file; UserError if it is damaged or of another machine."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        assert content.pop("schema_version") == SCHEMA_VERSION, "another version"
        speeds = {int(number): _speeds(row) for number, row in content.pop("speeds").items()}
        collectives = tuple(Collective(**row) for row in content.pop("collectives"))
        calibration = Calibration(speeds=speeds, collectives=collectives, **content)
        measured = calibration.environment["device"]
        assert speeds, "it has no speeds"
    except (OSError, ValueError, AttributeError, KeyError, TypeError, AssertionError) as error:
        what = f"{path}: not a complete calibration ({type(error).__name__}: {error})"
        raise UserError(f"{what}; run shardwise calibrate again") from None
    here = "without a GPU"
    if calibration.device == "cpu" or torch.cuda.is_available():
        here = environment(torch.device(calibration.device))["device"]
    require(
        measured == here,
        f"{path}: measured on {measured}, this machine is {here}; run shardwise calibrate here",
    )
    return calibration


def _speeds(row: dict[str, Any]) -> Speeds:
    speeds = Speeds(**row)
    return replace(speeds, sizes=tuple(speeds.sizes))
