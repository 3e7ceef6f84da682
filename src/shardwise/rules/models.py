"""Rules on the model that a run trains, with its adapters."""

from __future__ import annotations

from collections.abc import Callable

from shardwise.config import RunConfig
from shardwise.layouts import HALVING, V_SHAPED, Facts, ModelFacts
from shardwise.rules.rule import Rule, Text, either

MOST_TENSOR_RANKS = 64
"""Up to which sizes of `tp` are tried, to name those that work."""

Predicate = Callable[[RunConfig, ModelFacts], bool]
ModelText = str | Callable[[RunConfig, ModelFacts], str]


def _rule(name: str, applies: Predicate, problem: ModelText, way_out: ModelText, why: str) -> Rule:
    """Return a rule that asks the run file and the model only."""
    return Rule(
        name,
        lambda cfg, facts: applies(cfg, _model(facts)),
        _of_model(problem),
        _of_model(way_out),
        why,
    )


def _of_model(text: ModelText) -> Text:
    return text if isinstance(text, str) else lambda cfg, facts: text(cfg, _model(facts))


def _model(facts: Facts) -> ModelFacts:
    assert facts.model is not None, "a rule on models is asked without one"
    return facts.model


def _sizes_of_tp(cfg: RunConfig, model: ModelFacts) -> str:
    sizes = range(1, MOST_TENSOR_RANKS + 1)
    return f"use {either([str(size) for size in sizes if model.indivisible(size) is None])}"


def _sums_in_16_bits(cfg: RunConfig, model: ModelFacts) -> bool:
    return cfg.training.accumulation == "float32" and model.trains_in_16_bits


def _unknown_kinds(cfg: RunConfig, model: ModelFacts) -> list[str]:
    kinds = cfg.training.checkpointing
    return sorted(set(kinds) - set(model.kinds)) if isinstance(kinds, list) else []


def _num_stages(cfg: RunConfig) -> int:
    return cfg.parallel.pp * cfg.parallel.num_virtual


def _given_split(cfg: RunConfig) -> list[int]:
    return [] if isinstance(cfg.parallel.split, str) else cfg.parallel.split


def _split_is_another_models(cfg: RunConfig, model: ModelFacts) -> bool:
    split = _given_split(cfg)
    if cfg.parallel.pp == 1 or not split:
        return cfg.parallel.split == []
    return len(split) != _num_stages(cfg) or sum(split) != model.num_layers or min(split) < 0


