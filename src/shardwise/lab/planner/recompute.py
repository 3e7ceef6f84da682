"""The parts of layers that a run keeps within a budget of memory; others are computed again.

The memory is that of `peak.py`, for the rank of each pipeline stage that has most of it, and the
price of computing a layer again is its FLOPs, or its measured seconds where the cache has a profile
(`shardwise split --profile`). Nothing here needs weights.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise
from math import prod
from typing import Any

import psutil

from shardwise.assembly.costs import costs_of, with_gradients
from shardwise.assembly.describe import Describe, Description, describe
from shardwise.assembly.recomputation import Chosen
from shardwise.base.interfaces import Mesh
from shardwise.base.layouts import Facts
from shardwise.base.schedule.knapsack import Bounds, ChunkOptions, Option, choose
from shardwise.base.words import size
from shardwise.config import Checkpointing, Lora, RunConfig, UserError, Way, require, rules
from shardwise.lab.planner.memory import USABLE, PeakBytes
from shardwise.lab.planner.passes import FORWARD, Moment
from shardwise.lab.planner.peak import Rank, memory_of_run
from shardwise.lab.planner.share import Shares, boundaries_of, counts_of
from shardwise.lab.planner.unit_work import work_of_units
from shardwise.metrics.flops import unit_flops_per_token
from shardwise.models.activations import UnitMemory, seen_by_units
from shardwise.models.adapters import peft_config
from shardwise.models.alike import first_alike, known
from shardwise.parallel.reduce import from_every_rank

WAYS: tuple[Way, ...] = ("none", "operators", "full")
UNBOUNDED = 2**62
MANY_TOKENS = 2**18
"""The tokens of a micro-batch from which on it is asked whether a CPU's memory holds a step."""
Boundaries = tuple[int, ...] | None
Prices = Mapping[Way, Sequence[int]]
"""Cost of computing each unit again, by way."""


def chosen_of(
    cfg: RunConfig, mesh: Mesh, adapter: Lora | None = None, describe: Describe = describe
) -> Chosen | None:
    """Return what a run's budget chooses, the same on every rank; None where it has no budget.

    `adapter`: the section `lora` of the checkpoint that the run resumes. `describe`: see `build`. A
    collective of all ranks.
    UserError where nothing is within the budget, or a CPU's memory is far too small.
    """
    tokens = cfg.training.micro_batch_size * cfg.data.sequence_length
    is_huge = mesh.device.type == "cpu" and tokens >= MANY_TOKENS
    if cfg.training.budget_bytes is None and not is_huge:
        return None
    cfg = peft_config.resumed(cfg, adapter)
    run = describe(cfg, mesh.dense.size(), mesh.device)
    if cfg.training.budget_bytes is None:
        _check_room(cfg, run)
        return None
    # Some words per layer from every rank to all: a node may have another profile, or none.
    return from_every_rank(within_budget(cfg, run, mesh.device.type))[0]


def _check_room(cfg: RunConfig, run: Description) -> None:
    """Raise UserError, on every rank alike, for a run of which one rank needs more than a node has.

    Linux ends a process without a word where there is no more memory; a GPU's runtime has an error.
    """
    if not run.facts.is_listed or cfg.parallel.offload == "disk":
        return  # no formula is about their memory
    needed = memory_of_run(_on(cfg, "cpu"), run).total
    # A number from every rank to all: nodes may differ.
    most = max(from_every_rank(psutil.virtual_memory().total))
    length = cfg.data.sequence_length
    require(
        needed <= most,
        f"{cfg.training.micro_batch_size} rows of {length:,} tokens in a micro-batch take "
        f"{size(needed)} of a process, and this machine has {size(most)}; lower "
        "data.sequence_length or training.micro_batch_size",
    )


class TooSmallError(UserError):
    """Nothing is within a budget."""


def within_budget(
    cfg: RunConfig,
    run: Description,
    device: Any,
    is_here: bool = True,
    boundaries: Boundaries = None,
    memories: dict[object, UnitMemory] | None = None,
    tells_least: bool = True,
) -> Chosen:
    """Return the cheapest choice in which every rank is within the budget.

    `device`: cpu or cuda, whose memory it is. `is_here`: it is one of this machine, whose profiles
    have prices. `boundaries`: those of a pipeline's split. By default the splits are tried that the
    run would choose if nothing were computed again, only operators or everything. `memories`: see
    `memory_of_share`. TooSmallError where nothing is within this one, with the smallest possible
    budget if `tells_least`: that takes as long as twenty choices.
    """
    budget = cfg.training.budget_bytes
    assert budget is not None
    ways = allowed_ways(cfg, prod(run.sizes.values()))
    memories = {} if memories is None else memories
    splits = dict.fromkeys([boundaries or boundaries_of(as_way(cfg, way), run) for way in ways])
    prices, source = _measured(cfg, run, ways) if is_here else ({}, "")
    if not prices:
        key = "prices", seen_by_units(cfg, run.hf, run.spec, "any"), run.spec, ways
        prices = known(run.hf, key, lambda: _counted(cfg, run, ways))
        source = "FLOPs"
    open_cfg = as_way(_on(cfg, device), "none")

    def stages(split: Boundaries) -> _Stages:
        # Other budgets ask for the same ones.
        key = "stages", repr((open_cfg, run.sizes, split, ways, prices))
        return known(run.hf, key, lambda: _Stages(open_cfg, run, split, ways, prices, memories))

    plans = [*map(stages, splits)]
    found = [plan.choice(int(USABLE * budget)) for plan in plans]
    chosen = [replace(one, source=source, budget_bytes=budget) for one in found if one is not None]
    if not chosen and not tells_least:
        raise TooSmallError(f"nothing is within a budget of {budget / 2**30:.3g} GiB")
    if not chosen:
        least = min(plan.least() for plan in plans) / USABLE
        raise TooSmallError(
            f"training.checkpointing: budget_gib is {budget / 2**30:.3g}, and the smallest that "
            f"this run can keep is {_rounded_up(least / 2**30)}; raise it, lower "
            "training.micro_batch_size or data.sequence_length, or share the model over more ranks"
        )
    return min(chosen, key=lambda one: one.price)


