"""The seconds of one micro-batch in each unit of a model.

On this machine a unit's products are looked up by shape, and the rest of it is priced by its kind,
as calibrated. On a preset both are rooflines with stated efficiencies (docs/guides/calibrating.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import NamedTuple

from shardwise.assembly.describe import Description
from shardwise.base.layouts import num_microbatches, num_strategy_ranks
from shardwise.config import RunConfig
from shardwise.lab.planner.cluster import Cluster, efficiency
from shardwise.lab.planner.traffic import DIRECTIONS, Direction, passes
from shardwise.lab.planner.unit_work import Product, RestQuantities, UnitWork, work_of_units
from shardwise.lab.planner.weights import shapes_of
from shardwise.models.dtypes import hidden_dtype, product_dtype
from shardwise.parallel.strategies import strategy_of


class UnitSeconds(NamedTuple):
    """The seconds of one micro-batch in a unit."""

    forward: float
    backward: float
    recomputed: float
    elementwise: float
    """Elementwise operators, which these three count too."""
    weight_gradients: float
    """The gradients of trained weights, which the backward counts too."""
    host_forward: float = 0.0
    """The host of a GPU queues the forward, beside what the GPU does; 0 if that is not known."""
    host_backward: float = 0.0
    """The same for the backward and what is computed again in it."""

    @property
    def total(self) -> float:
        """The seconds of a micro-batch."""
        return self.forward + self.backward + self.recomputed


def between(alone: UnitSeconds, together: UnitSeconds, share: float) -> UnitSeconds:
    """Return the seconds while other ranks are busy for this share of the time."""
    return UnitSeconds(*(a + share * (b - a) for a, b in zip(alone, together, strict=True)))


class PassSeconds(NamedTuple):
    """The seconds of a pass."""

    computed: float
    """Products and cores."""
    elementwise: float


def seconds_of_units(
    cfg: RunConfig, run: Description, cluster: Cluster, num_busy: int
) -> list[UnitSeconds]:
    """Return the seconds of every unit while so many ranks are busy.

    Layers that are alike are priced once.
    """
    # The first micro-batch has no gradient yet to add its own to.
    share_added = 1 - 1 / num_microbatches(cfg, prod(run.sizes.values()))
    shards, expert_shards = _shards_added(cfg, run)
    price = _roofline if cluster.calibration is None else _measured
    priced: dict[int, UnitSeconds] = {}
    units = []
    works = work_of_units(cfg, run.hf, run.spec, _shapes(cfg, run))
    undivided, tp = works, 1
    if cluster.calibration is None and cfg.parallel.sequence_parallel:
        # Each rank of tp has its share of all that lies between products.
        tp = cfg.parallel.tp
        without = replace(cfg, parallel=replace(cfg.parallel, tp=1, sequence_parallel=False))
        undivided = work_of_units(without, run.hf, run.spec, _shapes(without, run))
    for work, whole in zip(works, undivided, strict=True):
        if id(work) not in priced:
            elements = whole.rest_forward.elements / tp
            again, backward = work.rest_again, work.rest_backward
            others = backward.trained - work.trained_experts
            added = share_added * (others / shards + work.trained_experts / expert_shards)
            in_step = replace(
                work,
                rest_forward=work.rest_forward._replace(elements=elements),
                rest_backward=backward._replace(elements=elements, trained=added),
                rest_again=again._replace(elements=elements) if again.calls else again,
            )
            priced[id(work)] = price(cfg, run.spec.family, cluster, num_busy, in_step)
        units.append(priced[id(work)])
    return units


def _shapes(cfg: RunConfig, run: Description) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the matrices of a rank's products.

    They are the same in whatever form `model.base` stores them, and a tied one is there twice.
    """
    shapes = shapes_of(replace(cfg, model=replace(cfg.model, base="none")), run)
    if run.spec.tied:
        shapes[f"{run.spec.head}.weight"] = shapes[f"{run.spec.embed}.weight"]
    return shapes


def _shards_added(cfg: RunConfig, run: Description) -> tuple[int, int]:
    """Return among how many ranks a gradient is divided that is added up, and one of an expert.

    It is added up whole where it is not reduced after each backward.
    """
    parallel = cfg.parallel
    if not strategy_of(cfg).reduces_each(parallel.pp):
        return 1, 1
    number = num_strategy_ranks(cfg, run.sizes)
    return number, number // parallel.ep


