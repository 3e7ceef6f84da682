"""The share of a model that one rank holds along `pp`, `tp` and `ep`, read off a model on meta.

A pipeline gives a rank its chunks, tensor parallelism its rows of each weight, expert parallelism
its experts. What data parallelism then does with the share is in `communication.py` and
`memory.py`. Nothing here needs a process group or memory for weights.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate
from math import prod
from typing import Any

from transformers import PreTrainedModel

from shardwise.assembly.costs import choose_split, costs_of, with_gradients
from shardwise.assembly.describe import Description
from shardwise.assembly.optimizer import selected_by
from shardwise.config import RunConfig
from shardwise.layouts import num_strategy_ranks, shard_dim
from shardwise.models.alike import counts_of, first_alike
from shardwise.models.counts import ModelCounts
from shardwise.models.expert_plan import cuts_of as expert_cuts_of
from shardwise.models.families import family_of
from shardwise.models.quantise import as_stored
from shardwise.models.spec import ModelSpec
from shardwise.models.tensor_cuts import Cut
from shardwise.models.tensor_plan import cuts_of, split_blocks
from shardwise.planner.blocks import Block, blocks_of
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

    def __hash__(self) -> int:
        return hash(self.name)  # A search hashes millions of them.

    def sharded(self, num_shards: int, num_expert_ranks: int) -> Weight:
        """Return it with so many shards; those of an expert are among the ranks of its part."""
        number = num_shards if self.ep_dim is None else num_shards // num_expert_ranks
        return self if number == self.num_shards else replace(self, num_shards=number)

    @cached_property
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

    @cached_property
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
class Chunk:
    """A pipeline stage, or the whole model."""

    spec: ModelSpec
    of_layers: Mapping[str, tuple[Weight, ...]]
    """The weights by the name of their layer. Those of no layer are under "start" and "end",
    without a tied one that a lower chunk of the same rank has."""
    alike: Mapping[str, str]
    """For each layer the first one of the chunk that differs from it in names only."""
    blocks: tuple[Block, ...]
    needs_input_gradient: bool
    """Whether the backward goes on to the chunk, or the embedding, below."""
    needs_head_gradient: bool
    """Whether the backward needs the gradient of the head's input."""
    receives_from: int | None = None
    """The place along `pp` of the other rank that its input comes from; None: from none."""
    sends_to: int | None = None
    """The place along `pp` of the other rank that its output goes to; None: to none."""
    mixers: tuple[Mixer, ...] = ()
    """What context parallelism makes send."""
    mixtures: tuple[Mixture, ...] = ()
    """What expert parallelism makes send."""
    router_experts: tuple[int, ...] = ()
    """The experts of each of its routers that has a load-balancing loss."""

    @cached_property
    def weights(self) -> tuple[Weight, ...]:
        """All weights, in the order of the model."""
        return tuple(weight for weights in self.of_layers.values() for weight in weights)

    @cached_property
    def unlike(self) -> tuple[Weight, ...]:
        """The weights without those of a layer that is like a lower one."""
        of_layers = (
            ws for name, ws in self.of_layers.items() if self.alike.get(name, name) == name
        )
        return tuple(weight for weights in of_layers for weight in weights)

    @property
    def ends(self) -> tuple[Weight, ...]:
        """The weights of no layer."""
        return (*self.of_layers["start"], *self.of_layers["end"])


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
    parts: dict[object, Any] | None = None,
) -> Share:
    """Return what the rank at these coordinates of the mesh holds.

    `boundaries` are those of a pipeline's split: chunk c has the units boundaries[c] to
    boundaries[c + 1] - 1. `parts` are what layers make ranks at the same place along `tp` send in
    layouts of the same run that were computed before; others are added.
    """
    parts = {} if parts is None else parts
    of_layers = _cut_of(cfg, run, coordinates["tp"])
    counts = counts_of(run.hf, run.spec)
    if run.pipeline is None:
        model = _chunk(cfg, run, counts, of_layers, 0, len(counts.units), (), parts)
        return Share((model,), tied=None, context_rank=coordinates["cp"])
    assert boundaries is not None
    counts = with_gradients(counts, cfg.parallel.schedule)
    pipeline, rank = run.pipeline, coordinates["pp"]
    chunks: list[Chunk] = []
    for index in pipeline.chunks_of(rank):
        low, high = boundaries[index : index + 2]
        taken = {weight.name for chunk in chunks for weight in chunk.ends}
        chunk = _chunk(cfg, run, counts, of_layers, low, high, taken, parts)
        below = rank if chunk.spec.first else pipeline.rank_of(index - 1)
        above = rank if chunk.spec.last else pipeline.rank_of(index + 1)
        links = [None if place == rank else place for place in (below, above)]
        chunks.append(replace(chunk, receives_from=links[0], sends_to=links[1]))
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