RULES = (
    _rule(
        "a family that is not listed, with tp or pp",
        applies=lambda cfg, model: (
            not model.is_listed and (cfg.parallel.tp > 1 or cfg.parallel.pp > 1)
        ),
        problem=(
            "{layout} is not offered for {model.family}, which is not a family that shardwise "
            "knows (`shardwise models` lists them)"
        ),
        way_out="set parallel.pp and parallel.tp to 1",
        why="how its blocks are sharded, and what it computes around its layers, is not known",
    ),
    _rule(
        "a loss on logits of a family that is not listed",
        applies=lambda cfg, model: (
            not model.is_listed and cfg.training.loss in ("chunked", "triton")
        ),
        problem=(
            "training.loss is {cfg.training.loss}, but what {model.family}, which is not listed, "
            "does to its logits is not known"
        ),
        way_out="use auto or plain",
        why="a family may scale or cap its logits before the loss",
    ),
    _rule(
        "kinds of layers to recompute",
        applies=lambda cfg, model: bool(_unknown_kinds(cfg, model)),
        problem=lambda cfg, model: (
            f"training.checkpointing names {_unknown_kinds(cfg, model)[0]}, but this model's "
            f"layers are of the kinds {', '.join(sorted(model.kinds))}"
        ),
        way_out="choose among these, or full or operators",
        why="nothing would be recomputed",
    ),
    _rule(
        "learned positions",
        applies=lambda cfg, model: (
            model.num_positions is not None and cfg.data.sequence_length > model.num_positions
        ),
        problem=(
            "data.sequence_length is {cfg.data.sequence_length}, but {model.family} has learned "
            "only {model.num_positions} positions"
        ),
        way_out="lower it",
        why="there is no embedding of a later position",
    ),
    _rule(
        "dropout inside attention",
        applies=lambda cfg, model: model.attention_dropout is not None,
        problem=(
            "{model.attention_dropout[0]} is {model.attention_dropout[1]} in the model's "
            "config.json, so that its masks would differ between layouts and between runs"
        ),
        way_out="set it to 0.0",
        why=(
            "the fused attention draws them from torch's global generator, which no seed of a run "
            "file reaches"
        ),
    ),
    _rule(
        "isolated documents with added positions",
        applies=lambda cfg, model: cfg.data.packing == "isolated" and model.adds_positions,
        problem=(
            "data.packing isolated: {model.family} adds positions before its first layer, where "
            "they run on from one document to the next"
        ),
        way_out="use concat or none",
        why="a document begins at position 0 only if it stands alone",
    ),
    _rule(
        "isolated documents in kinds without proof",
        applies=lambda cfg, model: (
            cfg.data.packing == "isolated" and bool(model.kinds_without_isolation)
        ),
        problem=lambda cfg, model: (
            f"data.packing isolated: no test shows that {model.family}'s layers "
            f"({', '.join(sorted(model.kinds_without_isolation))}) keep documents apart"
        ),
        way_out="use concat or none",
        why="tests/models/patches/test_isolation.py::test_every_kind_of_layer_would_leak",
    ),
    _rule(
        "router loss without routers",
        applies=lambda cfg, model: (
            cfg.model.router_aux_loss_coef != 0 and not model.has_router_loss
        ),
        problem=(
            "model.router_aux_loss_coef is {cfg.model.router_aux_loss_coef}, but {model.family} "
            "has no router that takes a load-balancing loss here"
        ),
        way_out="leave it at 0",
        why="the loss would be 0",
    ),
    _rule(
        "LoRA kernel without plain adapters",
        applies=lambda cfg, model: (
            cfg.lora is not None
            and cfg.lora.kernel not in ("auto", "peft")
            and not model.has_plain_adapters
        ),
        problem=(
            "lora.kernel is {cfg.lora.kernel}, but no adapter here is plain LoRA on a linear, "
            "which it is for"
        ),
        way_out="leave it out",
        why="no layer would use the kernel",
    ),
    _rule(
        "fsdp1 with adapters on experts",
        applies=lambda cfg, model: cfg.parallel.data == "fsdp1" and model.has_expert_adapters,
        problem=(
            "parallel.data fsdp1: PEFT computes adapters on routed experts over a parameter, and "
            "finds a view into a flat one in its place"
        ),
        way_out="use fsdp2, or leave the experts out of lora.targets",
        why="PEFT's wrapper registers a parametrization, which needs the parameter itself",
    ),
    _rule(
        "tp with whole layers in modules_to_save",
        applies=lambda cfg, model: cfg.parallel.tp > 1 and model.saved_layers is not None,
        problem=(
            "lora.modules_to_save: {model.saved_layers} holds whole layers, and parallel.tp shards "
            "the blocks in them"
        ),
        way_out=lambda cfg, model: (
            f"name the blocks instead ({', '.join(model.blocks)}), or set parallel.tp to 1"
        ),
        why="tests/parallel/test_tensor_parallel.py::test_a_whole_layer_to_save_is_refused",
    ),
    _rule(
        "sizes over tp",
        applies=lambda cfg, model: (
            cfg.parallel.tp > 1 and model.indivisible(cfg.parallel.tp) is not None
        ),
        problem=lambda cfg, model: (
            f"parallel.tp is {cfg.parallel.tp}, but this {model.family} has "
            f"{model.indivisible(cfg.parallel.tp)}, which cannot be sharded evenly over so many "
            "ranks"
        ),
        way_out=_sizes_of_tp,
        why="a rank computes whole heads or channels",
    ),
    _rule(
        "compile with experts of odd widths",
        applies=lambda cfg, model: (
            cfg.training.compile != "none" and model.odd_experts(cfg.parallel.tp) is not None
        ),
        problem=lambda cfg, model: f"training.compile: {model.odd_experts(cfg.parallel.tp)}",
        way_out="set it to none, or use such a width",
        why="the experts then run one by one, and would be compiled for every number of tokens",
    ),
    _rule(
        "float32 sums in a pipeline whose stages add up",
        applies=lambda cfg, model: (
            _sums_in_16_bits(cfg, model)
            and cfg.parallel.pp > 1
            and (cfg.parallel.data == "fsdp2" or cfg.parallel.schedule in HALVING)
        ),
        problem=(
            "training.accumulation is float32, but in a pipeline with fsdp2 or a zero-bubble "
            "schedule the gradients of bfloat16 weights add up in bfloat16"
        ),
        way_out="use 1f1b with ddp, or set model.dtype to float32",
        why="torch's stage adds them up itself",
    ),
    _rule(
        "float32 sums with tp",
        applies=lambda cfg, model: _sums_in_16_bits(cfg, model) and cfg.parallel.tp > 1,
        problem=(
            "training.accumulation is float32, but with tensor parallelism the gradients of "
            "bfloat16 weights add up in bfloat16"
        ),
        way_out="set it to model, or model.dtype to float32",
        why="a DTensor's gradient has the dtype of its weight",
    ),
    _rule(
        "float32 sums with fsdp1",
        applies=lambda cfg, model: _sums_in_16_bits(cfg, model) and cfg.parallel.data == "fsdp1",
        problem=(
            "training.accumulation is float32, but fsdp1 keeps the gradients of bfloat16 weights "
            "in bfloat16"
        ),
        way_out="use fsdp2, or set model.dtype to float32",
        why="a flat parameter's gradient has its dtype: tests/parallel/test_accumulate.py",
    ),
    _rule(
        "tied weights on one rank, sharded",
        applies=lambda cfg, model: (
            model.is_tied
            and cfg.parallel.schedule in V_SHAPED
            and cfg.parallel.data == "fsdp2"
            and cfg.parallel.pp > 1
        ),
        problem=(
            "{cfg.parallel.schedule} has the embedding and the head on one rank, where they share "
            "their tied weight, and two stages that fsdp2 shards cannot share one"
        ),
        way_out="use interleaved-zero-bubble or 1f1b, or ddp",
        why="fully_shard gives each of the two stages a shard of its own",
    ),
    _rule(
        "more stages than layers",
        applies=lambda cfg, model: cfg.parallel.pp > 1 and _num_stages(cfg) > model.num_layers,
        problem=lambda cfg, model: (
            f"{_num_stages(cfg)} pipeline stages ({cfg.parallel.pp} ranks x "
            f"{cfg.parallel.num_virtual}) are more than the model's {model.num_layers} layers"
        ),
        way_out="use fewer",
        why="a stage would hold nothing",
    ),
    _rule(
        "a split of another model",
        applies=_split_is_another_models,
        problem="the split {cfg.parallel.split} does not cover the model",
        way_out=lambda cfg, model: (
            f"give {_num_stages(cfg)} numbers of layers that add up to {model.num_layers}"
        ),
        why="every layer belongs to one stage",
    ),
    _rule(
        "an empty stage",
        applies=lambda cfg, model: cfg.parallel.pp > 1 and 0 in _given_split(cfg)[1:-1],
        problem="the split {cfg.parallel.split} has a stage with nothing in it",
        way_out="only the first (embedding) and the last (head) can be without a layer",
        why="a stage of a middle rank has something to compute",
    ),
)