def _measured(
    cfg: RunConfig, family: str, cluster: Cluster, num_busy: int, work: UnitWork
) -> UnitSeconds:
    """Return the seconds of a unit on a machine as it is calibrated."""
    calibration = cluster.calibration
    assert calibration is not None
    speeds = calibration.for_busy(num_busy)

    def seconds(products: Sequence[Product], direction: Direction, rest: RestQuantities) -> float:
        in_products = sum(map(speeds.product_seconds, products))
        amounts = amounts_of(cfg, family, calibration.device, work.key, direction, rest)
        result = in_products + speeds.rest_seconds(work.key, direction, amounts)
        if calibration.device == "cuda":  # which was measured with weights in bfloat16
            result += _cast_bytes(cfg, work, products, rest) / cluster.device.memory_bandwidth
        return result

    read_back = _read_back(cfg, cluster, work)
    host_forward, host_backward = (speeds.host_seconds(work.key, of) for of in DIRECTIONS)
    return UnitSeconds(
        forward=seconds(work.forward, "forward", work.rest_forward) + read_back,
        backward=work.has_backward
        * (seconds(work.backward, "backward", work.rest_backward) + read_back),
        recomputed=seconds(work.again, "forward", work.rest_again)
        + (work.way == "full") * read_back,
        elementwise=0.0,
        weight_gradients=work.has_backward
        * sum(map(speeds.product_seconds, work.weight_gradients)),
        host_forward=host_forward,
        host_backward=work.has_backward * host_backward + (work.way != "none") * host_forward,
    )


def _roofline(
    cfg: RunConfig, family: str, cluster: Cluster, num_busy: int, work: UnitWork
) -> UnitSeconds:
    """Return the seconds of a unit by a datasheet's figures; `num_busy` does not matter."""
    device, dtype, hidden = cluster.device, product_dtype(cfg), hidden_dtype(cfg)
    bandwidth = device.memory_bandwidth * efficiency("memory")
    rate = device.rate(dtype) * efficiency("core")

    def seconds(
        products: Sequence[Product], direction: Direction, rest: RestQuantities
    ) -> PassSeconds:
        in_products = sum(_product_seconds(cfg, cluster, product) for product in products)
        times = passes(cfg, family, work.key, direction)
        moved = 2 * times * rest.elements * dtype.itemsize
        moved += _cast_bytes(cfg, work, products, rest)
        # A gradient is read, added to a sum, and the sum is written.
        moved += 3 * rest.trained * hidden.itemsize
        return PassSeconds(in_products + rest.core_flops / rate, moved / bandwidth)

    read_back = _read_back(cfg, cluster, work)
    none = PassSeconds(0.0, 0.0)
    forward = seconds(work.forward, "forward", work.rest_forward)
    backward = again = none
    if work.has_backward:
        backward = seconds(work.backward, "backward", work.rest_backward)
        again = seconds(work.again, "forward", work.rest_again)
    return UnitSeconds(
        forward=sum(forward) + read_back,
        backward=sum(backward) + read_back * work.has_backward,
        recomputed=sum(again) + read_back * (work.way == "full"),
        elementwise=forward.elementwise + backward.elementwise + again.elementwise,
        weight_gradients=work.has_backward
        * sum(_product_seconds(cfg, cluster, product) for product in work.weight_gradients),
    )


def amounts_of(
    cfg: RunConfig, family: str, device: str, key: str, direction: Direction, rest: RestQuantities
) -> RestQuantities:
    """Return what a calibration prices of the rest of a unit.

    On a GPU elements count in bytes, as often as elementwise operators move them, and so do trained
    weights, so that a price holds for other dtypes and kinds of layers than were measured.
    """
    if device == "cpu":
        return rest
    moved = passes(cfg, family, key, direction) * product_dtype(cfg).itemsize
    trained = rest.trained * hidden_dtype(cfg).itemsize
    return rest._replace(elements=moved * rest.elements, trained=trained)


def _cast_bytes(
    cfg: RunConfig, work: UnitWork, products: Sequence[Product], rest: RestQuantities
) -> float:
    """Return the bytes that autocast moves in a pass: it reads each matrix and writes it in the
    dtype of products.

    In a backward LoRA's kernels do so again, and gradients of trained matrices go back. A chunked
    loss has no products, and no casts, in its backward.
    """
    dtype, hidden = product_dtype(cfg), hidden_dtype(cfg)
    is_cast = bool(products) or (rest.calls > 0 and work.way == "operators")
    return is_cast * (hidden.itemsize + dtype.itemsize) * work.matrices * (hidden != dtype)


def _read_back(cfg: RunConfig, cluster: Cluster, work: UnitWork) -> float:
    """Return the seconds in which stored matrices are read and written in the dtype of products."""
    form = 0.5 if cfg.model.base.startswith("nf4") else 1.0
    moved = work.stored * (form + product_dtype(cfg).itemsize)
    share = 1.0 if cluster.calibration else efficiency("memory")
    return moved / (cluster.device.memory_bandwidth * share)


def _product_seconds(cfg: RunConfig, cluster: Cluster, product: Product) -> float:
    rows, inner, columns = product.rows, product.inner, product.columns
    rate = cluster.device.rate(product_dtype(cfg)) * efficiency("product")
    flops = 2 * rows * inner * columns / rate
    moved = product_dtype(cfg).itemsize * (rows * inner + inner * columns + rows * columns)
    traffic = moved / (cluster.device.memory_bandwidth * efficiency("memory"))
    return product.times * max(flops, traffic)
