"""Rules on the number of processes: the grid that they make, and the steps that they share."""

from __future__ import annotations

from shardwise.config import RunConfig
from shardwise.layouts import (
    Facts,
    axis_sizes,
    least_microbatches,
    microbatches_left_over,
    num_microbatches,
)
from shardwise.rules.rule import Rule, multiples


def _ranks_of_one_copy(cfg: RunConfig) -> int:
    return cfg.parallel.pp * cfg.parallel.tp


def _split_axes(cfg: RunConfig) -> str:
    return " x ".join(
        f"parallel.{axis}" for axis in ("pp", "tp") if getattr(cfg.parallel, axis) > 1
    )


def _replicas_message(cfg: RunConfig, facts: Facts) -> str:
    parts = _ranks_of_one_copy(cfg)
    ranks = facts.num_ranks // parts
    of_each_part = f" that hold each of the {parts} parts of the model" if parts > 1 else ""
    divisors = [size for size in range(1, ranks + 1) if ranks % size == 0]
    return (
        f"parallel.dp_replicate is {cfg.parallel.dp_replicate}, which does not divide the {ranks} "
        f"processes{of_each_part}; use one of {divisors}"
    )


GRID_RULES = (
    Rule(
        "pp and tp divide the ranks",
        lambda cfg, facts: facts.num_ranks % _ranks_of_one_copy(cfg) != 0,
        lambda cfg, facts: (
            f"{_split_axes(cfg)} is {_ranks_of_one_copy(cfg)}, which does not divide the {facts.num_ranks} processes; "
            f"use --nproc {_ranks_of_one_copy(cfg)} or a multiple of it"
        ),
        "each rank has one place in a grid",
    ),
    Rule(
        "single on several ranks",
        lambda cfg, facts: (
            cfg.parallel.data == "single" and facts.num_ranks > _ranks_of_one_copy(cfg)
        ),
        lambda cfg, facts: (
            f"parallel.data is single but there are {facts.num_ranks} processes; use --nproc "
            f"{_ranks_of_one_copy(cfg)}, or parallel.data ddp or fsdp2"
        ),
        "the other processes would have nothing to do",
    ),
    Rule(
        "dp_replicate divides the ranks",
        lambda cfg, facts: (
            facts.num_ranks // _ranks_of_one_copy(cfg) % cfg.parallel.dp_replicate != 0
        ),
        _replicas_message,
        "each replica has as many shards",
    ),
    Rule(
        "fsdp1 on one rank",
        lambda cfg, facts: cfg.parallel.data == "fsdp1" and facts.num_ranks == 1,
        lambda cfg, facts: (
            "parallel.data is fsdp1 but there is one process, and nothing to shard over; use single"
        ),
        "torch's FullyShardedDataParallel falls back to another strategy there",
    ),
)


def _data_size(cfg: RunConfig, facts: Facts) -> int:
    sizes = axis_sizes(cfg, facts.num_ranks)
    return sizes["dp_replicate"] * sizes["dp_shard"]


def _left_over(cfg: RunConfig, facts: Facts) -> int:
    count = num_microbatches(cfg, facts.num_ranks)
    return microbatches_left_over(cfg.parallel.schedule, cfg.parallel.pp, count)


def _least(cfg: RunConfig) -> int:
    return least_microbatches(cfg.parallel.schedule, cfg.parallel.pp)


STEP_RULES = (
    Rule(
        "the global batch over the ranks",
        lambda cfg, facts: (
            cfg.training.global_batch_size
            % (_data_size(cfg, facts) * cfg.training.micro_batch_size)
            != 0
        ),
        lambda cfg, facts: (
            f"training.global_batch_size {cfg.training.global_batch_size} is not a multiple of "
            f"{_data_size(cfg, facts)} data-parallel processes x micro_batch_size {cfg.training.micro_batch_size}; use "
            f"{multiples(cfg.training.global_batch_size, _data_size(cfg, facts) * cfg.training.micro_batch_size)}"
        ),
        "every rank computes as many micro-batches, of as many rows",
    ),
    Rule(
        "micro-batches of a schedule",
        lambda cfg, facts: (
            cfg.parallel.pp > 1 and num_microbatches(cfg, facts.num_ranks) < _least(cfg)
        ),
        lambda cfg, facts: (
            f"{cfg.parallel.schedule} on {cfg.parallel.pp} ranks needs {_least(cfg)} micro-batches or more, "
            f"not {num_microbatches(cfg, facts.num_ranks)}; raise training.global_batch_size, lower "
            "training.micro_batch_size, or use gpipe"
        ),
        "torch's schedule refuses fewer",
    ),
    Rule(
        "equal rounds of micro-batches",
        lambda cfg, facts: cfg.parallel.pp > 1 and _left_over(cfg, facts) != 0,
        lambda cfg, facts: (
            f"{cfg.parallel.schedule} on {cfg.parallel.pp} ranks makes equal rounds of "
            f"{num_microbatches(cfg, facts.num_ranks)} micro-batches, which does not work out; give "
            f"{num_microbatches(cfg, facts.num_ranks) - _left_over(cfg, facts)} by training.global_batch_size"
        ),
        "torch's schedule refuses unequal rounds",
    ),
)
