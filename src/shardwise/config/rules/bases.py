"""Rules on frozen weights that are stored in 4 or 8 bits."""

from shardwise.config.rules.rule import Case, Rule


def _is_stored(case: Case) -> bool:
    return case.cfg.model.base != "none"


def _odd_blocks(case: Case) -> str | None:
    """Return what has no whole blocks on a rank, where the model can be sharded at all."""
    if not case.model.is_listed or case.model.indivisible(case.parallel.tp) is not None:
        return None
    return case.model.odd_blocks(case.cfg.model.base, case.parallel.tp)


def _fits_fewer_ranks(case: Case) -> bool:
    return case.parallel.tp > 1 and case.model.odd_blocks(case.cfg.model.base, 1) is None


RULES = (
    Rule(
        "full training of a quantised base",
        applies=lambda case: _is_stored(case) and case.cfg.lora is None,
        problem="model.base is {cfg.model.base}, but without LoRA every weight is trained",
        way_out="add a section lora, or set model.base to none",
        why="a step is far smaller than what separates two codes",
    ),
    Rule(
        "a quantised base under fsdp1",
        applies=lambda case: _is_stored(case) and case.strategy.is_flat,
        problem="model.base is {cfg.model.base}, which {parallel.data} cannot shard",
        way_out="use fsdp2",
        why="torch's FullyShardedDataParallel flattens floating-point parameters only",
    ),
)

MODEL_RULES = (
    Rule(
        "a quantised base of a family that is not listed",
        applies=lambda case: _is_stored(case) and not case.model.is_listed,
        problem=(
            "model.base is {cfg.model.base}, but {model.family} is not a family that shardwise "
            "knows (`shardwise models` lists them)"
        ),
        way_out="set model.base to none",
        why="its layers may read weights past their linears",
    ),
    Rule(
        "blocks of a quantised base",
        applies=lambda case: _is_stored(case) and _odd_blocks(case) is not None,
        problem=lambda case: f"model.base is {case.cfg.model.base}, but {_odd_blocks(case)}",
        way_out=lambda case: (
            "use int8, which has one scale a row"
            + (", or a smaller parallel.tp" if _fits_fewer_ranks(case) else "")
        ),
        why="a block on two ranks would need a scale of both",
    ),
)
