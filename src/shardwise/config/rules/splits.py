"""Rules on where a pipeline's model is cut, and on layers that move between its ranks."""

from collections.abc import Callable

from shardwise.config.rules.rule import Case, Rule


def _of_each_rank(key: str) -> Rule:
    """Return the rule that a list has a number for each rank of the pipeline."""

    def is_of_others(case: Case) -> bool:
        given, pp = getattr(case.parallel, key), case.parallel.pp
        return pp > 1 and isinstance(given, list) and len(given) != pp

    return Rule(
        f"{key} of other ranks",
        applies=is_of_others,
        problem=f"parallel.{key} {{parallel.{key}}} does not have one number for each of the "
        f"{{parallel.pp}} ranks of pp",
        way_out="give one number for each rank",
        why="each rank of a pipeline has one",
    )


def _moves(is_used: Callable[[Case], bool], key: str, why: str) -> Rule:
    """Return the rule that layers do not move between ranks where something is used."""
    return Rule(
        f"a dynamic split with {key}",
        applies=lambda case: case.parallel.split == "dynamic" and is_used(case),
        problem=f"parallel.split dynamic moves layers between ranks, which {key} does not allow",
        way_out=f"set parallel.split to balanced, or {key} to none",
        why=why,
    )


RULES = (
    _of_each_rank("speeds"),
    _of_each_rank("memory_limit_gib"),
    _moves(
        lambda case: case.training.is_compiled,
        "training.compile",
        "every layer would be compiled again, which takes longer than most moves gain",
    ),
    _moves(
        lambda case: case.training.budget_bytes is not None,
        "training.checkpointing",
        "a budget chose what is recomputed by the layers that each rank had",
    ),
    _moves(
        lambda case: case.parallel.offload == "disk",
        "parallel.offload",
        "layers move through memory, in which a model on disk has no place",
    ),
)
