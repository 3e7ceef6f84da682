"""The weights of a model as one rank of `tp` and `ep` holds them, read off a model on meta."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate

from transformers import PreTrainedModel

from shardwise.assembly.describe import Description
from shardwise.config import RunConfig
from shardwise.models.alike import first_alike
from shardwise.models.expert_plan import cuts_of as expert_cuts_of
from shardwise.models.families import family_of
from shardwise.models.quantise import as_stored
from shardwise.models.spec import ModelSpec
from shardwise.models.tensor_cuts import DimCut
from shardwise.models.tensor_plan import cuts_of, split_blocks
from shardwise.parallel.optimizers import OPTIMIZERS
from shardwise.parallel.weights import Weight


def cut_weights(cfg: RunConfig, run: Description, rank: int) -> Mapping[str, tuple[Weight, ...]]:
    """Return the weights by layer as rank `rank` of `tp` and any of `ep` hold them, one copy each.

    Those of no layer are under "start" and "end".
    """
    parallel, hf = cfg.parallel, as_stored(run.hf, cfg.model.base)
    cut = parallel.tp, parallel.ep, parallel.sequence_parallel, rank
    return _cut_weights(hf, run.hf, cfg.optimizer.name, run.spec, *cut)


def shapes_of(cfg: RunConfig, run: Description) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all weights, by name, as the first rank of `tp` and `ep` has them."""
    return {w.name: w.shape for ws in cut_weights(cfg, run, 0).values() for w in ws}


@lru_cache(maxsize=2**14)
def sharded(
    weights: tuple[Weight, ...], num_shards: int, num_expert_ranks: int
) -> tuple[Weight, ...]:
    """Return the weights of a layer with so many shards: candidates of a search often agree."""
    return tuple(weight.sharded(num_shards, num_expert_ranks) for weight in weights)


def _by_layer(spec: ModelSpec, weights: Iterable[Weight]) -> dict[str, tuple[Weight, ...]]:
    """Return the weights of each layer by its name, the others under "start" and "end"."""
    names = {layer.name for layer in spec.layers}
    depth = max((name.count(".") + 1 for name in names), default=0)
    at_start = tuple(f"{path}." for path in (spec.embed, spec.positions) if path)
    groups: dict[str, list[Weight]] = {"start": [], **{x.name: [] for x in spec.layers}, "end": []}
    for weight in weights:
        name = ".".join(weight.name.split(".")[:depth])
        end = "start" if weight.name.startswith(at_start) else "end"
        groups[name if name in names else end].append(weight)
    return {name: tuple(group) for name, group in groups.items()}


@lru_cache(maxsize=2)
def _whole_weights(
    hf: PreTrainedModel, optimizer: str, spec: ModelSpec
) -> Mapping[str, tuple[Weight, ...]]:
    """Return the weights by layer as one process holds them."""
    selected = OPTIMIZERS[optimizer].selected(hf, spec, family_of(hf).gating)
    weights = [
        Weight(name, tuple(p.shape), p.itemsize, p.requires_grad, 1, is_selected=name in selected)
        for name, p in hf.named_parameters()
    ]
    return _by_layer(spec, weights)


@lru_cache(maxsize=64)
def _cut_weights(
    stored: PreTrainedModel,
    hf: PreTrainedModel,
    optimizer: str,
    spec: ModelSpec,
    num_ranks: int,
    num_expert_ranks: int,
    sequence_parallel: bool,
    rank: int,
) -> Mapping[str, tuple[Weight, ...]]:
    """See `cut_weights`. Layers that are alike in `hf` are cut once."""
    whole = _whole_weights(stored, optimizer, spec)
    if num_ranks == num_expert_ranks == 1:
        return whole
    places = first_alike(hf, spec, "none")
    firsts = {layer.name: spec.layers[places[layer.name]] for layer in spec.layers}
    few = replace(spec, layers=tuple(dict.fromkeys(firsts.values())))
    names = ("start", *(layer.name for layer in few.layers), "end")
    weights = [weight for name in names for weight in whole[name]]
    layout = num_ranks, num_expert_ranks, sequence_parallel, rank
    cut = _by_layer(few, _in_ranks(stored, few, weights, *layout))
    by_layer = {}
    for name, first in firsts.items():
        by_layer[name] = cut[first.name]
        if name != first.name:
            by_layer[name] = tuple(
                replace(w, name=name + w.name.removeprefix(first.name)) for w in cut[first.name]
            )
    return {"start": cut["start"], **by_layer, "end": cut["end"]}


def _in_ranks(
    hf: PreTrainedModel,
    spec: ModelSpec,
    weights: Iterable[Weight],
    num_ranks: int,
    num_expert_ranks: int,
    sequence_parallel: bool,
    rank: int,
) -> list[Weight]:
    """Return weights of these layers, or of none, as a rank of `tp` and any of `ep` hold them."""
    if num_expert_ranks > 1:
        expert_cuts = expert_cuts_of(hf, spec, num_expert_ranks)
        weights = [_of_experts(weight, expert_cuts.get(weight.name)) for weight in weights]
    if num_ranks == 1:
        return [*weights]
    cuts = cuts_of(hf, spec, num_ranks)
    splits = {
        f"{layer.name}.{path}.": split
        for layer in spec.layers
        for path, split in split_blocks(hf, layer, num_ranks).items()
    }
    # With sequence parallelism a rank has its share of the tokens between blocks.
    between = [layer.name for layer in spec.layers] + [spec.norm]
    shared_tokens = tuple(f"{path}." for path in between if sequence_parallel)

    def on_a_rank(weight: Weight) -> Weight:
        if weight.name.startswith((f"{spec.embed}.", f"{spec.head}.")):
            most = -(-weight.shape[0] // num_ranks)
            rows = min(most, weight.shape[0] - rank * most)
            return replace(weight, shape=(rows, *weight.shape[1:]), tp_dim=0)
        if weight.name in cuts:
            return _cut(weight, cuts[weight.name], rank)
        places = accumulate(f"{part}." for part in weight.name.split("."))
        block = next((place for place in places if place in splits), None)
        is_between = block is None and weight.name.startswith(shared_tokens)
        is_inside = block is not None and splits[block] is not None
        return replace(weight, has_partial_gradient=is_between or is_inside)

    return [*map(on_a_rank, weights)]


def _of_experts(weight: Weight, cut: DimCut | None) -> Weight:
    """Return a weight of which a rank of `ep` has some experts, if it belongs to experts."""
    if cut is None:
        return weight
    shape = _with_size(weight.shape, cut.dim, cut.rows.local_size)
    return replace(weight, shape=shape, ep_dim=cut.dim)


def _with_size(shape: tuple[int, ...], dim: int, size: int) -> tuple[int, ...]:
    return (*shape[:dim], size, *shape[dim + 1 :])


def _cut(weight: Weight, cut: DimCut, rank: int) -> Weight:
    per_row = weight.numel // weight.shape[cut.dim]
    shared = tuple(segment.size * per_row for segment, *_ in cut.rows.shared_segments(rank))
    shape = _with_size(weight.shape, cut.dim, cut.rows.local_size)
    return replace(weight, shape=shape, tp_dim=cut.dim, shared_numels=shared)
