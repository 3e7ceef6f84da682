"""The weights of a model as one rank of `tp` and `ep` holds them, read off a model on meta."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache

from transformers import PreTrainedModel

from shardwise.assembly.describe import Description
from shardwise.config import RunConfig
from shardwise.models.alike import first_alike
from shardwise.models.dtypes import copied_names
from shardwise.models.expert_plan import cuts_of as expert_cuts_of
from shardwise.models.quantise import as_stored
from shardwise.models.spec import ModelSpec
from shardwise.models.tensor_cuts import DimCut
from shardwise.models.tensor_plan import cuts_of
from shardwise.models.weights import WeightRow, weights_of
from shardwise.parallel.optimizers import OPTIMIZERS
from shardwise.parallel.weights import Weight


def cut_weights(cfg: RunConfig, run: Description, rank: int) -> Mapping[str, tuple[Weight, ...]]:
    """Return the weights by layer as rank `rank` of `tp` and any of `ep` hold them, one copy each.

    Those of no layer are under "start" and "end".
    """
    parallel, hf = cfg.parallel, as_stored(run.hf, cfg.model.base)
    cut = parallel.tp, parallel.ep, parallel.sequence_parallel, rank
    copied = copied_names(cfg, run.hf) if cfg.training.casts_weights else None
    return _cut_weights(hf, run.hf, cfg.optimizer.name, copied, run.spec, *cut)


def shapes_of(cfg: RunConfig, run: Description) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all weights, by name, as the first rank of `tp` and `ep` has them."""
    return {w.name: w.shape for ws in cut_weights(cfg, run, 0).values() for w in ws}


@lru_cache(maxsize=2**14)
def sharded(
    weights: tuple[Weight, ...], num_shards: int, num_expert_ranks: int
) -> tuple[Weight, ...]:
    """Return the weights of a layer with so many shards: candidates of a search often agree."""
    return tuple(weight.sharded(num_shards, num_expert_ranks) for weight in weights)


@lru_cache(maxsize=2)
def _rows(hf: PreTrainedModel, spec: ModelSpec) -> Mapping[str, WeightRow]:
    return {row.name: row for row in weights_of(hf, spec)}


@lru_cache(maxsize=2)
def _whole_weights(
    hf: PreTrainedModel, optimizer: str, copied: frozenset[str] | None, spec: ModelSpec
) -> Mapping[str, tuple[Weight, ...]]:
    """Return the weights by layer as one process holds them."""
    selected = OPTIMIZERS[optimizer].selected(hf, spec)
    tables = tuple(f"{path}." for path in (spec.embed, spec.positions) if path)
    groups: dict[str, list[Weight]] = {"start": [], **{x.name: [] for x in spec.layers}, "end": []}
    for row in _rows(hf, spec).values():
        outside = "start" if row.name.startswith(tables) else "end"
        groups[row.layer.name if row.layer else outside].append(
            Weight(
                row.name,
                row.shape,
                row.dtype.itemsize,
                row.is_trained,
                num_shards=1,
                is_selected=row.name in selected,
                is_wide=copied is not None and row.name not in copied,
            )
        )
    return {name: tuple(group) for name, group in groups.items()}


@lru_cache(maxsize=64)
def _cut_weights(
    stored: PreTrainedModel,
    hf: PreTrainedModel,
    optimizer: str,
    copied: frozenset[str] | None,
    spec: ModelSpec,
    num_ranks: int,
    num_expert_ranks: int,
    sequence_parallel: bool,
    rank: int,
) -> Mapping[str, tuple[Weight, ...]]:
    """See `cut_weights`. Layers that are alike in `hf` are cut once."""
    whole = _whole_weights(stored, optimizer, copied, spec)
    if num_ranks == num_expert_ranks == 1:
        return whole
    places = first_alike(hf, spec, "none")
    firsts = {layer.name: spec.layers[places[layer.name]] for layer in spec.layers}
    few = replace(spec, layers=tuple(dict.fromkeys(firsts.values())))
    layout = num_ranks, num_expert_ranks, sequence_parallel, rank
    on_a_rank = _in_rank(stored, few, _rows(stored, spec), *layout)
    cut = {
        name: tuple(map(on_a_rank, whole[name]))
        for name in ("start", *(layer.name for layer in few.layers), "end")
    }
    by_layer = {
        name: tuple(
            replace(w, name=name + w.name.removeprefix(first.name)) for w in cut[first.name]
        )
        for name, first in firsts.items()
    }
    return {"start": cut["start"], **by_layer, "end": cut["end"]}


def _in_rank(
    hf: PreTrainedModel,
    spec: ModelSpec,
    rows: Mapping[str, WeightRow],
    num_ranks: int,
    num_expert_ranks: int,
    sequence_parallel: bool,
    rank: int,
) -> Callable[[Weight], Weight]:
    """Return what makes of a weight of these layers, or of none, that of a rank."""
    expert_cuts = expert_cuts_of(hf, spec, num_expert_ranks) if num_expert_ranks > 1 else {}
    cuts = cuts_of(hf, spec, num_ranks) if num_ranks > 1 else {}

    def on_a_rank(weight: Weight) -> Weight:
        weight, row = _of_experts(weight, expert_cuts.get(weight.name)), rows[weight.name]
        if num_ranks == 1:
            return weight
        if row.role == "ends":
            most = -(-weight.shape[0] // num_ranks)
            num_rows = min(most, weight.shape[0] - rank * most)
            return replace(weight, shape=(num_rows, *weight.shape[1:]), tp_dim=0)
        if weight.name in cuts:
            return _cut(weight, cuts[weight.name], rank)
        if row.block is not None:
            return replace(weight, has_partial_gradient=row.block.kind.split is not None)
        # With sequence parallelism a rank has its share of the tokens between blocks.
        is_between = row.layer is not None or row.name.startswith(f"{spec.norm}.")
        return replace(weight, has_partial_gradient=sequence_parallel and is_between)

    return on_a_rank


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
