"""The seconds of one micro-batch in each unit of a model.

On this machine a unit's products are looked up by shape, and the rest of it is priced by its kind,
as calibrated. On a preset both are rooflines with stated efficiencies (docs/guides/calibrating.md).
"""

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Literal, NamedTuple

from shardwise.assembly.describe import Description
from shardwise.base.layouts import num_microbatches, num_strategy_ranks
from shardwise.config import RunConfig
from shardwise.lab.planner.cluster import Cluster
from shardwise.lab.planner.unit_work import Product, RestQuantities, UnitWork, work_of_units
from shardwise.lab.planner.units import gradients_are_few, moves_of_unit
from shardwise.lab.planner.weights import shapes_of
from shardwise.models.activations import seen_by_units
from shardwise.models.alike import known
from shardwise.models.dtypes import hidden_dtype, product_dtype
from shardwise.parallel.strategies import strategy_of

Direction = Literal["forward", "backward"]
DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")


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
    calibration = cluster.calibration
    price = _roofline if calibration is None else _measured
    is_on_cpu = calibration is not None and calibration.device == "cpu"
    priced: dict[int, UnitSeconds] = {}
    units = []
    works = known(
        *(run.hf, ("work", seen_by_units(cfg, run.hf, run.spec), run.spec)),
        lambda: work_of_units(cfg, run.hf, run.spec, _shapes(cfg, run)),
    )
    for unit_index, work in enumerate(works):
        if id(work) not in priced:
            others = work.rest_backward.trained - work.trained_experts
            added = share_added * (others / shards + work.trained_experts / expert_shards)
            in_step = replace(work, rest_backward=work.rest_backward._replace(trained=added))
            if not is_on_cpu:
                in_step = in_bytes(cfg, run, unit_index, in_step)
            priced[id(work)] = price(cfg, cluster, num_busy, in_step)
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
    if not strategy_of(cfg).reduces_each(parallel.pp, gradients_are_few(run.hf, run.spec)):
        return 1, 1
    number = num_strategy_ranks(cfg, run.sizes)
    return number, number // parallel.ep


def _measured(cfg: RunConfig, cluster: Cluster, num_busy: int, work: UnitWork) -> UnitSeconds:
    """Return the seconds of a unit on a machine as it is calibrated."""
    calibration = cluster.calibration
    assert calibration is not None
    speeds = calibration.for_busy(num_busy)

    def seconds(products: Sequence[Product], direction: Direction, rest: RestQuantities) -> float:
        in_products = sum(map(speeds.product_seconds, products))
        return in_products + speeds.rest_seconds(work.key, direction, rest)

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


def _roofline(cfg: RunConfig, cluster: Cluster, num_busy: int, work: UnitWork) -> UnitSeconds:
    """Return the seconds of a unit by a datasheet's figures; `num_busy` does not matter."""
    device = cluster.device
    assumed, peak = device.assumed, device.rate(product_dtype(cfg))

    def seconds(
        products: Sequence[Product], direction: Direction, rest: RestQuantities
    ) -> PassSeconds:
        in_products = sum(_product_seconds(cfg, cluster, work, product) for product in products)
        in_cores = (
            rest.core_flops
            / peak
            * (
                work.attention_share / assumed[f"{work.attention}_{direction}"]
                + (1 - work.attention_share) / assumed[f"scan_{direction}"]
            )
        )
        # A gradient is read, added to a sum, and the sum is written.
        moved = rest.elements + 3 * rest.trained
        return PassSeconds(in_products + in_cores, moved / device.reached_bandwidth)

    read_back = _read_back(cfg, cluster, work)
    none = PassSeconds(0.0, 0.0)
    forward = seconds(work.forward, "forward", work.rest_forward)
    backward = again = none
    if work.has_backward:
        backward = seconds(work.backward, "backward", work.rest_backward)
        again = seconds(work.again, "forward", work.rest_again)
    host_forward, host_backward = (assumed["launch_seconds"] * number for number in work.launches)
    return UnitSeconds(
        forward=sum(forward) + read_back,
        backward=sum(backward) + read_back * work.has_backward,
        recomputed=sum(again) + read_back * (work.way == "full"),
        elementwise=forward.elementwise + backward.elementwise + again.elementwise,
        weight_gradients=work.has_backward
        * sum(_product_seconds(cfg, cluster, work, product) for product in work.weight_gradients),
        host_forward=host_forward,
        host_backward=work.has_backward * (host_backward + (work.way != "none") * host_forward),
    )


