"""Rules on the adapters that LoRA would put on a model, and on what it would train in full."""

from shardwise.config import Lora
from shardwise.config.rules.rule import Case, Rule


def _is_dora(case: Case) -> bool:
    return case.cfg.lora is not None and case.cfg.lora.dora


def _lora(case: Case) -> Lora:
    assert case.cfg.lora is not None, "a rule on adapters is asked without LoRA"
    return case.cfg.lora


def _contradiction(case: Case) -> tuple[str, object, object]:
    assert case.adapters.contradicted is not None, "asked where the rule applies"
    return case.adapters.contradicted


def _contradicted(case: Case) -> str:
    key, given, found = _contradiction(case)
    return f"lora.{key} is {given}, but the adapter of lora.path {_lora(case).path} has {found}"


ON_THE_RUN_FILE = (
    Rule(
        "dropout under DoRA",
        applies=lambda case: _is_dora(case) and _lora(case).dropout > 0,
        problem=(
            "lora.dropout is {cfg.lora.dropout}, but lora.dora would drop from what the frozen "
            "weights multiply too"
        ),
        way_out="set lora.dropout to 0, or lora.dora to false",
        why="PEFT's DoRA multiplies by W twice then, with and without dropout",
    ),
    Rule(
        "DoRA computed by PEFT",
        applies=lambda case: _is_dora(case) and _lora(case).kernel == "peft",
        problem=(
            "lora.kernel is peft, which with lora.dora would measure only the part of a row that a "
            "rank holds"
        ),
        way_out="set lora.kernel to auto or torch",
        why="PEFT knows nothing of parallel.tp, nor of model.base",
    ),
    Rule(
        "DoRA with products in 8 bits",
        applies=lambda case: _is_dora(case) and case.training.is_fp8,
        problem=(
            "lora.dora is true, but training.matmul {training.matmul} rounds the weights whose "
            "row lengths DoRA needs"
        ),
        way_out="set training.matmul to default, or lora.dora to false",
        why="no cell of the parity matrix runs both",
    ),
)
RULES = (
    Rule(
        "a key that the adapter of lora.path contradicts",
        applies=lambda case: case.adapters.contradicted is not None,
        problem=_contradicted,
        way_out=lambda case: f"leave lora.{_contradiction(case)[0]} out",
        why="what the adapter was trained with is what it computes",
    ),
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
    Rule(
        "DoRA on experts",
        applies=lambda case: _is_dora(case) and case.adapters.has_experts,
        problem="lora.dora is true, but lora.targets has routed experts",
        way_out="leave the experts out of lora.targets, or set lora.dora to false",
        why="PEFT's format has no magnitudes for a stack of experts",
    ),
    Rule(
        "DoRA on linears that PEFT takes for experts",
        applies=lambda case: _is_dora(case) and bool(case.adapters.renamed_by_peft),
        problem=lambda case: (
            "lora.dora is true, but PEFT takes "
            f"{', '.join(case.adapters.renamed_by_peft)} of this model for routed experts, which "
            "have no magnitudes"
        ),
        way_out="set lora.targets to attention or to a list without them, or lora.dora to false",
        why="PEFT could not load the adapter",
    ),
)
