"""What each rank of a layout holds and sends, as data for a diagram: `ranks.py` draws it.

Bytes are those of `memory.py`, `peak.py` and `communication.py` of `shardwise.lab.planner`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product

from tools.pictures.ranks import Held, Holding

from shardwise.assembly.costs import choose_split, counted_costs
from shardwise.assembly.describe import Description
from shardwise.base.layouts import (
    AXES,
    Facts,
    axis_sizes,
    context_joins_of,
    num_strategy_ranks,
    strategy_facts,
)
from shardwise.base.schedule.costs import Cost
from shardwise.base.schedule.split import Split
from shardwise.config import RunConfig, rules
from shardwise.lab.planner.communication import bytes_leaving, messages_of_step
from shardwise.lab.planner.memory import PeakBytes, state_bytes
from shardwise.lab.planner.messages import Share, sizes_of
from shardwise.lab.planner.peak import Rank
from shardwise.lab.planner.share import share_of
from shardwise.models.activations import UnitMemory
from shardwise.models.facts import context_facts
from shardwise.parallel.pipeline_parallel import pipeline_of


@dataclass(frozen=True)
class Placed:
    """A run on its ranks: the coordinates of each in the mesh, and its share of the model."""

    cfg: RunConfig
    run: Description
    split: Split | None
    """Where a pipeline is cut, by counted costs; None without one."""
    places: list[dict[str, int]]
    shares: list[Share]
    units: tuple[Cost, ...] = ()
    """The costs of the units that a pipeline is cut by."""

    @classmethod
    def of(cls, cfg: RunConfig, model: Description, num_ranks: int) -> Placed:
        """Place a run of a model that was described for one process; UserError if it may not be."""
        rules.check(cfg, Facts(num_ranks))
        pipeline = pipeline_of(cfg, num_ranks)
        run = replace(model, sizes=axis_sizes(cfg, num_ranks), pipeline=pipeline)
        split, boundaries, units = None, None, ()
        if pipeline is not None:  # not by a profile of the machine at hand
            units = counted_costs(cfg, run.hf, run.spec, num_processes=num_ranks)
            split = choose_split(cfg, units, pipeline.num_microbatches)
            boundaries = split.boundaries
        places = [dict(zip(run.sizes, place)) for place in product(*map(range, run.sizes.values()))]
        # Ranks along data axes have the same share, of which each holds its part.
        shares = {
            _inside(place): share_of(cfg, run, place, boundaries)
            for place in places
            if not place["dp_replicate"] + place["dp_shard"]
        }
        shares_of_ranks = [shares[_inside(place)] for place in places]
        return cls(cfg, run, split, places, shares_of_ranks, units)

    def states(self, chosen: set[str]) -> list[dict[str, int]]:
        """Return the bytes of weights, gradients and states of the named weights, on each rank."""
        return [
            state_bytes(self.cfg, _only(share, chosen), self.run.sizes, place)
            for share, place in zip(self.shares, self.places)
        ]

    def most(self, part: str, when: str = "") -> list[int]:
        """Return the most bytes of a part at moments whose name begins so, on each rank."""
        return [
            max(getattr(m, part) for m in moments if m.moment.startswith(when))
            for moments in self.moments
        ]

    @cached_property
    def ranks(self) -> list[Rank]:
        """Each rank with the moments of its step; those of one share are one."""
        units: dict[object, UnitMemory] = {}
        of_shares = {
            id(share): Rank(self.cfg, self.run, share, place, units)
            for share, place in zip(reversed(self.shares), reversed(self.places))
        }
        return [of_shares[id(share)] for share in self.shares]

    @cached_property
    def moments(self) -> list[list[PeakBytes]]:
        """The moments of a step, on each rank."""
        of_ranks = {id(rank): [*rank.moments()] for rank in self.ranks}
        return [of_ranks[id(rank)] for rank in self.ranks]

    @property
    def kept(self) -> list[int]:
        """The most bytes of activations in a forward, on each rank."""
        return [rank.kept_in_forwards() for rank in self.ranks]

    @property
    def layers(self) -> list[str]:
        """The layers of each rank of a pipeline, and what a stage without layers has."""
        assert self.split is not None
        assert self.run.pipeline is not None
        texts = []
        for rank in range(self.run.pipeline.num_ranks):
            own: list[str] = []
            for chunk in self.run.pipeline.chunks_of(rank):
                contents = self.split.contents(chunk)
                own += [part for part in contents if part[0].isdigit()] or contents
            texts.append(", ".join(part.replace("-", "–") for part in own))
        return texts

    def groups(self, axis: str) -> list[list[int]]:
        """Return the ranks of each group along an axis."""
        parts = {"ep": (context_joins_of(self.cfg),)}.get(axis, (axis,))
        others: dict[tuple[int, ...], list[int]] = {}
        for rank, place in enumerate(self.places):
            key = tuple(place[name] for name in AXES if name not in parts)
            others.setdefault(key, []).append(rank)
        return [*others.values()]

    @cached_property
    def leaving(self) -> list[dict[tuple[str, str], int]]:
        """The bytes that leave a rank, by kind of message and axis: an entry for each share."""
        sizes = sizes_of(self.cfg, self.run)
        return [
            {key: bytes_leaving({key: total}, sizes) for key, total in messages.items()}
            for share in {id(share): share for share in self.shares}.values()
            for messages in [messages_of_step(self.cfg, self.run, share)]
        ]


def _inside(place: Mapping[str, int]) -> tuple[int, ...]:
    """Return the coordinates that decide which share of a model a rank has."""
    return place["pp"], place["cp"], place["tp"]


def _only(share: Share, chosen: set[str]) -> Share:
    chunks = []
    for chunk in share.chunks:
        kept = {
            layer: tuple(weight for weight in weights if weight.name in chosen)
            for layer, weights in chunk.by_layer.items()
        }
        chunks.append(replace(chunk, by_layer=kept))
    return replace(share, chunks=tuple(chunks))


@dataclass(frozen=True)
class Section:
    """A stretch of a part whose pieces are cut along the same axes."""

    axes: tuple[str, ...]
    num_bytes: Sequence[int]
    """Bytes that each rank holds of it."""
    whole: int
    """Bytes of the complete section."""


def _cut_axes(cfg: RunConfig, part: str) -> tuple[str, ...]:
    """Return the axes along which ranks hold different pieces of a part."""
    parallel = cfg.parallel
    if part == "activations":
        return ("cp", "tp") if parallel.sequence_parallel else ("cp",)
    sharded = strategy_facts(parallel).sharded
    held_with = {"adapters": "weights"}.get(part, part)
    data = (context_joins_of(cfg), "cp") if held_with in sharded else ()
    return ("pp", "tp", *data)


def _pieces_of(
    placed: Placed, section: Section, whole: int, offset: float = 0.0
) -> list[tuple[float, float]]:
    """Return where each rank's piece lies in the complete part, in order of the ranks."""
    keys = [tuple(place[axis] for axis in section.axes) for place in placed.places]
    sizes = dict(zip(keys, section.num_bytes))
    total, begin, begins = sum(sizes.values()) or 1, 0, {}
    for key in sorted(sizes):
        begins[key] = begin
        begin += sizes[key]
    pieces = []
    for key, held in zip(keys, section.num_bytes):
        share = min(1.0, held / whole)
        end = min(1.0, max(share, total / whole))
        pieces.append((offset + min(begins[key] / total * end, 1.0 - share), share))
    return pieces


