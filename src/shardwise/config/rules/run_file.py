"""Rules that a run file breaks by itself, whatever the model and the number of processes."""

from collections.abc import Callable

from shardwise.base.layouts import strategies
from shardwise.base.schedules import HALVING, virtual_stages_of
from shardwise.config import Parallel
from shardwise.config.ranges import MOST_TOKENS, shown
from shardwise.config.rules import (
    bases,
    compiled,
    context,
    data,
    disk,
    duration,
    experts,
    optimizers,
    products,
    splits,
)
from shardwise.config.rules.rule import Case, Rule, dotted, multiples

PIPELINE_TORCH = (2, 13)
"""The first torch whose pipelining is known to compute the right gradients."""
INSTEAD_OF_HALVING = "or use 1f1b, interleaved-1f1b, looped-bfs or gpipe"


def _belongs_to(key: str, is_used: Callable[[Case], bool], strategy: str, way_out: str) -> Rule:
    """Return the rule that a key of `parallel` may differ from its default only where `is_used`."""
    default = getattr(Parallel(), key)
    return Rule(
        f"{key} without its strategy",
        applies=lambda case: getattr(case.parallel, key) != default and not is_used(case),
        problem=lambda case: (
            f"parallel.{key} is {shown(getattr(case.parallel, key))}, which is for {strategy}"
        ),
        way_out=way_out,
        why="the key would have no effect",
    )


def _without_tensor(key: str, is_set: Callable[[Case], bool], way_out: str) -> Rule:
    """Return the rule that tensor parallelism is not offered together with a key."""
    return Rule(
        f"tp with {key}",
        applies=lambda case: case.parallel.tp > 1 and is_set(case),
        problem=f"{key} is {{cfg.{key}}}, which is not proven with tensor parallelism",
        way_out=f"{way_out}, or set parallel.tp to 1",
        why="no cell of the parity matrix runs both",
    )


def _pieces(case: Case) -> int:
    """Return into how many pieces context and sequence parallelism cut a row."""
    return case.parallel.cp * (case.parallel.tp if case.parallel.sequence_parallel else 1)


def _is_pipeline(case: Case) -> bool:
    return case.parallel.pp > 1


def _offload_strategies(case: Case) -> tuple[str, ...]:
    """Return the values of `parallel.data` beside which what is offloaded can be."""
    offload = case.parallel.offload
    return tuple(s.name for s in strategies().values() if offload in s.offloads)


def _halves(case: Case) -> bool:
    return _is_pipeline(case) and case.parallel.schedule in HALVING


def _fixed_virtual_stages(case: Case) -> int:
    return virtual_stages_of(case.parallel.schedule, case.parallel.num_virtual)


def _stages(num: int) -> str:
    return "one stage" if num == 1 else f"{num} stages"


def _tokens(case: Case) -> int:
    return case.training.global_batch_size * case.cfg.data.sequence_length


