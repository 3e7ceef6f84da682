"""Rules on layers that torch.compile compiles."""

from collections.abc import Callable

from shardwise.base.layouts import num_microbatches
from shardwise.config.rules.rule import Case, Rule, dotted

COMPILE_TORCH = (2, 13)
"""The first torch whose compiled layers are known to have the right gradients."""


def _without_graphs(key: str, is_set: Callable[[Case], bool], why: str) -> Rule:
    """Return the rule that layers are not replayed from a graph where something is in use."""
    return Rule(
        f"layers as CUDA graphs with {key}",
        applies=lambda case: case.training.is_graphed and is_set(case),
        problem=f"training.compile is {{training.compile}}, but with {key} {why}",
        way_out="set training.compile to inductor or none",
        why="a graph replays the same kernels on the same addresses",
    )


RULES = (
    Rule(
        "compile with isolated documents",
        applies=lambda case: case.cfg.data.keeps_documents_apart and case.training.is_compiled,
        problem=(
            "training.compile is {training.compile}, but with data.packing {cfg.data.packed} "
            "layers meet new shapes in every micro-batch and would be compiled for each"
        ),
        way_out="set compile to none, or, without pairs, packing to concat or none",
        why="each number and length of documents is a shape of its own",
    ),
    Rule(
        "compile with checkpointing of operators",
        applies=lambda case: case.training.is_compiled and case.training.keeps_operators,
        problem=(
            "training.checkpointing operators chooses among operators that training.compile fuses"
        ),
        way_out="use full, none or a list of layer kinds, or compile none",
        why="the policy of selective checkpointing cannot see operators in compiled code",
    ),
    Rule(
        "compile on an old torch",
        applies=lambda case: case.training.is_compiled and case.facts.torch_version < COMPILE_TORCH,
        problem=lambda case: (
            "training.compile may lose gradients in compiled layers with torch "
            f"{dotted(case.facts.torch_version)}"
        ),
        way_out=f"set compile to none, or install torch {dotted(COMPILE_TORCH)} or later",
        why=(
            "with torch 2.11 the forward is right, but what goes through an autograd.Function in a "
            "compiled layer, such as a short convolution or a LoRA kernel, has the gradient 0"
        ),
    ),
    _without_graphs(
        "weights that are gathered",
        lambda case: "weights" in case.strategy.sharded or case.parallel.offloads,
        "they lie somewhere else in every step",
    ),
    _without_graphs(
        "ranks that compute a row together",
        lambda case: case.parallel.ranks_of_a_model > 1,
        "they meet inside a layer, or several micro-batches wait for their backward",
    ),
    _without_graphs(
        "checkpointing or offload_activations",
        lambda case: not case.training.keeps_activations,
        "a backward runs forwards between its graphs",
    ),
)
MODEL_RULES = (
    _without_graphs(
        "routed experts",
        lambda case: bool(case.model.num_experts),
        "which rows an expert has is another shape in every step",
    ),
)
STEP_RULES = (
    _without_graphs(
        "several micro-batches in a step",
        lambda case: num_microbatches(case.cfg, case.facts.num_ranks) > 1,
        "each one's gradients would overwrite those of the one before",
    ),
)