def holding_of(placed: Placed, one: Placed, title: str) -> Holding:
    """Return what each rank holds of a model, beside `one` process with all of it."""
    cfg, weights = placed.cfg, [w for share in placed.shares for w in share.weights]
    routed = {w.name for w in weights if w.ep_dim is not None}
    whole = {w.name for w in weights if w.tp_dim is None} if cfg.parallel.tp > 1 else set[str]()
    cut = {w.name for w in weights} - routed - whole
    adapters = {w.name for w in weights if w.is_trained} if cfg.lora else set[str]()

    def sections_of(part: str, name: str, of: Callable[[set[str]], set[str]]) -> list[Section]:
        axes, sections = _cut_axes(cfg, part), list[Section]()
        for cut_along, names in (
            (tuple(axis for axis in axes if axis != "tp"), whole - routed),
            (axes, cut),
            ((*axes, context_joins_of(cfg)), routed),
        ):
            total = one.states(of(names))[0][name]
            if total:
                num_bytes = [states[name] for states in placed.states(of(names))]
                sections.append(Section(cut_along, num_bytes, total))
        return sections

    def held(part: str, name: str, of: Callable[[set[str]], set[str]]) -> Held:
        return _held(placed, part, sections_of(part, name, of))

    parts = [held("weights", "weights", lambda names: names - routed - adapters)]
    if routed:
        parts.append(held("experts", "weights", lambda names: (names & routed) - adapters))
    if cfg.lora is not None:
        parts.append(held("adapters", "weights", lambda names: names & adapters))
    gradients = held("gradients", "gradients", set)
    num_copies = num_strategy_ranks(cfg, placed.run.sizes)
    if num_copies > 1 and max(placed.most("gradients")) >= num_copies * max(gradients.num_bytes):
        # A rank keeps its piece when all have been summed, once a step.
        before = sections_of("gradients before their sum", "gradients", set)
        before = [replace(s, num_bytes=[n * num_copies for n in s.num_bytes]) for s in before]
        both = zip(_held(placed, "gradients", before).pieces, gradients.pieces)
        gradients = replace(
            gradients,
            num_bytes=placed.most("gradients"),
            pieces=[(*passing, *own) for passing, own in both],
            num_passing=len(before),
        )
    parts.append(gradients)

    def all_of(part: str, num_bytes: Sequence[int], total: int) -> Held:
        return _held(placed, part, [Section(_cut_axes(cfg, part), num_bytes, total)])

    has_buckets = num_copies > 1 and not strategy_facts(cfg.parallel).sharded
    if has_buckets and any(buckets := placed.most("buffers", "backward")):
        parts.append(all_of("buckets", buckets, gradients.whole))
    parts.append(held("optimizer", "optimizer", set))
    # What layers keep: with the head's, which is freed at once, no layer is left to compute.
    parts.append(all_of("activations", placed.kept, *one.kept))
    return Holding(title, *_works(placed), parts)