def _on(cfg: RunConfig, device: Any) -> RunConfig:
    return replace(cfg, training=replace(cfg.training, device=device))


def as_way(cfg: RunConfig, way: Checkpointing) -> RunConfig:
    """Return the run with another `training.checkpointing`."""
    return replace(cfg, training=replace(cfg.training, checkpointing=way))


def allowed_ways(cfg: RunConfig, num_ranks: int) -> tuple[Way, ...]:
    """Return the ways that no rule refuses, from the fastest and largest one."""
    facts = Facts(num_ranks)
    return tuple(way for way in WAYS if not [*rules.refusals(as_way(cfg, way), facts)])


def _measured(cfg: RunConfig, run: Description, ways: Sequence[Way]) -> tuple[Prices, str]:
    """Return the nanoseconds of computing each unit again; {} without a profile of every way."""
    seconds = {}
    for way in ways:
        costs, source = costs_of(as_way(cfg, way), run.hf, run.spec, None, prod(run.sizes.values()))
        if not source.is_measured:
            return {}, ""
        seconds[way] = [cost.backward_seconds for cost in costs]
    return {
        way: [max(0, round(1e9 * (a - b))) for a, b in zip(own, seconds["none"], strict=True)]
        for way, own in seconds.items()
    }, "measured seconds"


def _counted(cfg: RunConfig, run: Description, ways: Sequence[Way]) -> Prices:
    """Return the FLOPs of computing each unit again, and by what equal FLOPs are ordered.

    That is the numbers that go through products: the traffic of what is computed beside them.
    """
    counts = with_gradients(counts_of(run.hf, run.spec), cfg.parallel.schedule)
    length, prices = cfg.data.sequence_length, dict[Way, list[int]]()
    tokens = cfg.training.micro_batch_size * length
    alike = first_alike(run.hf, run.spec, "none")
    firsts = [1 + alike.get(unit.name, place - 1) for place, unit in enumerate(counts.units)]
    for way in ways:
        works = work_of_units(as_way(cfg, way), run.hf, run.spec)
        elements = [int(work.rest_again.elements) for work in works]
        flops_of = {
            place: unit_flops_per_token(counts.units[place], length, way).recomputed
            - unit_flops_per_token(counts.units[place], length, "none").recomputed
            for place in {*firsts}
        }
        flops = [flops_of[place] for place in firsts]
        prices[way] = [(round(f * tokens) << 64) + e for f, e in zip(flops, elements, strict=True)]
    return prices


