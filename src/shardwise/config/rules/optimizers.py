"""Rules on optimizers that need more of a layout than each element by itself."""

from shardwise.base.layouts import axis_sizes, num_strategy_ranks
from shardwise.config.rules.rule import Case, Rule


def _has_matrices(case: Case) -> bool:
    parallel = case.parallel
    is_whole = parallel.pp == parallel.cp == parallel.tp == parallel.ep == 1
    return is_whole and "optimizer" in case.strategy.offloads


def _cut_blocks(case: Case) -> str | None:
    """Return what has no whole blocks on a rank, where the model can be sharded at all."""
    parallel = case.parallel
    if case.model.indivisible(parallel.tp) is not None:
        return None
    num_shards = 1
    if "optimizer" in case.strategy.sharded:
        num_shards = num_strategy_ranks(case.cfg, axis_sizes(case.cfg, case.facts.num_ranks))
    return case.model.cut_blocks(parallel.tp, parallel.ep, num_shards)


RULES = (
    Rule(
        "an optimizer of matrices with LoRA",
        applies=lambda case: case.update.needs_matrices and case.cfg.lora is not None,
        problem=(
            "optimizer.name {optimizer} is for full training: LoRA's factors are not its matrices"
        ),
        way_out="use adamw, or leave the section lora out",
        why="an orthogonal update of A or of B is not an orthogonal update of their product",
    ),
    Rule(
        "an optimizer of matrices under a layout that is not proven",
        applies=lambda case: case.update.needs_matrices and not _has_matrices(case),
        problem="optimizer.name {optimizer} is not offered under {layout}",
        way_out="use ddp, fsdp2 or single without pp, cp, tp and ep, or optimizer.name adamw",
        why="only these layouts have or gather complete matrices in a parity cell",
    ),
    Rule(
        "an optimizer of matrices with offload",
        applies=lambda case: case.update.needs_matrices and case.parallel.offloads,
        problem="parallel.offload {parallel.offload} would orthogonalise matrices on the CPU",
        way_out="set offload to none, or use adamw",
        why="no cell of the parity matrix runs both",
    ),
    Rule(
        "8-bit AdamW under fsdp1",
        applies=lambda case: case.update.has_blocks and case.strategy.is_flat,
        problem=(
            "optimizer.name {optimizer} has a scale for each block, and fsdp1 cuts within blocks"
        ),
        way_out="use fsdp2, or optimizer.name adamw",
        why="a rank's piece of a flat parameter begins and ends anywhere in a row",
    ),
    Rule(
        "8-bit AdamW with offload",
        applies=lambda case: case.update.has_blocks and case.parallel.offloads,
        problem="parallel.offload is {parallel.offload}, which has no 8-bit AdamW",
        way_out="set offload to none, or use adamw",
        why="no cell of the parity matrix runs both",
    ),
)

MODEL_RULES = (
    Rule(
        "nothing for 8-bit AdamW",
        applies=lambda case: case.update.has_blocks and case.model.num_in_8_bits == 0,
        problem=(
            "optimizer.name is {optimizer}, but nothing that is trained is a matrix of 4,096 "
            "elements whose rows are multiples of 256"
        ),
        way_out="use adamw",
        why="the key would have no effect",
    ),
    Rule(
        "blocks of 8-bit AdamW",
        applies=lambda case: case.update.has_blocks and _cut_blocks(case) is not None,
        problem=lambda case: f"optimizer.name is {case.update.name}, but {_cut_blocks(case)}",
        way_out="use fewer ranks for tp or for sharding the states, or set optimizer.name to adamw",
        why="a block on two ranks would need a scale of both",
    ),
)