def shapes_of(cfg: RunConfig, run: Description) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all weights, by name, as the first rank of `tp` and `ep` has them."""
    return {w.name: w.shape for ws in _cut_of(cfg, run, 0).values() for w in ws}


def _cut_of(cfg: RunConfig, run: Description, rank: int) -> Mapping[str, tuple[Weight, ...]]:
    """Return the weights by layer as rank `rank` of `tp` and any of `ep` hold them, one copy each.

    Those of no layer are under "start" and "end".
    """
    parallel, hf = cfg.parallel, as_stored(run.hf, cfg.model.base)
    cut = parallel.tp, parallel.ep, parallel.sequence_parallel, rank
    return _cut_weights(hf, cfg.optimizer.name, run.spec, *cut)


@lru_cache(maxsize=1024)
def _sharded(
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


@lru_cache(maxsize=64)
def _cut_weights(
    hf: PreTrainedModel,
    optimizer: str,
    spec: ModelSpec,
    num_ranks: int,
    num_expert_ranks: int,
    sequence_parallel: bool,
    rank: int,
) -> Mapping[str, tuple[Weight, ...]]:
    """See `_cut_of`."""
    selected = selected_by(optimizer, hf, spec, family_of(hf))
    weights = [
        Weight(name, tuple(p.shape), p.itemsize, p.requires_grad, 1, is_selected=name in selected)
        for name, p in hf.named_parameters()
    ]
    if num_expert_ranks > 1:
        expert_cuts = expert_cuts_of(hf, spec, num_expert_ranks)
        weights = [_of_experts(weight, expert_cuts.get(weight.name)) for weight in weights]
    if num_ranks == 1:
        return _by_layer(spec, weights)
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
        places = accumulate(f"{part}." for part in weight.name.split("."))
        block = next((place for place in places if place in splits), None)
        is_between = block is None and weight.name.startswith(shared_tokens)
        is_inside = block is not None and splits[block] is not None
        return replace(weight, has_partial_gradient=is_between or is_inside)

    return _by_layer(spec, map(of_rank, weights))


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
    of_layers: Mapping[str, tuple[Weight, ...]],
    low: int,
    high: int,
    taken: Collection[str],
    parts: dict[object, Any],
) -> Chunk:
    """Return the chunk of units[low:high], as if no other rank had a part of the model.

    `taken`: weights that a lower chunk of the rank has; `parts`: see `share_of`.
    """
    model, head = run.spec, counts.units[-1]
    is_first, is_last = low == 0, high == len(counts.units)
    first = max(low - 1, 0)
    layers = model.layers[first : high - 1]
    spec = replace(model, layers=layers, first=is_first, last=is_last)
    foreign = tuple(f"{path}." for path in _foreign(model, spec))
    num_shards = num_strategy_ranks(cfg, run.sizes)
    kept: dict[str, tuple[Weight, ...]] = {}
    for name in ("start", *(layer.name for layer in layers), "end"):
        cut = of_layers[name]
        if name in ("start", "end"):
            cut = tuple(w for w in cut if w.name not in taken and not w.name.startswith(foreign))
        kept[name] = _sharded(cut, num_shards, cfg.parallel.ep)
    blocks: list[Block] = []
    mixers: list[Mixer] = []
    mixtures: list[Mixture] = []
    places = first_alike(run.hf, model, cfg.training.checkpointing)
    alike: dict[str, str] = {}
    firsts: dict[int, str] = {}
    parallel = cfg.parallel
    layout = (
        *(str(cfg.training.checkpointing), parallel.schedule, parallel.sequence_parallel),
        *(parallel.tp, parallel.cp, parallel.ep),
    )
    for number, layer in enumerate(layers, first):
        place = places[layer.name]
        alike[layer.name] = firsts.setdefault(place, layer.name)
        of_layer, unit = model.layers[place], counts.units[1 + place]
        weights = of_layers[of_layer.name]
        if parallel.tp > 1:
            if (key := ("blocks", layout, place)) not in parts:
                parts[key] = [*blocks_of(cfg, run, of_layer, unit, weights)]
            blocks += parts[key]
        if parallel.cp > 1:
            if (key := ("mixers", layout, place)) not in parts:
                shapes = {weight.name: weight.shape for weight in weights}
                parts[key] = [*mixers_of(cfg, run.hf, of_layer, unit, shapes)]
            mixers += parts[key]
        if parallel.ep > 1:  # these have a name
            if (key := ("mixtures", layout, number)) not in parts:
                parts[key] = [*mixtures_of(cfg, run, layer, counts.units[1 + number])]
            mixtures += parts[key]
    return Chunk(
        spec=spec,
        of_layers=kept,
        alike=alike,
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


def _tied(spec: ModelSpec, chunks: Iterable[Chunk]) -> Weight | None:
    """Return the tied weight of a rank with one end of the model, if it is trained."""
    first = [chunk for chunk in chunks if chunk.spec.first]
    last = [chunk for chunk in chunks if chunk.spec.last]
    if not spec.tied or bool(first) == bool(last):
        return None
    weights = (first or last)[0].weights
    return next((w for w in weights if w.name == f"{spec.embed}.weight" and w.is_trained), None)
