"""Where to cut a model for a pipeline: contiguous splits of its units over the chunks.

The units are the embedding, the decoder layers, and the head with the loss. `balanced` minimises
the slowest chunk exactly, by dynamic programming. From there, and from the uniform split, it moves
boundaries while the simulated step gets shorter. Where there are few splits, it simulates them all.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import combinations, pairwise
from operator import add
from typing import Literal

import numpy as np
import numpy.typing as npt

from shardwise.base.schedule.costs import Cost, effective
from shardwise.base.schedule.orders import Pipeline
from shardwise.base.schedule.simulate import (
    Floats,
    Work,
    in_flight,
    memory_bytes,
    simulate,
    slowness,
    times,
)
from shardwise.base.schedule.timeline import Timeline
from shardwise.config import UserError

Boundaries = npt.NDArray[np.int64]  # [chunks + 1], from 0 to the number of units
Limits = float | Sequence[float]
"""The bytes that a rank may hold: of each rank, or of all alike."""
Mode = Literal["uniform", "parameters", "balanced", "dynamic"]

_ALL = 20_000  # up to so many splits are all simulated
_CELLS = 4e6  # actions times splits that are simulated together: 64 MB
_EFFORT = 2e8  # actions times splits that one search simulates: some seconds


@dataclass(frozen=True)
class Split:
    """A model that is cut for a pipeline, and the predicted cost of its chunks and its step."""

    boundaries: tuple[int, ...]
    """Chunk c is units[boundaries[c]:boundaries[c + 1]]."""
    chunks: tuple[Cost, ...]
    """The cost of each chunk under the schedule."""
    timeline: Timeline
    memory_bytes: tuple[int, ...]
    """Peak memory of each rank: weights, gradients, optimizer and activations in flight."""

    @property
    def layers(self) -> tuple[int, ...]:
        """The number of decoder layers in each chunk."""
        edges = [min(max(edge, 1), self.boundaries[-1] - 1) for edge in self.boundaries]
        return tuple(high - low for low, high in pairwise(edges))

    def contents(self, chunk: int) -> list[str]:
        """Return what a chunk consists of: "embedding", layers as "2" or "2-5", "head"."""
        low, high = self.boundaries[chunk : chunk + 2]
        head = self.boundaries[-1] - 1
        first, last = max(low, 1) - 1, min(high, head) - 2
        names = ["embedding"] if low == 0 else []
        if last >= first:
            names.append(f"{first}-{last}" if last > first else f"{first}")
        if high > head:
            names.append("head")
        return names


def split(
    mode: Mode | Sequence[int],
    units: Sequence[Cost],
    pipeline: Pipeline,
    limit_bytes: Limits = math.inf,
) -> Split:
    """Cut a model for a pipeline.

    `units` are the costs of the embedding, the layers, and the head with the loss, bottom up.

    `mode`: `uniform` gives each chunk the same number of layers, `parameters` minimises the
    parameters of the largest chunk, and `balanced`, with which `dynamic` begins, minimises the
    simulated step. A list gives the number of layers of each chunk.

    `limit_bytes` is the memory of each rank. `balanced` searches within it; the other modes must
    meet it as they are.

    UserError where no split, or not the requested one, meets the limit.
    """
    layers = len(units) - 2
    assert layers >= pipeline.num_chunks
    assert isinstance(mode, str) or (len(mode) == pipeline.num_chunks and sum(mode) == layers)
    costs = effective(units, pipeline.schedule)
    if mode in ("balanced", "dynamic"):
        boundaries = _balanced(costs, pipeline, limit_bytes)
    elif mode == "uniform":
        boundaries = _uniform(layers, pipeline.num_chunks)
    elif mode == "parameters":
        table = _range_sums([unit.parameters for unit in units])
        boundaries, _ = bottleneck([table] * pipeline.num_chunks)
    else:
        boundaries = _explicit(mode)
    predicted = predict(units, tuple(boundaries.tolist()), pipeline)
    # No rule of rules/: the bytes may be measured ones, which only the machine of the run has.
    limits = _of_ranks(limit_bytes, pipeline)
    excess = np.array(predicted.memory_bytes) - limits
    if excess.max() > 0:
        name, rank = mode if isinstance(mode, str) else "given", excess.argmax()
        raise UserError(
            f"the {name} split takes {_gib(predicted.memory_bytes[rank])} GiB on a rank and the "
            f"limit is {limits[rank] / 2**30}; raise it, or set parallel.split to balanced"
        )
    return predicted


def predict(units: Sequence[Cost], boundaries: tuple[int, ...], pipeline: Pipeline) -> Split:
    """Return the split with these boundaries, and its predicted cost."""
    costs = effective(units, pipeline.schedule)
    chunks = tuple(reduce(add, costs[low:high]) for low, high in pairwise(boundaries))
    memory = memory_bytes(pipeline, Work.of(pipeline, costs, np.array([boundaries])))[:, 0]
    return Split(boundaries, chunks, simulate(pipeline, chunks), tuple(int(n) for n in memory))


def bound_seconds(units: Sequence[Cost], pipeline: Pipeline) -> float:
    """Return a step that no split can beat.

    Either all work is spread evenly over the ranks, or the slowest unit has the fastest of them.
    """
    seconds = [unit.seconds for unit in effective(units, pipeline.schedule)]
    speeds = pipeline.speeds or (1.0,) * pipeline.num_ranks
    around = pipeline.num_virtual * max(unit.stage_seconds for unit in units)
    slowest = max(sum(seconds) / sum(speeds), max(seconds) / max(speeds))
    return pipeline.num_microbatches * (slowest + around / max(speeds))


def _uniform(layers: int, num_chunks: int) -> Boundaries:
    """Return equal numbers of layers. The first chunks take a remainder: the last has the head."""
    each, remainder = divmod(layers, num_chunks)
    return _explicit([each + (chunk < remainder) for chunk in range(num_chunks)])


def _explicit(numbers: Sequence[int]) -> Boundaries:
    """Return the boundaries of chunks with these numbers of layers."""
    inner = 1 + np.cumsum(numbers[:-1], dtype=np.int64)
    return np.concatenate([[0], inner, [sum(numbers) + 2]])


def _range_sums(values: Sequence[float]) -> Floats:
    """Return the sums of values[low:high]: [low, high], inf where the range is empty."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    table = sums[None, :] - sums[:, None]
    table[np.tril_indices(len(sums))] = math.inf
    return table


