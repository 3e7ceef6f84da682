"""Work of one micro-batch in each unit of a model: its products by shape, and all the rest.

A product multiplies T tokens by a weight. The rest of a unit (a core, norms, activations, the loss,
the launching of operators) is described by four numbers, whose prices a calibration measures.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import Literal, NamedTuple

from transformers import PreTrainedModel

from shardwise.assembly.costs import with_gradients
from shardwise.config import RunConfig, Way
from shardwise.metrics.flops import is_again, is_rerun, rerun_of
from shardwise.models.alike import counts_of, first_alike
from shardwise.models.counts import ProductWeight, Unit
from shardwise.models.quantise import Format, stored_paths
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


class RestQuantities(NamedTuple):
    """Quantities to which the time of a unit beyond its products is proportional."""

    calls: float
    elements: float
    """Numbers that go into and come out of its products; on a GPU the bytes that its elementwise
    operators move."""
    core_flops: float
    trained: float
    """Elements of trained weights, whose gradients are added up; on a GPU their bytes."""


NOTHING = RestQuantities(0.0, 0.0, 0.0, 0.0)


@dataclass(frozen=True)
class UnitWork:
    """One micro-batch in a unit (the embedding, a layer, head and loss) on one rank."""

    key: str
    """The kind of layer and of its feed-forward, or `embed` or `head`, and what is trained."""
    forward: tuple[Product, ...]
    backward: tuple[Product, ...]
    rest_forward: RestQuantities
    rest_backward: RestQuantities
    has_backward: bool
    way: Way
    """How the layer is recomputed."""
    again: tuple[Product, ...]
    """The products of the forward that the backward runs again."""
    rest_again: RestQuantities
    """The rest of the forward that the backward runs again."""
    trained_experts: float
    """Trained elements of experts, which `rest_backward` counts too."""
    launches: tuple[int, int] = (0, 0)
    """Operators of the forward and the backward that a GPU's host launches."""
    attention: Literal["attention", "flash"] = "attention"
    """The kernel of attention on a GPU: what torch takes, or FlashAttention-2."""
    attention_share: float = 0.0
    """The share of attention in the FLOPs of its cores."""
    stored: float = 0.0
    """Elements of matrices in a form of `model.base`, which each pass reads back."""

    @property
    def weight_gradients(self) -> tuple[Product, ...]:
        """The products of the backward that are gradients of weights."""
        return tuple(product for product in self.backward if product.of == "weight")


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
    shapes = _shapes(hf) if shapes is None else shapes
    units = with_gradients(counts_of(hf, spec), cfg.parallel.schedule).units
    feed_forwards = ["", *(f", {layer.feed_forward}" for layer in spec.layers), ""]
    mode = "lora" if cfg.lora else "full"
    stored = frozenset() if cfg.model.base == "none" else _stored(hf, spec, cfg.model.base)
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
def _shapes(hf: PreTrainedModel) -> Mapping[str, tuple[int, ...]]:
    return {name: tuple(p.shape) for name, p in hf.named_parameters(remove_duplicate=False)}


@lru_cache(maxsize=1)
def _stored(hf: PreTrainedModel, spec: ModelSpec, base: Format) -> frozenset[str]:
    return frozenset(stored_paths(hf, spec, base))


