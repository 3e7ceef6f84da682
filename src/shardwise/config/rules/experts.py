"""Rules on routed experts: over which ranks they are spread; how loads are evened or limited."""

from shardwise.base.layouts import axis_sizes, num_strategy_ranks
from shardwise.config.rules.rule import Case, Rule, dotted, either

EXPERTS_TORCH = (2, 13)
"""The version of torch that `parallel.ep` is proven with."""


def _is_spread(case: Case) -> bool:
    return case.parallel.ep > 1


def _ranks_that_join(case: Case) -> int:
    """Return the ranks among which experts may be spread: the sharding axis with `cp`."""
    return num_strategy_ranks(case.cfg, axis_sizes(case.cfg, case.facts.num_ranks))


def _uneven(case: Case) -> list[int]:
    return [number for number in case.model.num_experts if number % case.parallel.ep]


def _divisors_of_all(numbers: list[int]) -> list[str]:
    most = min(numbers)
    return [str(n) for n in range(1, most + 1) if all(number % n == 0 for number in numbers)]


def _balances(case: Case) -> bool:
    return case.cfg.model.router_bias_rate > 0


def _drops(case: Case) -> bool:
    return case.cfg.model.expert_capacity is not None


RULES = (
    Rule(
        "capacity of experts with cp",
        applies=lambda case: _drops(case) and case.parallel.cp > 1,
        problem="model.expert_capacity limits the tokens of complete rows, which parallel.cp cuts",
        way_out="leave it out, or set parallel.cp to 1",
        why="which tokens of a row come first is not known on a rank that has some of them",
    ),
    Rule(
        "biases of routers with LoRA",
        applies=lambda case: _balances(case) and case.cfg.lora is not None,
        problem="model.router_bias_rate changes biases of the model, which no adapter has",
        way_out="set it to 0, or leave the section lora out",
        why="the adapter alone would route otherwise than it was trained",
    ),
    Rule(
        "ep with fsdp1",
        applies=lambda case: _is_spread(case) and case.strategy.is_flat,
        problem="{layout} is not offered: fsdp1's flat parameters hold no DTensors",
        way_out="use fsdp2",
        why="torch's FullyShardedDataParallel flattens plain tensors only",
    ),
    Rule(
        "ep on an old torch",
        applies=lambda case: _is_spread(case) and case.facts.torch_version < EXPERTS_TORCH,
        problem=lambda case: (
            f"parallel.ep needs torch {dotted(EXPERTS_TORCH)} or later, and this is torch "
            f"{dotted(case.facts.torch_version)}"
        ),
        way_out="install it, or set parallel.ep to 1",
        why="fully_shard takes another mesh for a parameter since then, and no older one was tried",
    ),
)
"""On the run file alone."""

GRID_RULES = (
    Rule(
        "ep divides the data ranks",
        applies=lambda case: _is_spread(case) and _ranks_that_join(case) % case.parallel.ep != 0,
        problem=lambda case: (
            f"parallel.ep is {case.parallel.ep}, which does not divide the "
            f"{_ranks_that_join(case)} data-parallel and context-parallel processes"
            + (" of a replica" if case.parallel.dp_replicate > 1 else "")
        ),
        way_out=lambda case: (
            "lower parallel.ep, or use more processes"
            if case.strategy.axis is not None
            else "set parallel.data to ddp or fsdp2, or parallel.cp to a multiple of parallel.ep"
        ),
        why="experts are spread over ranks that have tokens of their own",
    ),
)
"""On the number of processes."""

MODEL_RULES = (
    Rule(
        "capacity without experts",
        applies=lambda case: _drops(case) and not case.model.num_experts,
        problem=(
            "model.expert_capacity is {cfg.model.expert_capacity}, but {model.family} has no "
            "routed experts here"
        ),
        way_out="leave it out",
        why="nothing would be dropped",
    ),
    Rule(
        "biases of routers without any",
        applies=lambda case: _balances(case) and not case.model.has_router_bias,
        problem=(
            "model.router_bias_rate is {cfg.model.router_bias_rate}, but the routers of "
            "{model.family} have no bias on their scores"
        ),
        way_out="set it to 0, or use model.router_aux_loss_coef where the family has that loss",
        why="nothing would change",
    ),
    Rule(
        "ep on a model without experts",
        applies=lambda case: _is_spread(case) and not case.model.num_experts,
        problem="parallel.ep is {parallel.ep}, but {model.family} has no routed experts here",
        way_out="set parallel.ep to 1",
        why="nothing can be spread",
    ),
    Rule(
        "ep divides the experts",
        applies=lambda case: _is_spread(case) and bool(_uneven(case)),
        problem=lambda case: (
            f"parallel.ep is {case.parallel.ep}, which does not divide the {_uneven(case)[0]} "
            f"routed experts of this {case.model.family}"
        ),
        way_out=lambda case: f"use {either(_divisors_of_all([*case.model.num_experts]))}",
        why="every rank has the same number of experts",
    ),
)
"""On the model."""
