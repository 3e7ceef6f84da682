"""Rules on the number of processes: the grid that they make, and the steps that they share."""

from __future__ import annotations

from shardwise.config import RunConfig
from shardwise.layouts import (
    Facts,
    least_microbatches,
    microbatches_left_over,
    num_data_ranks,
    num_microbatches,
)
from shardwise.rules.rule import Rule, either, multiples


def _ranks_of_one_copy(cfg: RunConfig) -> int:
    return cfg.parallel.pp * cfg.parallel.tp


def _split_axes(cfg: RunConfig) -> str:
    return " x ".join(
        f"parallel.{axis}" for axis in ("pp", "tp") if getattr(cfg.parallel, axis) > 1
    )


def _data_ranks(cfg: RunConfig, facts: Facts) -> int:
    return facts.num_ranks // _ranks_of_one_copy(cfg)


def _divisors(number: int) -> list[str]:
    return [str(size) for size in range(1, number + 1) if number % size == 0]


GRID_RULES = (
    Rule(
        "pp and tp divide the ranks",
        applies=lambda cfg, facts: facts.num_ranks % _ranks_of_one_copy(cfg) != 0,
        problem=lambda cfg, facts: (
            f"{_split_axes(cfg)} is {_ranks_of_one_copy(cfg)}, which does not divide the "
            f"{facts.num_ranks} processes"
        ),
        way_out=lambda cfg, facts: f"use --nproc {_ranks_of_one_copy(cfg)} or a multiple of it",
        why="each rank has one place in a grid",
    ),
    Rule(
        "single on several ranks",
        applies=lambda cfg, facts: (
            cfg.parallel.data == "single" and facts.num_ranks > _ranks_of_one_copy(cfg)
        ),
        problem=lambda cfg, facts: (
            f"parallel.data is single but there are {facts.num_ranks} processes"
        ),
        way_out=lambda cfg, facts: (
            f"use --nproc {_ranks_of_one_copy(cfg)}, or parallel.data ddp or fsdp2"
        ),
        why="the other processes would have nothing to do",
    ),
    Rule(
        "dp_replicate divides the ranks",
        applies=lambda cfg, facts: _data_ranks(cfg, facts) % cfg.parallel.dp_replicate != 0,
        problem=lambda cfg, facts: (
            f"parallel.dp_replicate is {cfg.parallel.dp_replicate}, which does not divide the "
            f"{_data_ranks(cfg, facts)} data-parallel processes"
        ),
        way_out=lambda cfg, facts: f"use {either(_divisors(_data_ranks(cfg, facts)))}",
        why="each replica has as many shards",
    ),
    Rule(
        "fsdp1 on one rank",
        applies=lambda cfg, facts: cfg.parallel.data == "fsdp1" and facts.num_ranks == 1,
        problem="parallel.data is fsdp1 but there is one process, and nothing to shard over",
        way_out="use single",
        why="torch's FullyShardedDataParallel falls back to another strategy there",
    ),
)


def _rows_at_once(cfg: RunConfig, facts: Facts) -> int:
    """Return the rows that all ranks compute in one micro-batch."""
    return num_data_ranks(cfg, facts.num_ranks) * cfg.training.micro_batch_size


def _least(cfg: RunConfig) -> int:
    return least_microbatches(cfg.parallel.schedule, cfg.parallel.pp)


def _left_over(cfg: RunConfig, facts: Facts) -> int:
    count = num_microbatches(cfg, facts.num_ranks)
    return microbatches_left_over(cfg.parallel.schedule, cfg.parallel.pp, count)


STEP_RULES = (
    Rule(
        "the global batch over the ranks",
        applies=lambda cfg, facts: cfg.training.global_batch_size % _rows_at_once(cfg, facts) != 0,
        problem=lambda cfg, facts: (
            f"training.global_batch_size {cfg.training.global_batch_size} is not a multiple of "
            f"{num_data_ranks(cfg, facts.num_ranks)} data-parallel processes x micro_batch_size "
            f"{cfg.training.micro_batch_size}"
        ),
        way_out=lambda cfg, facts: (
            f"use {multiples(cfg.training.global_batch_size, _rows_at_once(cfg, facts))}"
        ),
        why="every rank computes as many micro-batches, of as many rows",
    ),
    Rule(
        "micro-batches of a schedule",
        applies=lambda cfg, facts: (
            cfg.parallel.pp > 1 and num_microbatches(cfg, facts.num_ranks) < _least(cfg)
        ),
        problem=lambda cfg, facts: (
            f"{cfg.parallel.schedule} on {cfg.parallel.pp} ranks needs {_least(cfg)} micro-batches "
            f"or more, not {num_microbatches(cfg, facts.num_ranks)}"
        ),
        way_out=("raise training.global_batch_size, lower training.micro_batch_size, or use gpipe"),
        why="torch's schedule refuses fewer",
    ),
    Rule(
        "equal rounds of micro-batches",
        applies=lambda cfg, facts: cfg.parallel.pp > 1 and _left_over(cfg, facts) != 0,
        problem=lambda cfg, facts: (
            f"{cfg.parallel.schedule} on {cfg.parallel.pp} ranks needs equal rounds of "
            f"micro-batches, which {num_microbatches(cfg, facts.num_ranks)} do not make"
        ),
        way_out=lambda cfg, facts: (
            f"give {num_microbatches(cfg, facts.num_ranks) - _left_over(cfg, facts)} by "
            "training.global_batch_size"
        ),
        why="torch's schedule refuses unequal rounds",
    ),
)