def in_bytes(cfg: RunConfig, run: Description, unit_index: int, work: UnitWork) -> UnitWork:
    """Return the work of a unit in what a GPU's price is about.

    Elements are the bytes that eager operators move, casts of weights included, and trained weights
    count in bytes. So a price holds for other dtypes and kinds of layers than were measured.
    """
    on_gpu = replace(cfg, training=replace(cfg.training, device="cuda"))
    moves = moves_of_unit(on_gpu, run.hf, run.spec, unit_index)
    forward, backward = float(sum(moves.forward)), float(sum(moves.backward))
    num_products = len(work.forward), len(work.backward)
    launches = len(moves.forward) + num_products[0], len(moves.backward) + num_products[1]
    if cfg.training.compile not in ("none", "aot_eager") and _is_compiled(cfg, work.key):
        # Compiled code reads and writes once what eager operators read and write one by one, and
        # still copies weights.
        once = 2 * work.rest_forward.elements * product_dtype(cfg).itemsize + moves.weight_bytes
        forward, backward = min(forward, once), min(backward, once)
        launches = 2 * num_products[0], 2 * num_products[1]  # one between two products
    again, itemsize = work.rest_again, hidden_dtype(cfg).itemsize

    def of(rest: RestQuantities, elements: float) -> RestQuantities:
        return rest._replace(elements=elements, trained=rest.trained * itemsize)

    return replace(
        work,
        launches=launches,
        rest_forward=of(work.rest_forward, forward),
        rest_backward=of(work.rest_backward, backward),
        rest_again=of(again, forward) if again.calls else again,
    )


def _is_compiled(cfg: RunConfig, key: str) -> bool:
    """Return whether a unit is a layer without eager code.

    Experts run as they are where tokens are sent or dropped; all of their layer is priced so.
    """
    are_eager = cfg.parallel.ep > 1 or cfg.model.expert_capacity is not None
    return _is_layer(key) and not (are_eager and ", moe, " in key)


def _is_layer(key: str) -> bool:
    return not key.startswith(("embed, ", "head, "))


def _read_back(cfg: RunConfig, cluster: Cluster, work: UnitWork) -> float:
    """Return the seconds in which stored matrices are read and written in the dtype of products."""
    form = 0.5 if "4" in cfg.model.base else 1.0
    moved = work.stored * (form + product_dtype(cfg).itemsize)
    device = cluster.device
    return moved / (device.memory_bandwidth if cluster.calibration else device.reached_bandwidth)


def _product_seconds(cfg: RunConfig, cluster: Cluster, work: UnitWork, product: Product) -> float:
    rows, inner, columns = product.rows, product.inner, product.columns
    device, dtype = cluster.device, product_dtype(cfg)
    assumed, tokens = device.assumed, inner if product.of == "weight" else rows
    rate = device.rate(dtype) * assumed["product"] * tokens / (tokens + assumed["half_speed_rows"])
    moved = dtype.itemsize * (rows * inner + inner * columns + rows * columns)
    casts = 0.0
    if cfg.training.is_fp8 and _is_layer(work.key):
        rate *= assumed["fp8"]
        casts = (dtype.itemsize + 1) * (rows * inner + inner * columns)
    flops = 2 * rows * inner * columns / rate
    return product.times * (
        max(flops, moved / device.reached_bandwidth) + casts / device.reached_bandwidth
    )