def _work(
    cfg: RunConfig,
    unit: Unit,
    key: str,
    shapes: Mapping[str, tuple[int, ...]],
    tokens: int,
    has_neighbours: bool,
) -> UnitWork:
    way = rerun_of(unit, cfg.training.checkpointing)
    forward: list[Product] = []
    backward: list[Product] = []
    again: list[Product] = []
    elements = 0.0
    for weight in unit.weights:
        shape = shapes[weight.name]
        is_lora_b = ".lora_B." in weight.name
        if is_lora_b and weight.name.replace(".lora_B.", ".lora_magnitude_vector.") in shapes:
            # DoRA makes B A, of which it takes the lengths of rows together with W's.
            columns = shapes[weight.name.replace(".lora_B.", ".lora_A.")][-1]
            product = Product("forward", float(shape[0]), shape[1], columns)
            forward.append(product)
            again += [product] * (way != "none")
        times, rows = 1.0, float(tokens)
        is_stack = _is_of_experts(weight, shape)
        if is_stack:
            # Ranks of `ep` send each other's experts as many rows as a rank has. A factor of their
            # adapters has the rows of all experts in one matrix.
            times = float(shape[0]) if len(shape) == 3 else 1.0
            rows = max(1.0, tokens * weight.active * cfg.parallel.ep)
        if ".lora_" not in weight.name:
            elements += times * rows * (shape[0] if weight.by_elements else sum(shape[-2:]))
        if not weight.by_elements:
            product = Product("forward", rows, shape[-1], shape[-2], times)
            forward.append(product)
            again += [product] * is_rerun(weight, way)
            backward += [*_backward(weight, shape, rows, times), *[product] * is_again(weight)]
    if unit.kind == "embed":
        elements = float(
            tokens * min(shape[-1] for name, shape in shapes.items() if unit.name in name)
        )
    # A token's core is on its complete row, and each rank of `tp` has its share of the heads.
    length, with_maps = cfg.data.sequence_length, has_neighbours or cfg.parallel.cp > 1
    share = tokens / cfg.parallel.tp
    core_forward, core_backward, core_again = (
        share * flops for flops in _core_flops(unit, length, way, with_maps)
    )
    by_core = [(core.per_token(length)[0], core.is_kept) for core in unit.core_flops]
    in_attention = sum(flops for flops, is_attention in by_core if is_attention)
    trained_experts = _trained_experts(unit, shapes)
    trained, trained_forward = trained_experts + _trained_others(cfg, unit, shapes), 0.0
    if unit.kind == "head" and cfg.training.loss != "plain":
        # The chunked loss takes the gradients in its forward; its backward only scales them.
        forward, backward, trained_forward = forward + backward, [], trained
    return UnitWork(
        key=key,
        forward=tuple(forward),
        backward=tuple(backward),
        rest_forward=RestQuantities(1.0, elements, core_forward, trained_forward),
        rest_backward=RestQuantities(1.0, elements, core_backward, trained),
        has_backward=unit.backward,
        way=way,
        again=tuple(again),
        rest_again=NOTHING if way == "none" else RestQuantities(1.0, elements, core_again, 0.0),
        trained_experts=trained_experts,
        # Its kernel returns the sums that ranks of `cp` exchange.
        attention="flash" if with_maps or cfg.model.takes_flash else "attention",
        attention_share=in_attention / max(1.0, sum(flops for flops, _ in by_core)),
    )


def _core_flops(unit: Unit, length: int, way: Way, with_maps: bool) -> tuple[float, float, float]:
    """Return the FLOPs per token of a unit's cores in its forward and backward, and of those that
    the backward runs again.

    `with_maps`: those of `cp` too, which pass on a state.
    """
    forward = backward = again = 0.0
    for core in unit.core_flops:
        runs, gradients = core.per_token(length, with_maps)
        forward += runs
        backward += gradients * unit.core_gradient
        again += runs * (way == "full" or (way == "operators" and not core.is_kept))
    return forward, backward, again


def _is_of_experts(weight: ProductWeight, shape: tuple[int, ...]) -> bool:
    """Return whether a weight stacks those of all experts, or is a factor of their adapters."""
    return weight.on_stack or (len(shape) == 3 and not weight.by_elements)


def _trained_experts(unit: Unit, shapes: Mapping[str, tuple[int, ...]]) -> float:
    """Return the elements of a unit's trained weights of experts that a rank of `ep` has."""
    trained = [weight for weight in unit.weights if weight.trainable]
    experts = [w for w in trained if _is_of_experts(w, shapes[w.name])]
    return float(sum(prod(shapes[weight.name]) for weight in experts))


def _trained_others(cfg: RunConfig, unit: Unit, shapes: Mapping[str, tuple[int, ...]]) -> float:
    """Return the elements of a unit's other trained weights, which `tp` shards."""
    trained = [weight for weight in unit.weights if weight.trainable]
    in_experts = sum(w.numel for w in trained if _is_of_experts(w, shapes[w.name]))
    return (unit.trainable_parameters - in_experts) / cfg.parallel.tp


def _backward(
    weight: ProductWeight, shape: tuple[int, ...], rows: float, times: float
) -> list[Product]:
    products = []
    if weight.input_gradient:
        products.append(Product("input", rows, shape[-2], shape[-1], times))
    if weight.trainable:
        products.append(Product("weight", float(shape[-2]), int(rows), shape[-1], times))
    return products
