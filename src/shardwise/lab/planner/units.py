"""Memory and moves of units, looked up where another layout has asked for the same.

A search has hundreds of layouts, and a unit looks alike in most of them.
"""

from collections.abc import Sequence

from transformers import PreTrainedModel

from shardwise.config import RunConfig
from shardwise.models.activations import (
    UnitMemory,
    UnitMoves,
    seen_by_units,
    unit_memory,
    unit_moves,
    way_of_unit,
)
from shardwise.models.alike import known
from shardwise.models.spec import ModelSpec
from shardwise.parallel.place import are_gradients_few


def memory_of_unit(
    cfg: RunConfig, hf: PreTrainedModel, spec: ModelSpec, unit_index: int, is_whole: bool = False
) -> UnitMemory:
    """Return `unit_memory`, of which only the way of the unit's own layer counts among what is
    computed again. `is_whole`: its `has_whole_experts`.
    """
    seen = seen_by_units(cfg, hf, spec, way_of_unit(cfg, spec, unit_index))
    key = "memory", seen, spec, unit_index, is_whole
    return known(hf, key, lambda: unit_memory(cfg, hf, spec, unit_index, is_whole))


def moves_of_unit(
    cfg: RunConfig, hf: PreTrainedModel, spec: ModelSpec, unit_index: int
) -> UnitMoves:
    """Return `unit_moves`, which are the same whatever is computed again."""
    key = "moves", seen_by_units(cfg, hf, spec, "any"), spec, unit_index
    return known(hf, key, lambda: unit_moves(cfg, hf, spec, unit_index))


def gradients_are_few(hf: PreTrainedModel, spec: ModelSpec) -> bool:
    """Return `are_gradients_few`."""
    return known(hf, ("few", spec), lambda: are_gradients_few(hf, spec))


def offloaded(layers: Sequence[UnitMemory]) -> list[UnitMemory]:
    """Return the memory of layers, from the lowest up, that keep nothing on the device.

    While a layer runs, what the one below has kept is still on its way to the CPU, and in the
    backward on its way back (parallel/activation_offload.py).
    """
    below = [0, *(layer.kept for layer in layers)]
    return [
        layer._replace(
            kept=0,
            forward=layer.forward + near,
            backward=layer.kept + near + layer.backward,
            inputs=layer.kept + near + layer.inputs,
        )
        for near, layer in zip(below, layers)
    ]
