"""Where a model is cut: contiguous splits of its units (embedding, layers, head and loss) over a pipeline.

`balanced` first minimises the slowest chunk, exactly, by dynamic programming; from there, and from the uniform split,
it moves boundaries while the simulated step gets shorter. Where there are few splits, it simulates them all.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import combinations, pairwise
from operator import add
from typing import Literal

import numpy as np
import numpy.typing as npt

from shardwise.config import UserError
from shardwise.schedule.costs import Cost, effective
from shardwise.schedule.orders import Pipeline
from shardwise.schedule.simulate import (
    Floats,
    Work,
    crosses,
    in_flight,
    kept_messages,
    memory_bytes,
    simulate,
    times,
)
from shardwise.schedule.timeline import Timeline

Boundaries = npt.NDArray[np.int64]  # [chunks + 1], from 0 to the number of units
Mode = Literal["uniform", "parameters", "balanced"]

_ALL = 20_000  # as many splits are simulated one and all
_CELLS = 4e6  # actions times splits that are simulated together: 64 MB
_EFFORT = 2e8  # actions times splits that one search simulates: some seconds


@dataclass(frozen=True)
class Split:
    """A model cut for a pipeline, and what that is predicted to cost."""

    boundaries: tuple[int, ...]
    """Chunk c holds units[boundaries[c]:boundaries[c + 1]]."""
    chunks: tuple[Cost, ...]
    """What each chunk costs under the schedule."""
    timeline: Timeline
    memory_bytes: tuple[int, ...]
    """Weights, gradients, optimizer and activations in flight of each rank at its peak."""

    @property
    def layers(self) -> tuple[int, ...]:
        """How many layers each chunk has: the first unit is the embedding, and the last the head."""
        edges = [min(max(edge, 1), self.boundaries[-1] - 1) for edge in self.boundaries]
        return tuple(high - low for low, high in pairwise(edges))

    def held(self, chunk: int) -> list[str]:
        """What a chunk has, in words: the embedding, its layers by number (`2` or `2-5`), the head."""
        low, high = self.boundaries[chunk : chunk + 2]
        head = self.boundaries[-1] - 1
        first, last = max(low, 1) - 1, min(high, head) - 2
        numbers = [f"{first}-{last}" if last > first else f"{first}"] if last >= first else []
        return ["embedding"] * (low == 0) + numbers + ["head"] * (high > head)


def check(mode: Mode | Sequence[int], layers: int, pipeline: Pipeline) -> None:
    """UserError if there are fewer layers than chunks, or the numbers of layers in `mode` do not cover the model."""
    num_chunks = pipeline.num_chunks
    if layers < num_chunks:
        raise UserError(
            f"{num_chunks} pipeline stages ({pipeline.num_ranks} ranks x {pipeline.num_virtual}) are more "
            f"than the model's {layers} layers; use fewer"
        )
    if isinstance(mode, str):
        return
    if len(mode) != num_chunks or sum(mode) != layers or min(mode) < 0:
        raise UserError(
            f"the split {list(mode)} does not cover the model; give {num_chunks} numbers of layers that add up to "
            f"{layers}"
        )
    if 0 in mode[1:-1]:
        raise UserError(
            f"the split {list(mode)} has a stage with nothing in it; only the first (embedding) and the last (head) "
            "can be without a layer"
        )


def split(
    mode: Mode | Sequence[int], units: Sequence[Cost], pipeline: Pipeline, limit_bytes: float = math.inf
) -> Split:
    """Cut a model for a pipeline.

    `units`: the embedding, the layers, and head with loss, bottom up. `mode`: `uniform`, equal numbers of layers;
    `parameters`, the least parameters in the largest chunk; `balanced`, the shortest step; or the number of layers of
    each chunk. `limit_bytes` per rank steers `balanced`; the others have to meet it as they are. UserError as `check`,
    or if no split meets the limit.
    """
    layers = len(units) - 2
    check(mode, layers, pipeline)
    costs = effective(units, pipeline.schedule)
    if mode == "balanced":
        boundaries = _balanced(costs, pipeline, limit_bytes)
    elif mode == "uniform":
        boundaries = _uniform(layers, pipeline.num_chunks)
    elif mode == "parameters":
        boundaries, _ = bottleneck([_ranges([unit.parameters for unit in units])] * pipeline.num_chunks)
    else:
        boundaries = _explicit(mode)
    predicted = predict(units, tuple(boundaries.tolist()), pipeline)
    if max(predicted.memory_bytes) > limit_bytes:
        named = mode if isinstance(mode, str) else "given"
        raise UserError(
            f"the {named} split takes {_gib(max(predicted.memory_bytes))} GiB on a rank and the limit is "
            f"{limit_bytes / 2**30}; raise it, or let the split be balanced"
        )
    return predicted


def predict(units: Sequence[Cost], boundaries: tuple[int, ...], pipeline: Pipeline) -> Split:
    """What a split costs."""
    costs = effective(units, pipeline.schedule)
    chunks = tuple(reduce(add, costs[low:high]) for low, high in pairwise(boundaries))
    memory = memory_bytes(pipeline, Work.of(costs, np.array([boundaries])))[:, 0]
    return Split(boundaries, chunks, simulate(pipeline, chunks), tuple(int(n) for n in memory))


def bound_seconds(units: Sequence[Cost], pipeline: Pipeline) -> float:
    """What no split can beat: all work spread evenly over the ranks, or the slowest unit alone on one."""
    seconds = [unit.seconds for unit in effective(units, pipeline.schedule)]
    around = pipeline.num_virtual * max(unit.stage_seconds for unit in units)
    return pipeline.num_microbatches * (max(sum(seconds) / pipeline.num_ranks, *seconds) + around)


def _uniform(layers: int, num_chunks: int) -> Boundaries:
    """Equal numbers of layers; what does not work out goes to the first chunks, for the last one has the head."""
    each, more = divmod(layers, num_chunks)
    return _explicit([each + (chunk < more) for chunk in range(num_chunks)])


def _explicit(numbers: Sequence[int]) -> Boundaries:
    inner = 1 + np.cumsum(numbers[:-1], dtype=np.int64)
    return np.concatenate([[0], inner, [sum(numbers) + 2]])


def _ranges(values: Sequence[float]) -> Floats:
    """[low, high]: the sum of values[low:high], inf where that is empty."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    table = sums[None, :] - sums[:, None]
    table[np.tril_indices(len(sums))] = math.inf
    return table


