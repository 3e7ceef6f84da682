"""What each rank of a layout holds and sends, as data for a diagram: `drawing/ranks.py` draws it.

Bytes are those of `memory.py`, `peak.py` and `communication.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product

from shardwise import rules
from shardwise.assembly.costs import choose_split, counted_costs
from shardwise.assembly.describe import Description
from shardwise.config import RunConfig
from shardwise.drawing.ranks import Held, Holding
from shardwise.layouts import AXES, Facts, axis_sizes, context_joins_of, num_strategy_ranks
from shardwise.models.activations import UnitMemory
from shardwise.models.facts import context_facts
from shardwise.parallel.pipeline_parallel import pipeline_of
from shardwise.planner.communication import bytes_leaving, messages_of_step
from shardwise.planner.memory import Memory, state_bytes
from shardwise.planner.messages import sizes_of
from shardwise.planner.peak import Rank
from shardwise.planner.share import Share, share_of
from shardwise.planner.weights import Weight
from shardwise.schedule.split import Split


@dataclass(frozen=True)
class Placed:
    """A run on its ranks: the coordinates of each in the mesh, and its share of the model."""

    cfg: RunConfig
    run: Description
    split: Split | None
    """Where a pipeline is cut, by counted costs; None without one."""
    places: list[dict[str, int]]
    shares: list[Share]

    @classmethod
    def of(cls, cfg: RunConfig, model: Description, num_ranks: int) -> Placed:
        """Place a run of a model that was described for one process; UserError if it may not be."""
        rules.check(cfg, Facts(num_ranks))
        pipeline = pipeline_of(cfg, num_ranks) if cfg.parallel.pp > 1 else None
        run = replace(model, sizes=axis_sizes(cfg, num_ranks), pipeline=pipeline)
        split = boundaries = None
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
        return cls(cfg, run, split, places, shares_of_ranks)

    def states(self, chosen: Callable[[Weight], bool]) -> list[dict[str, int]]:
        """Return the bytes of weights, gradients and states of these weights, on each rank."""
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
    def moments(self) -> list[list[Memory]]:
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
    def leaving(self) -> dict[tuple[str, str], int]:
        """The bytes that leave the rank that sends most, by kind of message and axis."""
        sizes, most = sizes_of(self.cfg, self.run), dict[tuple[str, str], int]()
        for share in {id(share): share for share in self.shares}.values():
            for key, total in messages_of_step(self.cfg, self.run, share).items():
                most[key] = max(most.get(key, 0), bytes_leaving({key: total}, sizes))
        return most


def _inside(place: Mapping[str, int]) -> tuple[int, ...]:
    """Return the coordinates that decide which share of a model a rank has."""
    return place["pp"], place["cp"], place["tp"]


def _only(share: Share, chosen: Callable[[Weight], bool]) -> Share:
    chunks = []
    for chunk in share.chunks:
        kept = {name: tuple(filter(chosen, weights)) for name, weights in chunk.of_layers.items()}
        chunks.append(replace(chunk, of_layers=kept))
    return replace(share, chunks=tuple(chunks))


def _cut_axes(cfg: RunConfig, part: str) -> tuple[str, ...]:
    """Return the axes along which ranks hold different pieces of a part."""
    parallel = cfg.parallel
    if part == "activations":
        return ("cp", "tp") if parallel.sequence_parallel else ("cp",)
    sharded = {
        "zero1": ("optimizer", "gradients"),
        "zero2": ("optimizer", "gradients"),
        "fsdp1": ("weights", "adapters", "gradients", "optimizer"),
        "fsdp2": ("weights", "adapters", "gradients", "optimizer"),
    }.get(parallel.data, ())
    data = (context_joins_of(cfg), "cp") if part in sharded else ()
    experts = (context_joins_of(cfg),) if part == "experts" else ()
    return ("pp", "tp", *data, *experts)


def _pieces_of(
    placed: Placed, part: str, num_bytes: Sequence[int], whole: int, offset: float = 0.0
) -> list[tuple[float, float]]:
    """Return where each rank's piece lies in the complete part, in order of the ranks."""
    axes = _cut_axes(placed.cfg, part)
    keys = [tuple(place[axis] for axis in axes) for place in placed.places]
    sizes = dict(zip(keys, num_bytes))
    total, begin, begins = sum(sizes.values()) or 1, 0, {}
    for key in sorted(sizes):
        begins[key] = begin
        begin += sizes[key]
    pieces = []
    for key, held in zip(keys, num_bytes):
        share = min(1.0, held / whole)
        end = min(1.0, max(share, total / whole))
        pieces.append((offset + min(begins[key] / total * end, 1.0 - share), share))
    return pieces