RULES = (
    *data.RULES,
    *(
        _belongs_to(key, _is_pipeline, "a pipeline", "set parallel.pp to 2 or more")
        for key in ("schedule", "virtual_stages", "split", "speeds", "memory_limit_gib")
    ),
    _belongs_to(
        "sequence_parallel",
        lambda case: case.parallel.tp > 1,
        "tensor parallelism",
        "set parallel.tp to 2 or more",
    ),
    _belongs_to(
        "cp_attention",
        lambda case: case.parallel.cp > 1,
        "context parallelism",
        "set parallel.cp to 2 or more",
    ),
    _belongs_to(
        "dp_replicate",
        lambda case: case.strategy.with_replicas is not None,
        "parallel.data fsdp2 (HSDP)",
        "leave it at 1",
    ),
    _belongs_to(
        "reshard_after_forward",
        lambda case: case.strategy.frees_weights,
        "parallel.data fsdp2",
        "leave it at true",
    ),
    Rule(
        "offload without its strategy",
        applies=lambda case: (
            case.parallel.offloads and case.parallel.data not in _offload_strategies(case)
        ),
        problem="parallel.offload {parallel.offload} is not for parallel.data {parallel.data}",
        way_out=lambda case: {
            "all": "use fsdp2, or offload optimizer",
            "disk": "use single or ddp, with pp or tp for more ranks",
        }.get(case.parallel.offload, "use single, ddp or fsdp2"),
        why=(
            "zero and fsdp1 step on views of flat weights; fsdp2 alone gathers from the CPU, and "
            "has its own memory for shards, which no window can hold"
        ),
    ),
    _belongs_to(
        "fsdp1_wrap", lambda case: case.strategy.is_flat, "parallel.data fsdp1", "leave it out"
    ),
    *disk.RULES,
    *duration.RULES,
    Rule(
        "lora_b_lr_ratio without LoRA",
        applies=lambda case: case.cfg.lora is None and case.cfg.optimizer.lora_b_lr_ratio != 1,
        problem=(
            "optimizer.lora_b_lr_ratio is {cfg.optimizer.lora_b_lr_ratio}, but without LoRA there "
            "are no factors B"
        ),
        way_out="add a section lora, or leave it at 1",
        why="the key would have no effect",
    ),
    *optimizers.RULES,
    Rule(
        "tokens in a step",
        applies=lambda case: _tokens(case) > MOST_TOKENS,
        problem=lambda case: (
            f"training.global_batch_size times data.sequence_length is {_tokens(case):,} tokens in "
            "a step"
        ),
        way_out=f"give at most {MOST_TOKENS:,}",
        why="such a step has no end: tests/test_run_file_fuzz.py",
    ),
    *compiled.RULES,
    Rule(
        "offload of activations with checkpointing of operators",
        applies=lambda case: case.training.offload_activations and case.training.keeps_operators,
        problem=(
            "training.offload_activations moves what autograd keeps, and training.checkpointing "
            "operators keeps results of products outside of autograd"
        ),
        way_out="set checkpointing to full, none or a list of layer kinds",
        why="in torch's eager mode a policy of selective checkpointing cannot move what it keeps",
    ),
    Rule(
        "fsdp1 with tp",
        applies=lambda case: case.strategy.is_flat and case.parallel.tp > 1,
        problem="{layout} is not offered: fsdp1's flat parameters hold no DTensors",
        way_out="use fsdp2",
        why="torch's FullyShardedDataParallel flattens plain tensors only",
    ),
    Rule(
        "zero2 with tp",
        applies=lambda case: not case.strategy.takes_late_sums and case.parallel.tp > 1,
        problem="{layout} is not offered: zero2 reduces gradients before tp has completed them",
        way_out="use zero1 or fsdp2",
        why="zero2 reduce-scatters a gradient in its hook, tp sums some after the last backward",
    ),
    Rule(
        "zero2 or fsdp1 in a pipeline",
        applies=lambda case: _is_pipeline(case) and bool(case.strategy.unfit_for_stages),
        problem="{layout} is not offered: {strategy.unfit_for_stages}",
        way_out="use zero1, ddp or fsdp2",
        why="no cell of the parity matrix runs both",
    ),
    Rule(
        "fsdp1 naive with adapters of another dtype",
        applies=lambda case: (
            case.strategy.is_flat
            and case.parallel.fsdp1_wrap == "naive"
            and case.cfg.lora is not None
            and case.cfg.lora.dtype == "float32"
            and case.cfg.model.dtype != "float32"
        ),
        problem=(
            "parallel.fsdp1_wrap naive: a flat parameter has one dtype, but the adapters are "
            "float32 and the model is {cfg.model.dtype}"
        ),
        way_out="set lora.dtype to model, or parallel.fsdp1_wrap to separate",
        why="torch refuses a flat parameter of two dtypes: tests/parallel/test_fsdp1.py",
    ),
    _without_tensor("training.compile", lambda case: case.training.is_compiled, "set it to none"),
    Rule(
        "tp with a memory limit",
        applies=lambda case: case.parallel.tp > 1 and case.parallel.memory_limit_gib is not None,
        problem="parallel.memory_limit_gib counts whole layers, not a tensor-parallel rank's share",
        way_out="leave it out, or set parallel.tp to 1",
        why="the costs of a split are those of whole layers",
    ),
    Rule(
        "sequence length over sp",
        applies=lambda case: (
            case.parallel.sequence_parallel
            and case.cfg.data.sequence_length % _pieces(case) != 0
            and case.cfg.data.sequence_length % case.parallel.cp == 0
        ),
        problem=lambda case: (
            f"data.sequence_length is {case.cfg.data.sequence_length}, which "
            f"parallel.sequence_parallel cannot shard evenly over {_pieces(case)} ranks"
        ),
        way_out=lambda case: (
            f"use {multiples(case.cfg.data.sequence_length, _pieces(case))}, or set "
            "parallel.sequence_parallel to false"
        ),
        why="each rank holds 1/tp of the tokens that context parallelism leaves it",
    ),
    Rule(
        "sequence length over cp",
        applies=lambda case: case.cfg.data.sequence_length % case.parallel.cp != 0,
        problem=(
            "data.sequence_length is {cfg.data.sequence_length}, which parallel.cp cannot cut into "
            "{parallel.cp} equal pieces"
        ),
        way_out=lambda case: (
            f"use {multiples(case.cfg.data.sequence_length, _pieces(case))}, or another parallel.cp"
        ),
        why="each rank computes the same number of tokens of a row",
    ),
    *context.RULES,
    *experts.RULES,
    *bases.RULES,
    *products.RULES,
    *splits.RULES,
    Rule(
        "pp on an old torch",
        applies=lambda case: _is_pipeline(case) and case.facts.torch_version < PIPELINE_TORCH,
        problem=lambda case: (
            f"parallel.pp needs torch {dotted(PIPELINE_TORCH)} or later, and this is "
            f"{dotted(case.facts.torch_version)}"
        ),
        way_out="install that",
        why="earlier schedules are silently wrong: tests/parallel/test_torch_pipelining.py",
    ),
    Rule(
        "offload with a memory limit",
        applies=lambda case: case.parallel.offloads and case.parallel.memory_limit_gib is not None,
        problem="parallel.memory_limit_gib counts what parallel.offload {parallel.offload} moves",
        way_out="leave one of them out",
        why="the costs of a split are those of a device that holds everything",
    ),
    Rule(
        "stages per rank",
        applies=lambda case: case.parallel.num_virtual != _fixed_virtual_stages(case),
        problem=lambda case: (
            f"parallel.schedule {case.parallel.schedule} has "
            f"{_stages(_fixed_virtual_stages(case))} per rank, not {case.parallel.num_virtual}"
        ),
        way_out=lambda case: f"set parallel.virtual_stages to {_fixed_virtual_stages(case)}",
        why="by the definition of the schedule",
    ),
    Rule(
        "halved backwards with fsdp2 that reshards",
        applies=lambda case: (
            _halves(case) and case.strategy.frees_weights and case.parallel.reshard_after_forward
        ),
        problem=(
            "{parallel.schedule} halves backwards, and torch loses gradients of weights that "
            "fsdp2 frees in between"
        ),
        way_out=f"set parallel.reshard_after_forward to false, {INSTEAD_OF_HALVING}",
        why=(
            "tests/parallel/test_torch_pipelining.py"
            "::test_split_backwards_lose_gradients_of_units_that_reshard"
        ),
    ),
    Rule(
        "halved backwards with checkpointing",
        applies=lambda case: _halves(case) and case.training.checkpointing != "none",
        problem=(
            "{parallel.schedule} halves backwards, and torch recomputes a layer in the first "
            "half and then again for every weight of it"
        ),
        way_out=f"set training.checkpointing to none, {INSTEAD_OF_HALVING}",
        why=(
            "tests/parallel/test_torch_pipelining.py"
            "::test_split_backwards_recompute_again_for_every_weight"
        ),
    ),
    Rule(
        "halved backwards with compile",
        applies=lambda case: _halves(case) and case.training.is_compiled,
        problem="{parallel.schedule} halves backwards, which compiled code cannot",
        way_out=f"set training.compile to none, {INSTEAD_OF_HALVING}",
        why="tests/parallel/test_torch_pipelining.py::test_split_backwards_refuse_compiled_stages",
    ),
    Rule(
        "pp with float16 products of bfloat16 weights",
        applies=lambda case: (
            _is_pipeline(case)
            and case.cfg.model.dtype == "bfloat16"
            and case.training.precision == "float16"
        ),
        problem=(
            "parallel.pp: with model.dtype bfloat16 and training.precision float16 hidden states "
            "change their dtype on the way"
        ),
        way_out="use bfloat16 or float32 for both",
        why=(
            "a float16 product added to a bfloat16 embedding is float32, and a stage is built for "
            "one dtype"
        ),
    ),
)
