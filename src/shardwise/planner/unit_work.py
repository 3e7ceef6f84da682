"""What one micro-batch does in each unit of a model: its products by shape, and all the rest.

A product multiplies T tokens by a weight. The rest of a unit (a core, norms, activations, the loss,
the launching of operators) is described by four numbers, whose prices a calibration measures.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import Literal, NamedTuple

from transformers import PreTrainedModel

from shardwise.assembly.costs import with_gradients
from shardwise.config import RunConfig
from shardwise.metrics.flops import rerun_of
from shardwise.models.alike import counts_of, first_alike
from shardwise.models.counts import Unit, Weight
from shardwise.models.families import family_of
from shardwise.models.quantise import stored_paths
from shardwise.models.spec import ModelSpec

Pass = Literal["forward", "input", "weight"]


class Product(NamedTuple):
    """A matrix product [rows, inner] x [inner, columns], as often as `times`."""

    of: Pass
    """The output, the gradient of the input, or that of the weight."""
    rows: float
    inner: int
    columns: int
    times: float = 1.0


class Rest(NamedTuple):
    """What the time of a unit beyond its products is proportional to."""

    calls: float
    elements: float
    """Numbers that go into and come out of its products: traffic of elementwise operators."""
    core_flops: float
    trained: float
    """Elements of trained weights, whose gradients are added up."""


@dataclass(frozen=True)
class UnitWork:
    """One micro-batch in a unit (the embedding, a layer, head and loss) on one rank."""

    key: str
    """The kind of layer and of its feed-forward, or `embed` or `head`, and what is trained."""
    forward: tuple[Product, ...]
    backward: tuple[Product, ...]
    rest_forward: Rest
    rest_backward: Rest
    has_backward: bool
    reruns: Literal["nothing", "rest", "all"]
    """What the backward runs again of the forward: `rest` has no products."""
    stored: float = 0.0
    """Elements of matrices in a form of `model.base`, which each pass reads back."""


def work_of_units(
    cfg: RunConfig,
    hf: PreTrainedModel,
    spec: ModelSpec,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    has_neighbours: bool = False,
) -> tuple[UnitWork, ...]:
    """Return the work of every unit, bottom up. Layers that are alike share one object.

    `shapes`: of weights as a rank of `tp` and `ep` has them; by default those of `hf`.
    `has_neighbours`: other ranks have tokens of the same rows; always so under `cp`.
    """
    if shapes is None:
        shapes = {name: tuple(p.shape) for name, p in hf.named_parameters(remove_duplicate=False)}
    units = with_gradients(counts_of(hf, spec), cfg.parallel.schedule).units
    feed_forwards = ["", *(f", {layer.feed_forward}" for layer in spec.layers), ""]
    mode = "lora" if cfg.lora else "full"
    stored = _stored(hf, spec) if cfg.model.base != "none" else frozenset()
    tokens = cfg.training.micro_batch_size * cfg.data.sequence_length // cfg.parallel.cp
    alike = first_alike(hf, spec, cfg.training.checkpointing)
    works: list[UnitWork] = []
    for unit, feed_forward in zip(units, feed_forwards, strict=True):
        first = 1 + alike.get(unit.name, len(works))
        if first < len(works):
            works.append(works[first])
        else:
            key = f"{unit.kind}{feed_forward}, {mode}"
            work = _work(cfg, unit, key, shapes, tokens, has_neighbours)
            numels = [prod(shapes[w.name]) for w in unit.weights if w.name in stored]
            works.append(replace(work, stored=float(sum(numels))))
    return tuple(works)


@lru_cache(maxsize=1)
def _stored(hf: PreTrainedModel, spec: ModelSpec) -> frozenset[str]:
    return frozenset(stored_paths(hf, spec, family_of(hf)))


def _work(
    cfg: RunConfig,
    unit: Unit,
    key: str,
    shapes: Mapping[str, tuple[int, ...]],
    tokens: int,
    has_neighbours: bool,
) -> UnitWork:
    forward: list[Product] = []
    backward: list[Product] = []
    elements = 0.0
    for weight in unit.weights:
        shape = shapes[weight.name]
        of_b = ".lora_B." in weight.name
        if of_b and weight.name.replace(".lora_B.", ".lora_magnitude_vector.") in shapes:
            # DoRA makes B A, of which it takes the lengths of rows together with W's.
            columns = shapes[weight.name.replace(".lora_B.", ".lora_A.")][-1]
            forward.append(Product("forward", float(shape[0]), shape[1], columns))
        times, rows = 1.0, float(tokens)
        if len(shape) == 3 and not weight.by_elements:  # a stack of experts
            # Ranks of `ep` send each other's experts as many rows as a rank has.
            times = float(shape[0])
            rows = max(1.0, tokens * weight.active * cfg.parallel.ep)
        if ".lora_" not in weight.name:
            elements += times * rows * (shape[0] if weight.by_elements else sum(shape[-2:]))
        if not weight.by_elements:
            forward.append(Product("forward", rows, shape[-1], shape[-2], times))
            backward += _backward(weight, shape, rows, times)
    if unit.kind == "embed":
        elements = float(
            tokens * min(shape[-1] for name, shape in shapes.items() if unit.name in name)
        )
    # A token's core is on its complete row, and each rank of `tp` has its share of the heads.
    length = cfg.data.sequence_length
    share = tokens / cfg.parallel.tp
    trained = float(unit.trainable_parameters) / cfg.parallel.tp
    core_forward = share * sum(core.executed_forward(length) for core in unit.cores)
    core_backward = 0.0
    if unit.core_gradient:
        core_backward = share * sum(core.executed_backward(length) for core in unit.cores)
    if has_neighbours or cfg.parallel.cp > 1:
        core_forward += share * sum(core.map_forward(length) for core in unit.cores)
        if unit.core_gradient:
            core_backward += share * sum(core.map_backward(length) for core in unit.cores)
    trained_forward = 0.0
    if unit.kind == "head" and cfg.training.loss != "plain":
        # The chunked loss takes the gradients in its forward; its backward only scales them.
        forward, backward, trained_forward = forward + backward, [], trained
    return UnitWork(
        key=key,
        forward=tuple(forward),
        backward=tuple(backward),
        rest_forward=Rest(1.0, elements, core_forward, trained_forward),
        rest_backward=Rest(1.0, elements, core_backward, trained),
        has_backward=unit.backward,
        reruns=_reruns(cfg, unit),
    )


def _reruns(cfg: RunConfig, unit: Unit) -> Literal["nothing", "rest", "all"]:
    way = rerun_of(unit, cfg.training.checkpointing)
    return "all" if way == "full" else "rest" if way == "operators" else "nothing"


def _backward(weight: Weight, shape: tuple[int, ...], rows: float, times: float) -> list[Product]:
    products = []
    if weight.input_gradient:
        products.append(Product("input", rows, shape[-2], shape[-1], times))
    if weight.trainable:
        products.append(Product("weight", float(shape[-2]), int(rows), shape[-1], times))
    return products
