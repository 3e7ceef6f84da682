"""What a unit keeps, moves and computes, looked up where another layout has asked for the same.

A search has hundreds of layouts, and a unit looks alike in most of them: it sees the rows of its
micro-batch and its part of each weight, and neither how many ranks compute other rows nor the
stages of a pipeline.
"""

from __future__ import annotations

from transformers import PreTrainedModel

from shardwise.base.layouts import strategy_facts
from shardwise.base.schedules import HALVING
from shardwise.config import RunConfig, way_of
from shardwise.models.activations import UnitMemory, UnitMoves, unit_memory, unit_moves
from shardwise.models.alike import known
from shardwise.models.spec import ModelSpec
from shardwise.parallel.place import are_gradients_few


def seen_by_units(cfg: RunConfig, *unseen: str) -> str:
    """Return what units see of a run, as a key; `unseen`: keys of `training` that do not matter."""
    parallel, hidden = cfg.parallel, {"global_batch_size", *unseen}
    layout = parallel.cp, parallel.cp_attention, parallel.tp, parallel.ep
    layout = *layout, parallel.sequence_parallel, strategy_facts(parallel).gathers_copies
    training = [value for key, value in vars(cfg.training).items() if key not in hidden]
    schedule = parallel.schedule if parallel.schedule in HALVING else None
    return repr((layout, schedule, training, cfg.model, cfg.data, cfg.lora))


def memory_of_unit(
    cfg: RunConfig, hf: PreTrainedModel, spec: ModelSpec, unit_index: int, is_whole: bool = False
) -> UnitMemory:
    """Return `unit_memory`, of which only the way of the unit's own layer counts among what is
    computed again. `is_whole`: its `has_whole_experts`.
    """
    chosen, layers = cfg.training.checkpointing, spec.layers[max(0, unit_index - 1) : unit_index]
    ways = [way_of(chosen, layer.number, layer.kind) for layer in layers]
    key = "memory", seen_by_units(cfg, "checkpointing"), spec, unit_index, is_whole, *ways
    return known(hf, key, lambda: unit_memory(cfg, hf, spec, unit_index, is_whole))


def moves_of_unit(
    cfg: RunConfig, hf: PreTrainedModel, spec: ModelSpec, unit_index: int
) -> UnitMoves:
    """Return `unit_moves`, which are the same whatever is computed again."""
    key = "moves", seen_by_units(cfg, "checkpointing"), spec, unit_index
    return known(hf, key, lambda: unit_moves(cfg, hf, spec, unit_index))


def gradients_are_few(hf: PreTrainedModel, spec: ModelSpec) -> bool:
    """Return `are_gradients_few`."""
    return known(hf, ("few", spec), lambda: are_gradients_few(hf, spec))
