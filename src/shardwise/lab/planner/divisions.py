"""How devices are divided among the axes of a layout, and what such a division is called."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from itertools import permutations, product
from typing import NamedTuple

from shardwise.base.layouts import (
    AXES,
    MODEL_AXES,
    axis_sizes,
    context_joins_of,
    data_parts,
    layout_of,
)
from shardwise.base.words import groups_of_ranks
from shardwise.config import Parallel, RunConfig
from shardwise.parallel.strategies import STRATEGIES
from shardwise.parallel.strategy import Strategy


class Division(NamedTuple):
    """How devices are divided among the axes."""

    pp: int
    data: str
    replicas: int
    """Ranks that compute other rows with the same weights."""
    shards: int
    """Ranks that compute other rows and share weights, gradients or states."""
    cp: int
    ep: int
    tp: int
    is_sequence: bool

    @property
    def strategy(self) -> Strategy:
        """Data-parallel strategy of the division."""
        return STRATEGIES[self.data]

    @property
    def num_sharing(self) -> int:
        """Ranks among which the strategy divides what it shards."""
        return self.cp * (self.shards if self.strategy.axis == "dp_shard" else self.num_data)

    @property
    def num_data(self) -> int:
        """Ranks among which the rows are divided."""
        return self.replicas * self.shards

    @property
    def offloads(self) -> tuple[str, ...]:
        """The values of `parallel.offload` that it may have."""
        return tuple(offload for offload in self.strategy.offloads if offload != "disk")

    def parallel(self, base: Parallel) -> Parallel:
        """Return the section of a run file."""
        return replace(
            base,
            data=self.data,
            dp_replicate=self.replicas if self.strategy.with_replicas else 1,
            **{axis: getattr(self, axis) for axis in MODEL_AXES},
            sequence_parallel=self.is_sequence,
        )


@cache
def divisors(number: int) -> tuple[int, ...]:
    """Return all divisors of a number, the smallest first."""
    return tuple(size for size in range(1, number + 1) if number % size == 0)


def layout_name(division: Division) -> str:
    """Return the name of a division's layout, as `layouts.layout_of`."""
    return _name(with_two_ranks(division))


def most_sharded(division: Division) -> Division:
    """Return a division with as many shards as there are ranks for them, and without replicas.

    Of those that differ in their replicas it needs least memory.
    """
    if division.strategy.with_replicas is None:
        return division
    return division._replace(replicas=1, shards=division.num_data)


def moved(division: Division) -> Iterator[Division]:
    """Yield divisions with a factor of two moved from one axis to another, or along `ep`."""
    axes = ("pp", "replicas", "shards", "cp", "tp")
    for axis, other in permutations(axes, 2):
        size, to = getattr(division, axis), getattr(division, other)
        if size % 2 == 0:
            other_division = division._replace(**{axis: size // 2, other: 2 * to})
            yield other_division
            yield other_division._replace(is_sequence=not division.is_sequence)
    yield division._replace(is_sequence=not division.is_sequence)
    yield division._replace(ep=2 * division.ep)
    yield division._replace(ep=division.ep // 2)


@cache
def with_two_ranks(division: Division) -> Division:
    """Return a division of the same kind with at most two ranks along each axis."""
    pp, data, replicas, shards, cp, ep, tp, is_sequence = division
    sizes = [min(2, size) for size in (replicas, shards, cp, ep, tp)]
    return Division(min(2, pp), data, *sizes, is_sequence)


@cache
def _name(division: Division) -> str:
    return layout_of(division.parallel(Parallel()))


def sizes_of(division: Division) -> dict[str, tuple[int, ...]]:
    """Return the parts of a layout with their sizes, in the order of its name.

    A strategy with replicas has two: these, and shards of each.
    """
    sizes: dict[str, tuple[int, ...]] = {}
    for part in layout_name(division).split("-"):
        if part in MODEL_AXES:
            sizes[part] = (getattr(division, part),)
        elif part == division.strategy.with_replicas:
            sizes[part] = (division.replicas, division.shards)
        else:
            sizes[part] = (division.num_data,) if part in data_parts() else ()
    return sizes


def title(division: Division) -> str:
    """Return a layout with its sizes: `pp:4-hsdp:2x8-tp:8-sp`."""
    parts = sizes_of(division).items()
    return "-".join(f"{part}:{'x'.join(map(str, size))}" if size else part for part, size in parts)


def is_meant(division: Division, wanted: Mapping[str, tuple[int, ...]]) -> bool:
    """Return whether a division has these parts, and these sizes where they are given."""
    sizes = sizes_of(division)
    return sizes.keys() == wanted.keys() and all(
        not wanted[part] or wanted[part] == size for part, size in sizes.items()
    )


def division_of(cfg: RunConfig, num_ranks: int) -> Division:
    """Return how a run divides its ranks."""
    parallel = cfg.parallel
    num_data = num_ranks // parallel.ranks_of_a_model
    is_sharded = STRATEGIES[parallel.data].axis == "dp_shard"
    replicas = parallel.dp_replicate if is_sharded else num_data
    return Division(
        pp=parallel.pp,
        data=parallel.data,
        replicas=replicas,
        shards=num_data // replicas,
        cp=parallel.cp,
        ep=parallel.ep,
        tp=parallel.tp,
        is_sequence=parallel.sequence_parallel,
    )


def rank_groups(cfg: RunConfig, num_ranks: int) -> dict[str, list[list[int]]]:
    """Return by axis the groups of ranks that communicate along it, without axes of one rank.

    The names are those of `Mesh`: `cp` is joined with the axis of the data-parallel strategy, which
    `ep` splits.
    """
    sizes, joined = axis_sizes(cfg, num_ranks), context_joins_of(cfg)
    axes: dict[str, tuple[str, ...]] = {axis: (axis,) for axis in reversed(AXES)}
    if sizes["cp"] > 1:
        joined, parts = f"{joined}_cp", (*axes.pop(joined), "cp")
        axes[joined] = parts
    places = [*enumerate(product(*(range(sizes[axis]) for axis in AXES)))]
    groups: dict[str, list[list[int]]] = {}
    for name, parts in axes.items():
        by_others: dict[tuple[int, ...], list[int]] = {}
        for rank, at in places:
            others = tuple(place for axis, place in zip(AXES, at) if axis not in parts)
            by_others.setdefault(others, []).append(rank)
        groups[name] = [*by_others.values()]
    if (ep := cfg.parallel.ep) > 1:
        both = groups[joined]
        groups["ep"] = [group[i : i + ep] for group in both for i in range(0, len(group), ep)]
        groups["dp_expert"] = [group[i::ep] for group in both for i in range(ep)]
    return {name: found for name, found in groups.items() if len(found[0]) > 1}


def groups_by_axis(cfg: RunConfig, num_ranks: int) -> dict[str, str]:
    """Return in words which ranks communicate along each axis of several ranks."""
    return {axis: groups_of_ranks(found) for axis, found in rank_groups(cfg, num_ranks).items()}


def group_lines(cfg: RunConfig, num_ranks: int) -> Iterator[str]:
    """Yield these groups on a line, if there are any."""
    if groups := groups_by_axis(cfg, num_ranks):
        yield "groups of ranks: " + "; ".join(f"{axis} {text}" for axis, text in groups.items())
