"""Rules on which layers are computed again."""

from shardwise.config import Recomputation
from shardwise.config.rules.rule import Case, Rule


def _has_budget(case: Case) -> bool:
    return case.training.budget_bytes is not None


def _highest_layer(case: Case) -> int:
    chosen = case.training.checkpointing
    layers = chosen.full + chosen.operators if isinstance(chosen, Recomputation) else ()
    return max(layers, default=-1)


RULES = (
    Rule(
        "a budget with offload of activations",
        applies=lambda case: _has_budget(case) and case.training.offload_activations,
        problem=(
            "training.checkpointing budget_gib counts what layers keep, which "
            "training.offload_activations moves to the CPU"
        ),
        way_out="leave one of them out",
        why="what a layer then needs depends on the layer below it",
    ),
    Rule(
        "a budget with offload to disk",
        applies=lambda case: _has_budget(case) and case.parallel.offload == "disk",
        problem=(
            "training.checkpointing budget_gib counts the weights of a rank, which "
            "parallel.offload disk keeps on disk"
        ),
        way_out="use full, or name layers by number",
        why="no formula of a peak knows the window of offload to disk",
    ),
    Rule(
        "a budget with a memory limit",
        applies=lambda case: _has_budget(case) and case.parallel.memory_limit_gib is not None,
        problem=(
            "training.checkpointing budget_gib and parallel.memory_limit_gib both bound the memory "
            "of a rank"
        ),
        way_out="leave parallel.memory_limit_gib out",
        why="the limit of a split does not know which layers are computed again",
    ),
)
MODEL_RULES = (
    Rule(
        "a budget of a model whose layers are not known",
        applies=lambda case: _has_budget(case) and not case.model.is_listed,
        problem=(
            "training.checkpointing budget_gib needs to know what layers keep, and "
            "{model.family} is not a family that shardwise knows"
        ),
        way_out="use full, or name layers by number",
        why="a kind of layer says in models/kinds what it keeps",
    ),
    Rule(
        "layers to recompute",
        applies=lambda case: _highest_layer(case) >= case.model.num_layers,
        problem=lambda case: (
            f"training.checkpointing names layer {_highest_layer(case)}, but this model has "
            f"{case.model.num_layers} layers"
        ),
        way_out=lambda case: f"give numbers from 0 to {case.model.num_layers - 1}",
        why="nothing would be recomputed",
    ),
)