def holding_of(placed: Placed, one: Placed, title: str) -> Holding:
    """Return what each rank holds of a model, beside `one` process with all of it."""
    routed = {w.name for share in placed.shares for w in share.weights if w.ep_dim is not None}
    is_lora = placed.cfg.lora is not None

    def held(part: str, name: str, *choices: Callable[[Weight], bool]) -> Held:
        of_ranks = [[states[name] for states in placed.states(chosen)] for chosen in choices]
        wholes = [one.states(chosen)[0][name] for chosen in choices]
        return _held(placed, part, of_ranks, wholes)

    def is_dense(weight: Weight) -> bool:
        return weight.name not in routed

    def is_routed(weight: Weight) -> bool:
        return weight.name in routed

    parts = [held("weights", "weights", lambda w: is_dense(w) and not (is_lora and w.is_trained))]
    if routed:
        parts.append(
            held("experts", "weights", lambda w: is_routed(w) and not (is_lora and w.is_trained))
        )
    choices = (is_dense, *[is_routed] * bool(routed))
    if is_lora:
        parts.append(held("adapters", "weights", *map(_trained, choices)))
    gradients = held("gradients", "gradients", *choices)
    num_copies = num_strategy_ranks(placed.cfg, placed.run.sizes)
    if num_copies > 1 and max(placed.most("gradients")) >= num_copies * max(gradients.num_bytes):
        gradients = _whole_first(placed, gradients)
    parts.append(gradients)
    if placed.cfg.parallel.data == "ddp" and any(buckets := placed.most("buffers", "backward")):
        parts.append(_held(placed, "buckets", [buckets], [gradients.whole]))
    parts.append(held("optimizer", "optimizer", *choices))
    # What layers keep: with the head's, which is freed at once, no layer is left to compute.
    parts.append(_held(placed, "activations", [placed.kept], one.kept))
    return Holding(title, *_works(placed), parts)


def _trained(chosen: Callable[[Weight], bool]) -> Callable[[Weight], bool]:
    return lambda weight: weight.is_trained and chosen(weight)


def _whole_first(placed: Placed, gradients: Held) -> Held:
    """Return gradients of which a rank keeps its piece when all have been summed, once a step."""
    most = placed.most("gradients")
    pieces = _pieces_of(placed, "gradients before their sum", most, gradients.whole)
    both = [(piece, *own) for piece, own in zip(pieces, gradients.pieces)]
    return replace(gradients, num_bytes=most, pieces=both, is_whole_first=True)


def _held(
    placed: Placed, part: str, of_ranks: Sequence[Sequence[int]], wholes: Sequence[int]
) -> Held:
    """Return a part that consists of sections, each with bytes on every rank and in all."""
    whole, offset = sum(wholes), 0.0
    pieces: list[list[tuple[float, float]]] = [[] for _ in placed.places]
    for place, (num_bytes, section) in enumerate(zip(of_ranks, wholes, strict=True)):
        name = "experts" if place else part
        for rank, piece in enumerate(_pieces_of(placed, name, num_bytes, whole, offset)):
            pieces[rank].append(piece)
        offset += section / whole
    return Held(part, [sum(sections) for sections in zip(*of_ranks)], whole, pieces)


def _works(placed: Placed) -> tuple[str, list[str]]:
    """Return what differs between ranks, and which of it each one has."""
    cfg, sizes, places = placed.cfg, placed.run.sizes, placed.places
    used = {axis for axis in AXES if sizes[axis] > 1}
    if cfg.parallel.ep > 1:
        (each,) = {mixture.num_experts for mixture in placed.shares[0].chunks[0].mixtures}
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
