"""Rules on the adapters that LoRA would put on a model, and on what it would train in full."""

from __future__ import annotations

from shardwise.config import Lora
from shardwise.rules.rule import Case, Rule


def _lora(case: Case) -> Lora:
    assert case.cfg.lora is not None, "a rule on adapters is asked without LoRA"
    return case.cfg.lora


RULES = (
    Rule(
        "a rank that no weight has",
        applies=lambda case: _lora(case).r > case.adapters.highest_rank,
        problem=(
            "lora.r is {cfg.lora.r}, but no weight of this model has a rank above "
            "{adapters.highest_rank}"
        ),
        way_out="lower lora.r",
        why="the product of wider factors has no higher rank",
    ),
    Rule(
        "adapters on nothing",
        applies=lambda case: case.adapters.num_weights == 0,
        problem="lora.targets: all of them lie in lora.modules_to_save",
        way_out="leave the section out to train in full",
        why="what is trained in full gets no adapter",
    ),
    Rule(
        "a target in modules_to_save",
        applies=lambda case: bool(case.adapters.targets_to_save),
        problem=lambda case: (
            f"lora.targets: {case.adapters.targets_to_save[0]} lies in lora.modules_to_save too"
        ),
        way_out="name it in one of them",
        why="what is trained in full gets no adapter",
    ),
    Rule(
        "shared adapters without experts",
        applies=lambda case: _lora(case).experts == "shared" and not case.adapters.has_experts,
        problem="lora.experts is shared, but lora.targets has no routed experts",
        way_out="leave it out, or set lora.targets to all-linear or [experts]",
        why="nothing would be shared",
    ),
    Rule(
        "dropout on adapters of experts",
        applies=lambda case: _lora(case).dropout > 0 and case.adapters.has_experts,
        problem=(
            "lora.dropout is {cfg.lora.dropout}, but the adapters on routed experts have no input "
            "to drop from"
        ),
        way_out="set it to 0, or leave the experts out of lora.targets",
        why="PEFT adds such an adapter to the stack itself, where there is no input",
    ),
)
