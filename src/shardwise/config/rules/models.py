"""Rules on the model that a run trains, with its adapters."""

from shardwise.base.schedules import HALVING, V_SHAPED
from shardwise.config import CALLERS, Model
from shardwise.config.rules.rule import Case, Rule, either

MOST_TENSOR_RANKS = 64
"""Up to which sizes of `tp` are tried, to name those that work."""


def _sizes_of_tp(case: Case) -> str:
    sizes = range(1, MOST_TENSOR_RANKS + 1)
    return f"use {either([str(size) for size in sizes if case.model.indivisible(size) is None])}"


def _sums_in_16_bits(case: Case) -> bool:
    return case.training.accumulation == "float32" and case.model.trains_in_16_bits


def _unknown_kinds(case: Case) -> list[str]:
    kinds = case.training.checkpointing
    return sorted(set(kinds) - set(case.model.kinds)) if isinstance(kinds, list) else []


def _num_stages(case: Case) -> int:
    return case.parallel.pp * case.parallel.num_virtual


def _given_split(case: Case) -> list[int]:
    return [] if isinstance(case.parallel.split, str) else case.parallel.split


def _split_is_another_models(case: Case) -> bool:
    split = _given_split(case)
    if case.parallel.pp == 1 or not split:
        return case.parallel.split == []
    return len(split) != _num_stages(case) or sum(split) != case.model.num_layers or min(split) < 0


def _not_for_own(case: Case) -> str | None:
    """Return the first key in use that works on transformers models alone."""
    cfg, default = case.cfg, Model(CALLERS)
    in_use = {
        "lora": cfg.lora is not None,
        **{
            f"model.{key}": value != getattr(default, key) for key, value in vars(cfg.model).items()
        },
        "training.compile": case.training.is_compiled,
        "training.matmul": case.training.is_fp8,
        "parallel.cp": case.parallel.cp > 1,
        "parallel.sequence_parallel": case.parallel.sequence_parallel,
        "parallel.memory_limit_gib": case.parallel.memory_limit_gib is not None,
        "parallel.split dynamic": case.parallel.split == "dynamic",
        "parallel.offload": case.parallel.offloads,
        f"parallel.schedule {case.parallel.schedule}": (
            case.parallel.pp > 1 and case.parallel.schedule in HALVING
        ),
    }
    return next((key for key, is_in_use in in_use.items() if is_in_use), None)


