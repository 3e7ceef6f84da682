"""The units of a chunk that fully sharded data parallelism gathers together, and their weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from shardwise.config import RunConfig
from shardwise.planner.share import Chunk
from shardwise.planner.weights import Weight

ALIGNMENT_BYTES = 16
"""Each parameter in one of fsdp1's flat parameters starts at a multiple of so many bytes."""


@dataclass(frozen=True)
class Unit:
    """Weights that are gathered and freed together."""

    weights: tuple[Weight, ...]
    is_kept: bool
    """Whether it stays gathered from the forward to the backward, which follows at once."""

    @property
    def trained(self) -> tuple[Weight, ...]:
        """The weights that the optimizer updates."""
        return tuple(weight for weight in self.weights if weight.is_trained)


def units_of(chunk: Chunk, data: Literal["fsdp1", "fsdp2"]) -> list[Unit]:
    """Return the units of a chunk, in forward order.

    They are the embedding, each layer, and the rest: final norm, head, and a tied embedding, which
    is used at both ends. fsdp2 has norm and head in a unit of their own, unless they are tied.
    """
    spec, rest = chunk.spec, "rest"
    has_ends = data == "fsdp2" and spec.last and not spec.tied
    others: dict[str, list[Weight]] = {spec.embed: [], spec.head: [], rest: []}
    for weight in chunk.ends:
        unit = rest
        if not spec.tied and weight.name.startswith(f"{spec.embed}."):
            unit = spec.embed
        elif has_ends and weight.name.startswith((f"{spec.norm}.", f"{spec.head}.")):
            unit = spec.head
        others[unit].append(weight)
    units = [
        Unit(tuple(others[spec.embed]), is_kept=False),
        *(Unit(chunk.of_layers[layer.name], is_kept=False) for layer in spec.layers),
        Unit(tuple(others[spec.head]), is_kept=True),
        Unit(tuple(others[rest]), is_kept=spec.tied or data == "fsdp1"),
    ]
    return [unit for unit in units if unit.weights]


def left_whole(cfg: RunConfig, chunk: Chunk) -> frozenset[Weight]:
    """Return the weights of which every data rank holds all, with their gradients and states.

    Where weights are sharded at all, they are those that have no dim to shard, experts of which
    each data rank has others (see fsdp2.left_replicated) and, as a collective has one dtype, those
    of an odd one.
    """
    if cfg.parallel.data in ("single", "ddp"):
        return frozenset(chunk.weights)
    if cfg.parallel.data == "fsdp1":
        units = units_of(chunk, "fsdp1")
        flat = [f for unit in units for f in flat_parameters(unit, cfg.parallel.fsdp1_wrap)]
        return frozenset(chunk.weights).difference(*flat)
    itemsizes = {weight.itemsize for weight in chunk.unlike if weight.is_trained}
    if all(map(_is_divided, chunk.unlike)) and len(itemsizes) <= 1:
        return frozenset()
    undivided = {weight for weight in chunk.weights if weight.shard_dim is None}
    if cfg.parallel.data == "fsdp2":
        undivided |= {w for w in chunk.weights if w.ep_dim is not None and w.num_shards == 1}
        undivided |= _odd_dtype([weight for weight in chunk.weights if weight.is_trained])
    return frozenset(undivided)


def _is_divided(weight: Weight) -> bool:
    """Return whether each data rank has other elements of a weight, unless its dtype is odd."""
    return weight.shard_dim is not None and (weight.ep_dim is None or weight.num_shards > 1)


def flat_parameters(unit: Unit, wrap: Literal["separate", "naive"]) -> list[tuple[Weight, ...]]:
    """Return the weights of each flat parameter that fsdp1 makes of a unit, without those of an odd
    dtype, which stay whole.

    `separate`: what a unit trains lies in a flat parameter of its own.
    """
    frozen = tuple(weight for weight in unit.weights if not weight.is_trained)
    groups = [unit.trained, frozen] if wrap == "separate" else [unit.weights]
    return [_of_one_dtype(group) for group in groups if group]


def _of_one_dtype(weights: Sequence[Weight]) -> tuple[Weight, ...]:
    odd = _odd_dtype(weights)
    return tuple(weight for weight in weights if weight not in odd)


def flat_spans(weights: Sequence[Weight]) -> list[tuple[int, int]]:
    """Return where each weight lies in its flat parameter: (start, end), in elements."""
    spans, end = [], 0
    for weight in weights:
        step = max(1, ALIGNMENT_BYTES // weight.itemsize)
        start = -(-end // step) * step
        end = start + weight.numel
        spans.append((start, end))
    return spans


def _odd_dtype(weights: Sequence[Weight]) -> set[Weight]:
    """Return the weights of another dtype than most of the elements have."""
    numels = Counter[int]()
    for weight in weights:
        numels[weight.itemsize] += weight.numel
    if len(numels) < 2:
        return set()
    most = numels.most_common(1)[0][0]
    return {weight for weight in weights if weight.itemsize != most}