def bottleneck(tables: Sequence[Floats]) -> tuple[Boundaries, float]:
    """Return the split whose worst chunk is best, and the cost of that chunk; exact.

    tables[c][low, high] is the cost of units[low:high] as chunk c. Dynamic programming: the best
    cost of chunks 0..c on units[:high] is the minimum over low of
    max(the best cost of chunks 0..c-1 on units[:low], tables[c][low, high]).
    """
    num_units = len(tables[0]) - 1
    best = np.full(num_units + 1, math.inf)
    best[0] = 0.0
    choices = []
    for table in tables:
        worst = np.maximum(best[:, None], table)
        choices.append(worst.argmin(axis=0))
        best = worst.min(axis=0)
    boundaries = [num_units]
    for choice in reversed(choices):
        boundaries.append(int(choice[boundaries[-1]]))
    return np.array(boundaries[::-1]), float(best[num_units])


def _balanced(costs: Sequence[Cost], pipeline: Pipeline, limit_bytes: Limits) -> Boundaries:
    k, inner = pipeline.num_chunks, len(costs) - 1
    if math.comb(inner, k - 1) <= min(_ALL, _EFFORT / _num_actions(pipeline)):
        cuts = combinations(range(1, inner + 1), k - 1)
        every_split = np.array([(0, *inside, len(costs)) for inside in cuts])
        table = scores(costs, pipeline, every_split, limit_bytes)
        boundaries, excess_bytes = _best(every_split, table)
    else:
        boundaries, excess_bytes = search(costs, pipeline, limit_bytes)
    if excess_bytes:
        given = _of_ranks(limit_bytes, pipeline).tolist()
        given = given if len({*given}) > 1 else given[:1]
        texts = [str(n / 2**30) for n in given], [_gib(n + excess_bytes) for n in given]
        limits, needed = (t[0] if len(t) == 1 else f"[{', '.join(t)}]" for t in texts)
        raise UserError(
            f"no split over {pipeline.num_ranks} ranks keeps each within {limits} "
            f"GiB; set parallel.memory_limit_gib to {needed} or more"
        )
    return boundaries


def _of_ranks(limit_bytes: Limits, pipeline: Pipeline) -> Floats:
    """Return the limit of each rank: [rank]."""
    return np.broadcast_to(np.asarray(limit_bytes, dtype=float), pipeline.num_ranks)


def search(
    costs: Sequence[Cost], pipeline: Pipeline, limit_bytes: Limits = math.inf
) -> tuple[Boundaries, float]:
    """Return a split that no move of `_moves` improves, and how many bytes it is above the limit.

    The search starts from three splits, and its result is no worse than any of them: the one with
    the fastest slowest chunk, of chunks that fit alone; the one whose chunks are least above their
    limits; and equal numbers of layers. With one chunk per rank the first meets the limit if any
    split does, and the second gives the smallest possible limit. With several chunks per rank, both
    are the best that the search has seen.
    """
    seconds = _range_sums([cost.seconds for cost in costs])
    state = _range_sums([cost.state_bytes for cost in costs])
    kept = _range_sums([cost.activation_bytes for cost in costs])
    memory = [state + kept * most for most in in_flight(pipeline)]
    rank_limits, slow = _of_ranks(limit_bytes, pipeline), slowness(pipeline)[:, 0]
    limits = [rank_limits[pipeline.rank_of(chunk)] for chunk in range(pipeline.num_chunks)]
    fitting = [
        np.where(table <= limit, seconds * times_longer, math.inf)
        for table, limit, times_longer in zip(memory, limits, slow, strict=True)
    ]
    fastest, slowest_seconds = bottleneck(fitting)
    starts = [_uniform(len(costs) - 2, pipeline.num_chunks)]
    if slowest_seconds < math.inf:
        starts.append(fastest)
    if rank_limits.max() < math.inf:
        above = [table - limit for table, limit in zip(memory, limits, strict=True)]
        starts.append(bottleneck(above)[0])
    effort = _EFFORT / len(starts)
    ends = np.stack([_climb(costs, pipeline, start, limit_bytes, effort) for start in starts])
    return _best(ends, scores(costs, pipeline, ends, limit_bytes))


