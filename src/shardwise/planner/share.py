"""The share of a model that one rank holds along `pp`, `tp` and `ep`, read off a model on meta.

A pipeline gives a rank its chunks, tensor parallelism its rows of each weight, expert parallelism
its experts. What data parallelism then does with the share is in `communication.py` and
`memory.py`. Nothing here needs a process group or memory for weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import prod
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from shardwise.assembly.costs import choose_split, costs_of, with_gradients
from shardwise.assembly.describe import Description
from shardwise.assembly.optimizer import selected_by
from shardwise.config import RunConfig
from shardwise.layouts import num_strategy_ranks, shard_dim
from shardwise.metrics.flops import rerun_of
from shardwise.models.counts import ModelCounts, count_model
from shardwise.models.counts import Unit as CountedUnit
from shardwise.models.dtypes import autocast_dtype, hidden_dtype
from shardwise.models.expert_plan import cuts_of as expert_cuts_of
from shardwise.models.families import family_of
from shardwise.models.quantise import as_stored
from shardwise.models.spec import LayerSpec, ModelSpec
from shardwise.models.tensor_cuts import BlockSplit, Cut, unwrapped
from shardwise.models.tensor_plan import cut_rows, cuts_of, split_blocks
from shardwise.planner.context import Mixer, experts_of_routers, mixers_of
from shardwise.planner.experts import Mixture, mixtures_of


@dataclass(frozen=True)
class Weight:
    """A parameter as a rank of `tp` and `ep` holds it, before data parallelism shards it."""

    name: str
    shape: tuple[int, ...]
    itemsize: int
    is_trained: bool
    num_shards: int
    """The data ranks that hold copies of it, or shards: of a routed expert 1/ep of them."""
    tp_dim: int | None = None
    """The dim along which `tp` shards it; None: every rank of `tp` holds all of it."""
    ep_dim: int | None = None
    """The dim along which `ep` shards it; None: it belongs to no routed expert."""
    has_partial_gradient: bool = False
    """Whether each rank of `tp` computes a partial sum of the gradient of all of it."""
    is_selected: bool = False
    """Whether the run's optimizer selects it: see `assembly.optimizer.selected_by`."""
    shared_numels: tuple[int, ...] = ()
    """Elements of each of its segments of which several ranks of `tp` hold the same rows."""

    @property
    def numel(self) -> int:
        """Elements on a rank of `tp` and `ep`."""
        return prod(self.shape)

    @cached_property
    def shard_dim(self) -> int | None:
        """The dim that data parallelism shards, as `place.free_dim` chooses it.

        None: no dim that is not sharded divides evenly, so that each data rank holds all of it.
        """
        taken = [dim for dim in (self.tp_dim, self.ep_dim) if dim is not None]
        return shard_dim(self.shape, self.num_shards, taken)

    @property
    def padded_numel(self) -> int:
        """The elements of all shards, which are equal; the last ones may be padded."""
        dim = self.shard_dim
        if dim is None:
            return self.numel
        rows = -(-self.shape[dim] // self.num_shards) * self.num_shards
        return self.numel // self.shape[dim] * rows

    def shard_numel(self, rank: int) -> int:
        """Return the elements that the rank `rank` of its shards holds, without padding."""
        dim = self.shard_dim
        if dim is None:
            return self.numel
        rows = -(-self.shape[dim] // self.num_shards)
        return self.numel // self.shape[dim] * max(0, min(rows, self.shape[dim] - rank * rows))


@dataclass(frozen=True)
class Block:
    """What a mixer or a feed-forward makes tensor parallelism send."""

    is_sharded: bool
    """Whether each rank computes a partial sum of its output; otherwise all of it."""
    needs_input_gradient: bool
    has_backward: bool
    is_rerun: bool
    """Whether the backward runs its forward again."""
    reruns_output: bool
    """Whether that includes the sum of its output, as something after it in the layer runs too."""
    output_itemsize: int
    """Bytes of an element of its output, which autocast halves unless experts are added up."""
    bytes_within: tuple[int, ...]
    """Bytes per token of each sum over ranks that lies within the block."""
    cut_rows: tuple[int, ...] = ()
    """Rows of each of its matrices whose lengths DoRA takes, where a rank has a part of each."""


@dataclass(frozen=True)
class Chunk:
    """A pipeline stage, or the whole model."""

    spec: ModelSpec
    weights: tuple[Weight, ...]
    """Without a tied weight that a lower chunk of the same rank has."""
    blocks: tuple[Block, ...]
    needs_input_gradient: bool
    """Whether the backward goes on to the chunk, or the embedding, below."""
    needs_head_gradient: bool
    """Whether the backward needs the gradient of the head's input."""
    receives: bool = False
    """Whether its input comes from another rank."""
    sends: bool = False
    """Whether its output goes to another rank."""
    mixers: tuple[Mixer, ...] = ()
    """What context parallelism makes send."""
    mixtures: tuple[Mixture, ...] = ()
    """What expert parallelism makes send."""
    router_experts: tuple[int, ...] = ()
    """The experts of each of its routers that has a load-balancing loss."""


@dataclass(frozen=True)
class Share:
    """What one rank holds of a model."""

    chunks: tuple[Chunk, ...]
    tied: Weight | None
    """The trained tied weight, where the stage at the other end of the pipeline has it too."""
    context_rank: int = 0
    """The place of the rank along `cp`."""

    @cached_property
    def weights(self) -> tuple[Weight, ...]:
        """The weights of all chunks."""
        return tuple(weight for chunk in self.chunks for weight in chunk.weights)

    @cached_property
    def trained(self) -> tuple[Weight, ...]:
        """The weights that the optimizer updates."""
        return tuple(weight for weight in self.weights if weight.is_trained)


def share_of(
    cfg: RunConfig,
    run: Description,
    coordinates: Mapping[str, int],
    boundaries: Sequence[int] | None = None,
) -> Share:
    """Return what the rank at these coordinates of the mesh holds.

    `boundaries` are those of a pipeline's split: chunk c has the units boundaries[c] to
    boundaries[c + 1] - 1.
    """
    weights, counts = weights_of(cfg, run, coordinates["tp"]), counts_of(run.hf, run.spec)
    of_layers = weights_by_layer(run.spec, weights)
    if run.pipeline is None:
        model = _chunk(cfg, run, counts, weights, of_layers, 0, len(counts.units))
        return Share((model,), tied=None, context_rank=coordinates["cp"])
    assert boundaries is not None
    counts = with_gradients(counts, cfg.parallel.schedule)
    pipeline, rank = run.pipeline, coordinates["pp"]
    chunks: list[Chunk] = []
    for index in pipeline.chunks_of(rank):
        low, high = boundaries[index : index + 2]
        chunk = _chunk(cfg, run, counts, weights, of_layers, low, high)
        receives = not chunk.spec.first and pipeline.rank_of(index - 1) != rank
        sends = not chunk.spec.last and pipeline.rank_of(index + 1) != rank
        chunks.append(replace(chunk, receives=receives, sends=sends))
        taken = set(chunk.weights)
        weights = tuple(weight for weight in weights if weight not in taken)
    return Share(tuple(chunks), _tied(run.spec, chunks), coordinates["cp"])


def boundaries_of(cfg: RunConfig, run: Description) -> tuple[int, ...] | None:
    """Return the boundaries of the chunks that a run would choose; None without a pipeline.

    UserError where no split meets the memory limit.
    """
    if run.pipeline is None:
        return None
    counts = counts_of(run.hf, run.spec)
    units, _ = costs_of(cfg, run.hf, run.spec, counts, prod(run.sizes.values()))
    return choose_split(cfg, units, run.pipeline.num_microbatches).boundaries


# A search asks for many layouts of one model, of which these take most of the time.
counts_of = lru_cache(maxsize=1)(count_model)


def weights_of(cfg: RunConfig, run: Description, rank: int) -> tuple[Weight, ...]:
    """Return all weights of the model, as rank `rank` of `tp` and any of `ep` hold them."""
    parallel, num_shards = cfg.parallel, num_strategy_ranks(cfg, run.sizes)
    hf = as_stored(run.hf, cfg.model.base)
    cut = run.spec, parallel.tp, parallel.ep, parallel.sequence_parallel, rank
    return _sharded(num_shards, hf, cfg.optimizer.name, *cut)


def weights_by_layer(spec: ModelSpec, weights: Iterable[Weight]) -> dict[str, tuple[Weight, ...]]:
    """Return the weights of each layer by its name; those of no layer are under ""."""
    names = {layer.name for layer in spec.layers}
    depth = max((name.count(".") + 1 for name in names), default=0)
    groups: dict[str, list[Weight]] = {}
    for weight in weights:
        name = ".".join(weight.name.split(".")[:depth])
        groups.setdefault(name if name in names else "", []).append(weight)
    return {name: tuple(group) for name, group in groups.items()}


@lru_cache(maxsize=8)
def _sharded(num_shards: int, *cut: Any) -> tuple[Weight, ...]:
    """Return the weights of a cut, shared by so many ranks: of experts, by those of one part."""
    _, _, _, _, num_expert_ranks, _, _ = cut
    return tuple(
        replace(weight, num_shards=num_shards // (1 if weight.ep_dim is None else num_expert_ranks))
        for weight in _cut_weights(*cut)
    )


@lru_cache(maxsize=64)
def _cut_weights(
    hf: PreTrainedModel,
    optimizer: str,
    spec: ModelSpec,
    num_ranks: int,
    num_expert_ranks: int,
    sequence_parallel: bool,
    rank: int,
) -> tuple[Weight, ...]:
    """Return all weights as rank `rank` of `tp` and any of `ep` hold them, each with one copy."""
    selected = selected_by(optimizer, hf, spec, family_of(hf))
    weights = [
        Weight(name, tuple(p.shape), p.itemsize, p.requires_grad, 1, is_selected=name in selected)
        for name, p in hf.named_parameters()
    ]
    if num_expert_ranks > 1:
        expert_cuts = expert_cuts_of(hf, spec, num_expert_ranks)
        weights = [_of_experts(weight, expert_cuts.get(weight.name)) for weight in weights]
    if num_ranks == 1:
        return tuple(weights)
    cuts = cuts_of(hf, spec, num_ranks)
    splits = {
        f"{layer.name}.{path}.": split
        for layer in spec.layers
        for path, split in split_blocks(hf, layer, num_ranks).items()
    }
    # With sequence parallelism a rank has its share of the tokens between blocks.
    between = [layer.name for layer in spec.layers] + [spec.norm]
    shared_tokens = tuple(f"{path}." for path in between if sequence_parallel)

    def of_rank(weight: Weight) -> Weight:
        if weight.name.startswith((f"{spec.embed}.", f"{spec.head}.")):
            most = -(-weight.shape[0] // num_ranks)
            rows = min(most, weight.shape[0] - rank * most)
            return replace(weight, shape=(rows, *weight.shape[1:]), tp_dim=0)
        if weight.name in cuts:
            return _cut(weight, cuts[weight.name], rank)
        block = next(filter(weight.name.startswith, splits), None)
        is_between = block is None and weight.name.startswith(shared_tokens)
        is_inside = block is not None and splits[block] is not None
        return replace(weight, has_partial_gradient=is_between or is_inside)

    return tuple(of_rank(weight) for weight in weights)


def _of_experts(weight: Weight, cut: Cut | None) -> Weight:
    """Return a weight of which a rank of `ep` has some experts, if it belongs to experts."""
    if cut is None:
        return weight
    shape = _with_size(weight.shape, cut.dim, cut.rows.local_size)
    return replace(weight, shape=shape, ep_dim=cut.dim)


def _with_size(shape: tuple[int, ...], dim: int, size: int) -> tuple[int, ...]:
    return (*shape[:dim], size, *shape[dim + 1 :])


def _cut(weight: Weight, cut: Cut, rank: int) -> Weight:
    per_row = weight.numel // weight.shape[cut.dim]
    shared = tuple(segment.size * per_row for segment, *_ in cut.rows.shared_segments(rank))
    shape = _with_size(weight.shape, cut.dim, cut.rows.local_size)
    return replace(weight, shape=shape, tp_dim=cut.dim, shared_numels=shared)


def _chunk(
    cfg: RunConfig,
    run: Description,
    counts: ModelCounts,
    weights: Sequence[Weight],
    of_layers: Mapping[str, Sequence[Weight]],
    low: int,
    high: int,
) -> Chunk:
    """Return the chunk of units[low:high], as if no other rank had a part of the model."""
    model, head = run.spec, counts.units[-1]
    is_first, is_last = low == 0, high == len(counts.units)
    first = max(low - 1, 0)
    layers = model.layers[first : high - 1]
    spec = replace(model, layers=layers, first=is_first, last=is_last)
    kept = {weight.name for layer in layers for weight in of_layers.get(layer.name, ())}
    foreign = tuple(f"{path}." for path in _foreign(model, spec))
    kept |= {w.name for w in of_layers.get("", ()) if not w.name.startswith(foreign)}
    blocks: list[Block] = []
    mixers: list[Mixer] = []
    mixtures: list[Mixture] = []
    for layer, unit in zip(layers, counts.units[1 + first :], strict=False):
        if cfg.parallel.tp > 1:
            blocks += _blocks(cfg, run, layer, unit, of_layers[layer.name])
        if cfg.parallel.cp > 1:
            shapes = {weight.name: weight.shape for weight in of_layers[layer.name]}
            mixers += mixers_of(cfg, run.hf, layer, unit, shapes)
        if cfg.parallel.ep > 1:
            mixtures += mixtures_of(cfg, run, layer, unit)
    return Chunk(
        spec=spec,
        weights=tuple(weight for weight in weights if weight.name in kept),
        blocks=tuple(blocks),
        needs_input_gradient=counts.units[max(low - 1, 0)].backward,
        needs_head_gradient=is_last and all(weight.input_gradient for weight in head.weights),
        mixers=tuple(mixers),
        mixtures=tuple(mixtures),
        router_experts=experts_of_routers(cfg, run.hf, layers) if cfg.parallel.cp > 1 else (),
    )


def _foreign(model: ModelSpec, stage: ModelSpec) -> Iterator[str]:
    """Yield the modules beside layers that a stage leaves to others."""
    if not stage.first and not (stage.last and model.tied):
        yield model.embed
    if not stage.first and model.positions is not None:
        yield model.positions
    if not stage.last:
        yield from (model.norm, model.head)


def _blocks(
    cfg: RunConfig, run: Description, layer: LayerSpec, unit: CountedUnit, weights: Sequence[Weight]
) -> Iterator[Block]:
    splits = split_blocks(run.hf, layer, cfg.parallel.tp)
    # `operators` saves what comes out of products, but nothing of a collective.
    reruns_layer = rerun_of(unit, cfg.training.checkpointing) != "none"
    product_dtype = autocast_dtype(cfg.training.precision) or hidden_dtype(cfg)
    kinds = [block.kind for block in layer.blocks]
    last_norm = f"{layer.name}.{layer.norms.after}."
    ends_with_norm = any(weight.name.startswith(last_norm) for weight in weights)
    for kind, (path, split) in zip(kinds, splits.items(), strict=True):
        output_dtype = hidden_dtype(cfg) if kind.experts else product_dtype
        prefix = f"{layer.name}.{path}."
        module = run.hf.get_submodule(prefix.removesuffix("."))
        products = [weight for weight in unit.weights if weight.name.startswith(prefix)]
        # What meets the input first has an input gradient only where the input has one.
        needs_input_gradient = all(weight.input_gradient for weight in products)
        is_trained = any(w.is_trained for w in weights if w.name.startswith(prefix))
        is_last = path == [*splits][-1]
        yield Block(
            is_sharded=split is not None,
            needs_input_gradient=needs_input_gradient,
            has_backward=needs_input_gradient or is_trained,
            is_rerun=reruns_layer,
            # A recomputation ends with the last tensor that the backward needs.
            reruns_output=reruns_layer and (not is_last or ends_with_norm),
            output_itemsize=output_dtype.itemsize,
            bytes_within=tuple(_bytes_within(module, split, product_dtype.itemsize)),
            cut_rows=() if split is None else cut_rows(module, split),
        )


def _bytes_within(module: nn.Module, split: BlockSplit | None, itemsize: int) -> Iterator[int]:
    """Yield the bytes per token of each sum within a block: of squares, or of a linear's output."""
    if split is not None:
        yield from (4 * split.norm_groups for _ in split.norms)
        for name in split.summed:
            yield itemsize * unwrapped(module.get_submodule(name)).out_features


def _tied(spec: ModelSpec, chunks: Iterable[Chunk]) -> Weight | None:
    """Return the tied weight of a rank with one end of the model, if it is trained."""
    first = [chunk for chunk in chunks if chunk.spec.first]
    last = [chunk for chunk in chunks if chunk.spec.last]
    if not spec.tied or bool(first) == bool(last):
        return None
    weights = (first or last)[0].weights
    return next((w for w in weights if w.name == f"{spec.embed}.weight" and w.is_trained), None)