def bottleneck(tables: Sequence[Floats]) -> tuple[Boundaries, float]:
    """The split whose worst chunk is the least, and how bad that one is; exact.

    tables[c][low, high] is what units[low:high] cost as chunk c. Dynamic programming: the best that chunks 0..c do
    on units[:high] is the least over low of max(the best of chunks 0..c-1 on units[:low], tables[c][low, high]).
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


def _balanced(costs: Sequence[Cost], pipeline: Pipeline, limit_bytes: float) -> Boundaries:
    k, inner = pipeline.num_chunks, len(costs) - 1
    few = math.comb(inner, k - 1) <= min(_ALL, _EFFORT / _num_actions(pipeline))
    every = np.array([(0, *cuts, len(costs)) for cuts in combinations(range(1, inner + 1), k - 1)]) if few else None

    def find(limit: float) -> tuple[Boundaries, float]:
        if every is None:
            return search(costs, pipeline, limit)
        return _best(every, scores(costs, pipeline, every, limit))

    best, excess = find(limit_bytes)
    if excess:
        raise UserError(
            f"no split over {pipeline.num_ranks} ranks keeps each within {limit_bytes / 2**30} GiB; set "
            f"parallel.memory_limit_gib to {_gib(find(0.0)[1])} or more"
        )
    return best


def search(costs: Sequence[Cost], pipeline: Pipeline, limit_bytes: float = math.inf) -> tuple[Boundaries, float]:
    """A split that no move of `_near` makes better, and the bytes that its fullest rank is above the limit.

    It starts from the least slowest chunk among those that fit alone, from the least full chunk, and from equal numbers
    of layers, so it is no worse than any of them. With one chunk per rank the first meets the limit if any split does,
    and the second says how small a limit can be; with several, both are the best found.
    """
    seconds = _ranges([cost.seconds for cost in costs])
    state = _ranges([cost.state_bytes for cost in costs])
    kept = _ranges([cost.activation_bytes for cost in costs])
    memory = [state + kept * most for most in in_flight(pipeline)]
    # Chunk c, units[low:high], keeps what it sends to the next one, and back to the one below if that has a backward.
    message = kept_messages(pipeline) * np.array([0, *(cost.output_bytes for cost in costs)])
    back = message * np.array([0, *(cost.backward for cost in costs)])
    for chunk, (crossing,) in enumerate(crosses(pipeline)):
        memory[chunk] = memory[chunk] + crossing * message[None, :]
        memory[chunk + 1] = memory[chunk + 1] + crossing * back[:, None]
    fast, worst = bottleneck([np.where(table <= limit_bytes, seconds, math.inf) for table in memory])
    starts = [_uniform(len(costs) - 2, pipeline.num_chunks)]
    starts += [fast] if worst < math.inf else []
    starts += [bottleneck(memory)[0]] if limit_bytes < math.inf else []
    found = [_climb(costs, pipeline, start, limit_bytes, _EFFORT / len(starts)) for start in starts]
    return _best(np.stack(found), scores(costs, pipeline, np.stack(found), limit_bytes))


def _climb(
    costs: Sequence[Cost], pipeline: Pipeline, start: Boundaries, limit_bytes: float, effort: float
) -> Boundaries:
    """Take the best of the nearest moves until none helps, or the effort is spent."""
    best, reached = start, tuple(scores(costs, pipeline, start[None], limit_bytes)[0])
    neighbourhoods = _near(best)
    while (moves := next(neighbourhoods, None)) is not None:
        effort -= len(moves) * _num_actions(pipeline)
        if effort < 0:
            break
        if len(moves):
            table = scores(costs, pipeline, moves, limit_bytes)
            first = np.lexsort(table.T[::-1])[0]
            if tuple(table[first]) < reached:
                best, reached = moves[first], tuple(table[first])
                neighbourhoods = _near(best)
    return best


def _near(boundaries: Boundaries) -> Iterator[Boundaries]:
    """One boundary to any place; then several neighbours by one unit, all the same way; then any two by up to three."""
    size = len(boundaries)
    one = np.eye(size, dtype=np.int64)
    pairs = list(combinations(range(1, size - 1), 2))
    few = (-3, -2, -1, 1, 2, 3)

    def moved(changes: list[Boundaries]) -> Boundaries:
        every = boundaries + np.array(changes, dtype=np.int64).reshape(-1, size)
        return every[(np.diff(every) > 0).all(axis=1)]

    reach = boundaries[-1]
    yield moved([by * one[i] for i in range(1, size - 1) for by in range(-reach, reach + 1) if by])
    yield moved([by * one[low : high + 1].sum(axis=0) for low, high in pairs for by in (-1, 1)])
    yield moved([by * one[low] + by_too * one[high] for low, high in pairs for by in few for by_too in few])


def scores(costs: Sequence[Cost], pipeline: Pipeline, splits: Boundaries, limit_bytes: float) -> Floats:
    """[split, 4]: what makes one better than another, less is better and the first that differs decides.

    Bytes of the fullest rank above the limit; the step; the busiest rank; how unequal the ranks are.
    """
    whole = pipeline.num_microbatches * sum(cost.seconds for cost in costs) or 1.0
    together = max(1, int(_CELLS / _num_actions(pipeline)))
    tables = []
    for part in (splits[i : i + together] for i in range(0, len(splits), together)):
        work = Work.of(costs, part)
        excess = np.maximum(memory_bytes(pipeline, work).max(axis=0) - limit_bytes, 0.0)
        step = times(pipeline, work)[1].max(axis=0) / whole
        busy = np.stack([work.seconds[list(pipeline.chunks_of(r))].sum(axis=0) for r in range(pipeline.num_ranks)])
        # Equal steps differ in their last digits by the order of sums; the search is not to chase those.
        tables.append(np.stack([excess, step.round(9), busy.max(axis=0), (busy**2).sum(axis=0)], axis=1))
    return np.concatenate(tables)


def _best(splits: Boundaries, table: Floats) -> tuple[Boundaries, float]:
    first = np.lexsort(table.T[::-1])[0]
    return splits[first], float(table[first, 0])


def _num_actions(pipeline: Pipeline) -> int:
    return 3 * pipeline.num_chunks * pipeline.num_microbatches  # or a third less, where the backward is in one go


def _gib(num_bytes: float) -> str:
    """Rounded up to a millionth, so that it will do as a limit."""
    return f"{math.ceil(num_bytes / 2**30 * 1e6) / 1e6:.6f}"