def _climb(
    costs: Sequence[Cost], pipeline: Pipeline, start: Boundaries, limit_bytes: Limits, effort: float
) -> Boundaries:
    """Take the best of the nearest moves until none improves the split, or the effort is spent."""
    best, best_score = start, tuple(scores(costs, pipeline, start[None], limit_bytes)[0])
    neighbourhoods = _moves(best)
    while (moves := next(neighbourhoods, None)) is not None:
        effort -= len(moves) * _num_actions(pipeline)
        if effort < 0:
            break
        if len(moves):
            table = scores(costs, pipeline, moves, limit_bytes)
            first = np.lexsort(table.T[::-1])[0]
            if tuple(table[first]) < best_score:
                best, best_score = moves[first], tuple(table[first])
                neighbourhoods = _moves(best)
    return best


def _moves(boundaries: Boundaries) -> Iterator[Boundaries]:
    """Yield three neighbourhoods of a split, each as splits [split, chunks + 1].

    First one boundary moves anywhere; then several neighbouring ones move by one unit, in the same
    direction; then any two move by up to three units.
    """
    size = len(boundaries)
    one = np.eye(size, dtype=np.int64)
    pairs = list(combinations(range(1, size - 1), 2))
    few = (-3, -2, -1, 1, 2, 3)

    def moved(changes: list[Boundaries]) -> Boundaries:
        splits = boundaries + np.array(changes, dtype=np.int64).reshape(-1, size)
        return splits[(np.diff(splits) > 0).all(axis=1)]

    reach = boundaries[-1]
    yield moved([by * one[i] for i in range(1, size - 1) for by in range(-reach, reach + 1) if by])
    yield moved([by * one[low : high + 1].sum(axis=0) for low, high in pairs for by in (-1, 1)])
    yield moved([a * one[low] + b * one[high] for low, high in pairs for a in few for b in few])


def scores(
    costs: Sequence[Cost], pipeline: Pipeline, splits: Boundaries, limit_bytes: Limits
) -> Floats:
    """Return four figures by which splits compare: [split, 4].

    Less is better, and the first figure that differs decides. They are bytes of the fullest rank
    above the limit, the step, the busiest rank, and how unequal the ranks are.
    """
    on_one_rank = sum(cost.seconds for cost in costs) / max(pipeline.speeds, default=1.0)
    all_seconds = pipeline.num_microbatches * on_one_rank or 1.0
    limits = _of_ranks(limit_bytes, pipeline)[:, None]
    together = max(1, int(_CELLS / _num_actions(pipeline)))
    tables = []
    for part in (splits[i : i + together] for i in range(0, len(splits), together)):
        work = Work.of(pipeline, costs, part)
        excess = np.maximum((memory_bytes(pipeline, work) - limits).max(axis=0), 0.0)
        step = times(pipeline, work)[1].max(axis=0) / all_seconds
        ranks = [list(pipeline.chunks_of(rank)) for rank in range(pipeline.num_ranks)]
        busy = np.stack([work.seconds[chunks].sum(axis=0) for chunks in ranks])
        # Equal steps differ in their last digits by the order of sums. Rounding keeps the search
        # from following those digits.
        figures = [excess, step.round(9), busy.max(axis=0), (busy**2).sum(axis=0)]
        tables.append(np.stack(figures, axis=1))
    return np.concatenate(tables)


def _best(splits: Boundaries, table: Floats) -> tuple[Boundaries, float]:
    """Return the best split by its scores, and its bytes above the limit."""
    first = np.lexsort(table.T[::-1])[0]
    return splits[first], float(table[first, 0])


def _num_actions(pipeline: Pipeline) -> int:
    # A third less where the backward is not split into halves.
    return 3 * pipeline.num_chunks * pipeline.num_microbatches


def _gib(num_bytes: float) -> str:
    """Return bytes in GiB, rounded up to a millionth, so that the number works as a limit."""
    return f"{math.ceil(num_bytes / 2**30 * 1e6) / 1e6:.6f}"