class _Stages:
    """The ranks of a run that differ: the first one of each place in the pipeline."""

    def __init__(
        self,
        cfg: RunConfig,
        run: Description,
        boundaries: Boundaries,
        ways: Sequence[Way],
        prices: Prices,
        memories: dict[object, UnitMemory],
    ) -> None:
        self.cfg, self.run, self.ways, self.prices = cfg, run, ways, prices
        self.boundaries, self.memories = boundaries, memories
        self.shares = Shares(cfg, run, boundaries)
        self._peak = cache(lambda stage, way: self.ranks[stage][way].peak().total)
        self.num_stages = run.sizes["pp"]
        num_units = len(run.spec.layers) + 2
        pipeline, edges = run.pipeline, boundaries or (0, num_units)
        by_rank = [[0]] if pipeline is None else map(pipeline.chunks_of, range(self.num_stages))
        self.places = [[range(*edges[chunk : chunk + 2]) for chunk in own] for own in by_rank]
        """The units of each chunk of each rank, by their numbers in the model."""
        self.ranks = [
            {way: self._rank(as_way(cfg, way), stage) for way in ways}
            for stage in range(self.num_stages)
        ]

    def _rank(self, cfg: RunConfig, stage: int) -> Rank:
        place = self.shares.place(stage)
        return Rank(cfg, self.run, self.shares.of(stage), place, self.memories)

    def choice(self, most: int) -> Chosen | None:
        """Return the cheapest choice within so many bytes on every rank, None if there is none."""
        ways: list[Way] = ["none"] * (len(self.run.spec.layers) + 2)
        memories = []
        for stage in range(self.num_stages):
            numbers = self._of_rank(stage, most)
            if numbers is None:
                return None
            for chunk, own in zip(self.places[stage], numbers, strict=True):
                for unit, number in zip(chunk, own, strict=True):
                    ways[unit] = self.ways[number]
            memories.append(self._memory(stage, numbers))
            assert memories[-1].total <= most, (memories[-1], most)
        edges = self.boundaries
        last = len(ways) - 1
        split = (
            None
            if edges is None
            else [min(high, last) - max(low, 1) for low, high in pairwise(edges)]
        )
        return Chosen(
            budget_bytes=0,
            ways=tuple(ways[1:-1]),
            split=None if split is None else tuple(split),
            peak_bytes=tuple(memory.total for memory in memories),
            moments=tuple(memory.moment for memory in memories),
            price=sum(self.prices[way][unit] for unit, way in enumerate(ways)),
            most=sum(self.prices[self.ways[-1]]),
            source="",
        )

    def least(self) -> int:
        """Return the fewest bytes within which there is a choice on every rank."""
        return max(map(self._least, range(self.num_stages)))

    def _least(self, stage: int) -> int:
        low, high = 0, min(self._peak(stage, way) for way in self.ways)
        while high - low > max(1, high >> 14):
            middle = (low + high) // 2
            if self._within(stage, middle, is_priced=False) is None:
                low = middle
            else:
                high = middle
        return high

    def _of_rank(self, stage: int, most: int) -> list[tuple[int, ...]] | None:
        """Return the cheapest options of a rank's chunks: the same for all layers, or mixed."""
        alike = []
        for number, way in enumerate(self.ways):
            if self._peak(stage, way) <= most:
                alike.append([tuple(number for _ in chunk) for chunk in self.places[stage]])
        if alike and self._price(stage, alike[0]) == 0:  # no mixture is cheaper
            return alike[0]
        mixed = self._within(stage, most)
        choices = alike if mixed is None else [*alike, mixed]
        if not choices:
            return None
        return min(choices, key=lambda choice: self._price(stage, choice))

    def _price(self, stage: int, numbers: Sequence[Sequence[int]]) -> int:
        return sum(
            self.prices[self.ways[number]][unit]
            for chunk, own in zip(self.places[stage], numbers, strict=True)
            for unit, number in zip(chunk, own, strict=True)
        )

    def _within(self, stage: int, most: int, is_priced: bool = True) -> Any:
        ranks = self.ranks[stage]
        last = ranks[self.ways[-1]]
        passes = [*last.passes()]
        if max(memory.total for memory in last.after()) > most:
            return None
        bounds: list[list[Any]] = [[] for _ in last.chunks]
        for one in passes:
            room = most - last.base.total - one.late - one.gradients - one.messages
            found = _bounds(one.moments, len(last.chunks[one.chunk]), room)
            bounds[one.chunk].append((one.in_flight, found))
        chunks = []
        for chunk, places in enumerate(self.places[stage]):
            units = []
            for place, unit in enumerate(places):
                memories = [ranks[way].chunks[chunk][place].memory for way in self.ways]
                prices = [self.prices[way][unit] * is_priced for way in self.ways]
                units.append([Option(*m[:3], p) for m, p in zip(memories, prices, strict=True)])
            chunks.append(ChunkOptions([_different(options) for options in units], bounds[chunk]))
        return choose(chunks)

    def _memory(self, stage: int, numbers: Sequence[Sequence[int]]) -> PeakBytes:
        """Return the memory of a rank whose units have these options."""
        rank = self.ranks[stage][self.ways[max(map(max, numbers))]]
        chunks = rank.chunks
        rank.chunks = [
            [self.ranks[stage][self.ways[n]].chunks[c][i] for i, n in enumerate(own)]
            for c, own in enumerate(numbers)
        ]
        memory = rank.peak()
        rank.chunks = chunks
        return memory


def _different(options: list[Option]) -> list[Option]:
    """Return the options of a unit; those of the embedding and the head are one and the same."""
    return options[:1] if all(option == options[0] for option in options) else options


def _bounds(moments: Sequence[Moment], num_units: int, room: int) -> Bounds:
    """Return what a chunk's moments leave for its units, of so many bytes."""
    forward, backward = [UNBOUNDED] * num_units, [UNBOUNDED] * num_units
    kept = [UNBOUNDED] * (num_units + 1)
    for held, place, below, beside, kind in moments:
        left = room - held.gradients - held.buffers - beside
        bounds, number = (forward if kind == FORWARD else backward), place
        if not held.runs:
            bounds, number = kept, below
        bounds[number] = min(bounds[number], left)
    return Bounds(forward, backward, kept)


def _rounded_up(gib: float) -> str:
    """Return at least so many GiB in three digits or more."""
    digits = max(2, 3 - math.ceil(math.log10(gib)))
    return f"{math.ceil(gib * 10**digits) / 10**digits:.{digits}f}"
