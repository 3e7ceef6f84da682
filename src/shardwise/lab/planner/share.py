"""The share of a model that one rank holds along `pp`, `tp` and `ep`, read off a model on meta.

A pipeline gives a rank its chunks, tensor parallelism its rows of each weight, expert parallelism
its experts. What data parallelism then does with the share is in `communication.py` and
`memory.py`. Nothing here needs a process group or memory for weights.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

from shardwise.assembly.costs import choose_split, costs_of, with_gradients
from shardwise.assembly.describe import Description
from shardwise.base.layouts import num_strategy_ranks
from shardwise.config import RunConfig
from shardwise.lab.planner.axes import AXES
from shardwise.lab.planner.messages import ChunkShare, Share
from shardwise.lab.planner.weights import cut_weights, sharded
from shardwise.models.alike import counts_of, first_alike
from shardwise.models.counts import ModelCounts
from shardwise.models.spec import ModelSpec
from shardwise.parallel.weights import Weight


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
    by_layer = cut_weights(cfg, run, coordinates["tp"])
    counts = counts_of(run.hf, run.spec)
    if run.pipeline is None:
        model = _chunk(cfg, run, counts, by_layer, 0, len(counts.units), (), parts)
        return Share((model,), tied=None, context_rank=coordinates["cp"])
    assert boundaries is not None
    counts = with_gradients(counts, cfg.parallel.schedule)
    pipeline, rank = run.pipeline, coordinates["pp"]
    chunks: list[ChunkShare] = []
    for index in pipeline.chunks_of(rank):
        low, high = boundaries[index : index + 2]
        taken = {weight.name for chunk in chunks for weight in chunk.ends}
        chunk = _chunk(cfg, run, counts, by_layer, low, high, taken, parts)
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


class Shares:
    """The shares of a pipeline's ranks that are first along every other axis, each made once."""

    def __init__(
        self,
        cfg: RunConfig,
        run: Description,
        boundaries: Sequence[int] | None = None,
        parts: dict[object, Any] | None = None,
    ) -> None:
        """Take a run; `boundaries` (by default those that the run would choose), `parts`: see
        `share_of`.
        """
        self.cfg, self.run = cfg, run
        self._parts: dict[object, Any] = {} if parts is None else parts
        self.boundaries = boundaries_of(cfg, run) if boundaries is None else boundaries
        self._by_stage: dict[int, Share] = {}

    def place(self, stage: int) -> dict[str, int]:
        """Return the coordinates of the rank at a place along `pp`."""
        return {**dict.fromkeys(self.run.sizes, 0), "pp": stage}

    def of(self, stage: int) -> Share:
        """Return the share of the rank at a place along `pp`."""
        if stage not in self._by_stage:
            place = self.place(stage)
            self._by_stage[stage] = share_of(
                self.cfg, self.run, place, self.boundaries, self._parts
            )
        return self._by_stage[stage]


def _chunk(
    cfg: RunConfig,
    run: Description,
    counts: ModelCounts,
    by_layer: Mapping[str, tuple[Weight, ...]],
    low: int,
    high: int,
    taken: Collection[str],
    parts: dict[object, Any],
) -> ChunkShare:
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
        cut = by_layer[name]
        if name in ("start", "end"):
            cut = tuple(w for w in cut if w.name not in taken and not w.name.startswith(foreign))
        kept[name] = sharded(cut, num_shards, cfg.parallel.ep)
    used = [axis for axis in AXES if getattr(cfg.parallel, axis.name) > 1]
    sending: dict[str, list[Any]] = {axis.name: [] for axis in AXES}
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
        for axis in used:
            chosen = number if axis.has_names else place
            if (key := (axis.name, layout, chosen)) not in parts:
                first_layer = model.layers[chosen]
                given = first_layer, counts.units[1 + chosen], by_layer[first_layer.name]
                parts[key] = [*axis.parts(cfg, run, *given)]
            sending[axis.name] += parts[key]
    return ChunkShare(
        spec=spec,
        by_layer=kept,
        alike=alike,
        needs_input_gradient=counts.units[max(low - 1, 0)].backward,
        needs_head_gradient=is_last and all(weight.input_gradient for weight in head.weights),
        sending={name: tuple(found) for name, found in sending.items()},
    )


def _foreign(model: ModelSpec, stage: ModelSpec) -> Iterator[str]:
    """Yield the modules beside layers that a stage leaves to others."""
    if not stage.first and not (stage.last and model.tied):
        yield model.embed
    if not stage.first and model.positions is not None:
        yield model.positions
    if not stage.last:
        yield from (model.norm, model.head)


def _tied(spec: ModelSpec, chunks: Iterable[ChunkShare]) -> Weight | None:
    """Return the tied weight of a rank with one end of the model, if it is trained."""
    first = [chunk for chunk in chunks if chunk.spec.first]
    last = [chunk for chunk in chunks if chunk.spec.last]
    if not spec.tied or bool(first) == bool(last):
        return None
    weights = (first or last)[0].weights
    return next((w for w in weights if w.name == f"{spec.embed}.weight" and w.is_trained), None)
