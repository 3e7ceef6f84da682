"""Rules on the number of processes: the grid that they make, and the steps that they share."""

from shardwise.base.layouts import has_copies, num_data_ranks, num_microbatches
from shardwise.base.schedules import least_microbatches, microbatches_left_over
from shardwise.config.rules.rule import Case, Rule, either, multiples


def _split_axes(case: Case) -> str:
    return " x ".join(
        f"parallel.{axis}" for axis in ("pp", "cp", "tp") if getattr(case.parallel, axis) > 1
    )


def _data_ranks(case: Case) -> int:
    return case.facts.num_ranks // case.parallel.ranks_of_a_model


def _divisors(number: int) -> list[str]:
    return [str(size) for size in range(1, number + 1) if number % size == 0]


def _batches_that_divide(case: Case) -> str:
    """Return sizes that go over the ranks: the micro-batch first, which changes no result."""
    rows = case.training.global_batch_size
    others = multiples(rows, _rows_at_once(case))
    each, left_over = divmod(rows, num_data_ranks(case.cfg, case.facts.num_ranks))
    if left_over:
        return f"use {others}"
    smaller = max(n for n in range(1, case.training.micro_batch_size) if each % n == 0)
    return f"use training.micro_batch_size {smaller}, or training.global_batch_size {others}"


GRID_RULES = (
    Rule(
        "pp, cp and tp divide the ranks",
        applies=lambda case: case.facts.num_ranks % case.parallel.ranks_of_a_model != 0,
        problem=lambda case: (
            f"{_split_axes(case)} is {case.parallel.ranks_of_a_model}, which does not divide the "
            f"{case.facts.num_ranks} processes"
        ),
        way_out=lambda case: f"use --nproc {case.parallel.ranks_of_a_model} or a multiple of it",
        why="each rank has one place in a grid",
    ),
    Rule(
        "single on several ranks",
        applies=lambda case: (
            case.strategy.axis is None and case.facts.num_ranks > case.parallel.ranks_of_a_model
        ),
        problem=lambda case: (
            f"parallel.data is single but there are {case.facts.num_ranks} processes"
        ),
        way_out=lambda case: (
            f"use --nproc {case.parallel.ranks_of_a_model}, or parallel.data ddp or fsdp2"
        ),
        why="the other processes would have nothing to do",
    ),
    Rule(
        "dp_replicate divides the ranks",
        applies=lambda case: _data_ranks(case) % case.parallel.dp_replicate != 0,
        problem=lambda case: (
            f"parallel.dp_replicate is {case.parallel.dp_replicate}, which does not divide the "
            f"{_data_ranks(case)} data-parallel processes"
        ),
        way_out=lambda case: f"use {either(_divisors(_data_ranks(case)))}",
        why="each replica has the same number of shards",
    ),
    Rule(
        "fsdp1 on one rank",
        applies=lambda case: case.strategy.needs_ranks and case.facts.num_ranks == 1,
        problem=(
            "parallel.data is {parallel.data} but there is one process, and nothing to shard over"
        ),
        way_out="use single",
        why="torch's FullyShardedDataParallel falls back to another strategy there",
    ),
)


def _rows_at_once(case: Case) -> int:
    """Return the rows that all ranks compute in one micro-batch."""
    return num_data_ranks(case.cfg, case.facts.num_ranks) * case.training.micro_batch_size


def _least(case: Case) -> int:
    return least_microbatches(case.parallel.schedule, case.parallel.pp)


def _left_over(case: Case) -> int:
    count = num_microbatches(case.cfg, case.facts.num_ranks)
    return microbatches_left_over(case.parallel.schedule, case.parallel.pp, count)


STEP_RULES = (
    Rule(
        "copies to compare",
        applies=lambda case: (
            case.training.check_copies_every > 0 and not has_copies(case.cfg, case.facts.num_ranks)
        ),
        problem=lambda case: (
            f"training.check_copies_every is {case.training.check_copies_every}, but no rank "
            "holds a copy of another one's weights"
        ),
        way_out=(
            "leave it out, or use ddp, zero1, zero2, tp, or fsdp2 with parallel.dp_replicate, "
            "on several processes"
        ),
        why="nothing could be compared, and the run would look checked",
    ),
    Rule(
        "the global batch over the ranks",
        applies=lambda case: case.training.global_batch_size % _rows_at_once(case) != 0,
        problem=lambda case: (
            f"training.global_batch_size {case.training.global_batch_size} is not a multiple of "
            f"{num_data_ranks(case.cfg, case.facts.num_ranks)} data-parallel processes x "
            f"micro_batch_size {case.training.micro_batch_size}"
        ),
        way_out=_batches_that_divide,
        why="every rank computes the same number of micro-batches, with the same number of rows",
    ),
    Rule(
        "micro-batches of a schedule",
        applies=lambda case: (
            case.parallel.pp > 1 and num_microbatches(case.cfg, case.facts.num_ranks) < _least(case)
        ),
        problem=lambda case: (
            f"{case.parallel.schedule} on {case.parallel.pp} ranks needs {_least(case)} "
            f"micro-batches or more, not {num_microbatches(case.cfg, case.facts.num_ranks)}"
        ),
        way_out=("raise training.global_batch_size, lower training.micro_batch_size, or use gpipe"),
        why="torch's schedule refuses fewer",
    ),
    Rule(
        "equal rounds of micro-batches",
        applies=lambda case: case.parallel.pp > 1 and _left_over(case) != 0,
        problem=lambda case: (
            f"{case.parallel.schedule} on {case.parallel.pp} ranks needs equal rounds of "
            f"micro-batches, and {num_microbatches(case.cfg, case.facts.num_ranks)} micro-batches "
            "do not make equal rounds"
        ),
        way_out=lambda case: (
            "change training.global_batch_size to get "
            f"{num_microbatches(case.cfg, case.facts.num_ranks) - _left_over(case)}"
        ),
        why="torch's schedule refuses unequal rounds",
    ),
)