RULES = (
    Rule(
        "an own module with a key of transformers models",
        applies=lambda case: case.model.is_own and _not_for_own(case) is not None,
        problem=lambda case: (
            f"{_not_for_own(case)} is for transformers models, and {case.model.family} is a module "
            "of your own"
        ),
        way_out="leave it out",
        why=(
            "it is about transformers' modules, or no test shows it for others: "
            "tests/training/test_own_loop.py"
        ),
    ),
    Rule(
        "an own module in a pipeline, without stages",
        applies=lambda case: (
            case.model.is_own and case.parallel.pp > 1 and not case.model.gives_stages
        ),
        problem=lambda case: (
            f"parallel.pp is {case.parallel.pp}, but {case.model.family} gives no stages"
        ),
        way_out="give it the methods cut() and passed_on(), or set parallel.pp to 1",
        why="what it computes around its layers is known to itself alone",
    ),
    Rule(
        "an own module in a pipeline, with tied weights",
        applies=lambda case: case.model.is_own and case.parallel.pp > 1 and case.model.is_tied,
        problem="{model.family} has a parameter at two places, which a pipeline may separate",
        way_out="give each place a parameter of its own, or set parallel.pp to 1",
        why="the gradient of a weight in two stages would have to be added up",
    ),
    Rule(
        "an own module under tp, without cuts",
        applies=lambda case: (
            case.model.is_own and case.parallel.tp > 1 and not case.model.gives_cuts
        ),
        problem=lambda case: (
            f"parallel.tp is {case.parallel.tp}, but {case.model.family} does not say how its "
            "weights are sharded"
        ),
        way_out="give it the method tensor_cuts(), or set parallel.tp to 1",
        why="which of its linears form pairs is known to itself alone",
    ),
    Rule(
        "a family that is not listed, with pp, cp, ep or tp",
        applies=lambda case: (
            not (case.model.is_listed or case.model.is_own)
            and (case.parallel.ranks_of_a_model > 1 or case.parallel.ep > 1)
        ),
        problem=(
            "{layout} is not offered for {model.family}, which is not a family that shardwise "
            "knows (`shardwise models` lists them)"
        ),
        way_out="set parallel.pp, parallel.cp, parallel.ep and parallel.tp to 1",
        why="how its blocks are sharded, and what it computes around its layers, is not known",
    ),
    Rule(
        "a loss on logits of a family that is not listed",
        applies=lambda case: (
            not case.model.is_listed and case.training.loss in ("chunked", "triton")
        ),
        problem=(
            "training.loss is {training.loss}, but what {model.family}, which is not listed, "
            "does to its logits is not known"
        ),
        way_out="use auto or plain",
        why="a family may scale or cap its logits before the loss",
    ),
    Rule(
        "a kernel for an attention that takes none",
        applies=lambda case: (
            case.cfg.model.attention not in ("auto", "eager") and not case.model.has_fused_attention
        ),
        problem=(
            "model.attention is {cfg.model.attention}, but transformers computes "
            "{model.family}'s attention step by step alone"
        ),
        way_out="set it to auto",
        why="its class has no form for torch's scaled dot product, as with sinks or softcaps",
    ),
    Rule(
        "model.attention where attention is the project's own",
        applies=lambda case: (
            case.cfg.model.attention != "auto"
            and (case.parallel.cp > 1 or case.model.has_own_attention)
        ),
        problem=(
            "model.attention is {cfg.model.attention}, but shardwise's own code computes attention "
            "that caps scores (Gemma 2), and all of it with parallel.cp > 1"
        ),
        way_out="set it to auto",
        why="no kernel of torch caps scores, or has the tokens of several ranks",
    ),
    Rule(
        "isolated documents with eager attention",
        applies=lambda case: (
            case.cfg.model.attention == "eager" and case.cfg.data.keeps_documents_apart
        ),
        problem="model.attention is eager, which needs a mask, and documents kept apart have none",
        way_out="use sdpa",
        why="each document is a row of its own in every mixer, and its attention causal",
    ),
    Rule(
        "kinds of layers to recompute",
        applies=lambda case: bool(_unknown_kinds(case)),
        problem=lambda case: (
            f"training.checkpointing names {_unknown_kinds(case)[0]}, but this model's "
            f"layers are of the kinds {', '.join(sorted(case.model.kinds))}"
        ),
        way_out="choose among these, or full or operators",
        why="nothing would be recomputed",
    ),
    Rule(
        "learned positions",
        applies=lambda case: (
            case.model.num_positions is not None
            and case.cfg.data.sequence_length > case.model.num_positions
        ),
        problem=(
            "data.sequence_length is {cfg.data.sequence_length}, but {model.family} has learned "
            "only {model.num_positions} positions"
        ),
        way_out="lower it",
        why="there is no embedding of a later position",
    ),
    Rule(
        "noise that no seed reaches",
        applies=lambda case: case.model.unseeded_noise is not None,
        problem=(
            "{model.unseeded_noise[0]} is {model.unseeded_noise[1]} in the model's config.json, so "
            "that its random numbers would differ between layouts and between runs"
        ),
        way_out="set it to 0.0",
        why=(
            "fused attention, or a router, draws them from torch's global generator, which no seed "
            "of a run file reaches"
        ),
    ),
    Rule(
        "tokens that see those after them",
        applies=lambda case: case.model.sees_ahead is not None,
        problem=(
            "{model.sees_ahead[0]} is {model.sees_ahead[1]} in the model's config.json, so that a "
            "token would see the one that it is trained to predict"
        ),
        way_out="give a causal model, or take the key out",
        why="the loss would fall to nothing, and the model could not generate",
    ),
    Rule(
        "isolated documents with added positions",
        applies=lambda case: case.cfg.data.keeps_documents_apart and case.model.adds_positions,
        problem=(
            "data.packing {cfg.data.packed}: {model.family} adds positions before its first "
            "layer, where they run on from one document to the next"
        ),
        way_out="use concat or none, for pairs another model",
        why="a document begins at position 0 only if it stands alone",
    ),
    Rule(
        "isolated documents in kinds without proof",
        applies=lambda case: (
            case.cfg.data.keeps_documents_apart and bool(case.model.kinds_without_isolation)
        ),
        problem=lambda case: (
            f"data.packing {case.cfg.data.packed}: no test shows that {case.model.family}'s layers "
            f"({', '.join(sorted(case.model.kinds_without_isolation))}) keep documents apart"
        ),
        way_out="use concat or none, for pairs another model",
        why="tests/models/patches/test_isolation.py::test_every_kind_of_layer_would_leak",
    ),
    Rule(
        "router loss without routers",
        applies=lambda case: (
            case.cfg.model.router_aux_loss_coef != 0 and not case.model.has_router_loss
        ),
        problem=(
            "model.router_aux_loss_coef is {cfg.model.router_aux_loss_coef}, but {model.family} "
            "has no router that takes a load-balancing loss here"
        ),
        way_out="leave it at 0",
        why="the loss would be 0",
    ),
    Rule(
        "LoRA kernel without plain adapters",
        applies=lambda case: (
            case.cfg.lora is not None
            and case.cfg.lora.kernel not in ("auto", "peft")
            and not case.model.has_plain_adapters
        ),
        problem=(
            "lora.kernel is {cfg.lora.kernel}, but no adapter here is plain LoRA on a linear, "
            "which it is for"
        ),
        way_out="leave it out",
        why="no layer would use the kernel",
    ),
    Rule(
        "tp with whole layers in modules_to_save",
        applies=lambda case: case.parallel.tp > 1 and case.model.saved_layers is not None,
        problem=(
            "lora.modules_to_save: {model.saved_layers} holds whole layers, and parallel.tp shards "
            "the blocks in them"
        ),
        way_out=lambda case: (
            f"name the blocks instead ({', '.join(case.model.blocks)}), or set parallel.tp to 1"
        ),
        why="tests/parallel/test_tensor_parallel.py::test_a_whole_layer_to_save_is_refused",
    ),
    Rule(
        "sizes over tp",
        applies=lambda case: (
            case.parallel.tp > 1 and case.model.indivisible(case.parallel.tp) is not None
        ),
        problem=lambda case: (
            f"parallel.tp is {case.parallel.tp}, but this {case.model.family} has "
            f"{case.model.indivisible(case.parallel.tp)}, which cannot be sharded evenly over "
            f"{case.parallel.tp} ranks"
        ),
        way_out=_sizes_of_tp,
        why="a rank computes whole heads or channels",
    ),
    Rule(
        "shared adapters on experts that PEFT folds",
        applies=lambda case: (
            case.cfg.lora is not None
            and case.cfg.lora.experts == "shared"
            and case.model.folds_adapters
        ),
        problem="lora.experts is shared, but PEFT computes the adapters on these experts",
        way_out="leave it out, or leave the experts out of lora.targets",
        why="PEFT knows no factors that experts share",
    ),
    Rule(
        "fsdp1 with adapters on experts that PEFT folds",
        applies=lambda case: case.strategy.is_flat and case.model.folds_adapters,
        problem=(
            "parallel.data fsdp1: PEFT needs the parameter itself to compute adapters on these "
            "experts, and finds a view into a flat parameter in its place"
        ),
        way_out="use fsdp2, or leave the experts out of lora.targets",
        why="PEFT's wrapper registers a parametrization, which needs the parameter itself",
    ),
    Rule(
        "float32 sums in a pipeline whose stages add up",
        applies=lambda case: (
            _sums_in_16_bits(case)
            and case.parallel.pp > 1
            and ("weights" in case.strategy.sharded or case.parallel.schedule in HALVING)
        ),
        problem=(
            "training.accumulation is float32, but in a pipeline with fsdp2 or a zero-bubble "
            "schedule the gradients of bfloat16 weights add up in bfloat16"
        ),
        way_out="use 1f1b with ddp, or set model.dtype to float32",
        why="torch's stage adds them up itself",
    ),
    Rule(
        "float32 sums with tp",
        applies=lambda case: _sums_in_16_bits(case) and case.parallel.tp > 1,
        problem=(
            "training.accumulation is float32, but with tensor parallelism the gradients of "
            "bfloat16 weights add up in bfloat16"
        ),
        way_out="set it to model, or model.dtype to float32",
        why="a DTensor's gradient has the dtype of its weight",
    ),
    Rule(
        "float32 sums with fsdp1",
        applies=lambda case: _sums_in_16_bits(case) and case.strategy.is_flat,
        problem=(
            "training.accumulation is float32, but fsdp1 keeps the gradients of bfloat16 weights "
            "in bfloat16"
        ),
        way_out="use fsdp2, or set model.dtype to float32",
        why="a flat parameter's gradient has its dtype: tests/parallel/test_accumulate.py",
    ),
    Rule(
        "tied weights on one rank, sharded",
        applies=lambda case: (
            case.model.is_tied
            and case.parallel.schedule in V_SHAPED
            and "weights" in case.strategy.sharded
            and case.parallel.pp > 1
        ),
        problem=(
            "{parallel.schedule} has the embedding and the head on one rank, where they share "
            "their tied weight, and two stages that fsdp2 shards cannot share one"
        ),
        way_out="use interleaved-zero-bubble or 1f1b, or ddp",
        why="fully_shard gives each of the two stages a shard of its own",
    ),
    Rule(
        "more stages than layers",
        applies=lambda case: case.parallel.pp > 1 and _num_stages(case) > case.model.num_layers,
        problem=lambda case: (
            f"{_num_stages(case)} pipeline stages ({case.parallel.pp} ranks x "
            f"{case.parallel.num_virtual}) are more than the model's {case.model.num_layers} layers"
        ),
        way_out=lambda case: (
            "lower parallel.pp"
            if case.parallel.num_virtual == 1
            else "lower parallel.pp or parallel.virtual_stages, or use parallel.schedule 1f1b, "
            "which has one stage per rank"
        ),
        why="a stage would hold nothing",
    ),
    Rule(
        "a split of another model",
        applies=_split_is_another_models,
        problem="the split {parallel.split} does not cover the model",
        way_out=lambda case: (
            f"give {_num_stages(case)} numbers of layers that add up to {case.model.num_layers}"
        ),
        why="every layer belongs to one stage",
    ),
    Rule(
        "an empty stage",
        applies=lambda case: case.parallel.pp > 1 and 0 in _given_split(case)[1:-1],
        problem="the split {parallel.split} has a stage with nothing in it",
        way_out="only the first (embedding) and the last (head) can be without a layer",
        why="a stage of a middle rank has something to compute",
    ),
)