def _held(placed: Placed, part: str, sections: Sequence[Section]) -> Held:
    """Return a part that consists of sections."""
    whole, offset = sum(section.whole for section in sections), 0.0
    pieces: list[list[tuple[float, float]]] = [[] for _ in placed.places]
    for section in sections:
        for rank, piece in enumerate(_pieces_of(placed, section, whole, offset)):
            pieces[rank].append(piece)
        offset += section.whole / whole
    num_bytes = [sum(of_rank) for of_rank in zip(*(section.num_bytes for section in sections))]
    return Held(part, num_bytes, whole, pieces)


def _works(placed: Placed) -> tuple[str, list[str]]:
    """Return what differs between ranks, and which of it each one has."""
    cfg, sizes, places = placed.cfg, placed.run.sizes, placed.places
    used = {axis for axis in AXES if sizes[axis] > 1}
    if cfg.parallel.ep > 1:
        (each,) = {mixture.num_experts for mixture in placed.shares[0].chunks[0].sending["ep"]}
        each //= cfg.parallel.ep
        return "experts", [f"{rank * each}–{(rank + 1) * each - 1}" for rank in range(len(places))]
    if used == {"pp"}:
        return "layers", placed.layers
    if used == {"cp"}:
        _, cut = context_facts(placed.run.hf, placed.run.spec).way_and_cut(cfg.parallel)
        number = cut.num_ranks * cut.chunks_per_rank
        chunks = [cut.chunks(place["cp"]) for place in places]
        texts = [", ".join(str(chunk + 1) for chunk in own) for own in chunks]
        return "row's pieces", [f"{text} of {number}" for text in texts]
    if used == {"tp"}:
        return "rows", ["all"] * len(places)
    if used <= {"dp_replicate", "dp_shard"}:
        share = cfg.training.global_batch_size // len(places)
        return "rows", [f"{r * share}–{(r + 1) * share - 1}" for r in range(len(places))]
    names = {"pp": "pp", "dp_shard": "dp", "tp": "tp"}
    return "place", [
        " ".join(f"{names[a]}{place[a]}" for a in AXES if a in used) for place in places
    ]
