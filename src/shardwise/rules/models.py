"""Rules on the model that a run trains, with its adapters."""

from __future__ import annotations

from collections.abc import Callable

from shardwise.config import RunConfig
from shardwise.layouts import HALVING, V_SHAPED, Facts, ModelFacts, layout_of
from shardwise.rules.rule import Rule, either

MOST_TENSOR_RANKS = 64
"""Up to which sizes of `tp` are tried, to name those that work."""

Predicate = Callable[[RunConfig, ModelFacts], bool]
Message = Callable[[RunConfig, ModelFacts], str]


def _rule(name: str, applies: Predicate, message: Message, why: str) -> Rule:
    """Return a rule that asks the run file and the model only."""
    return Rule(
        name,
        lambda cfg, facts: applies(cfg, _model(facts)),
        lambda cfg, facts: message(cfg, _model(facts)),
        why,
    )


def _model(facts: Facts) -> ModelFacts:
    assert facts.model is not None, "a rule on models is asked without one"
    return facts.model


def _tensor_message(cfg: RunConfig, model: ModelFacts) -> str:
    sizes = [
        str(size) for size in range(1, MOST_TENSOR_RANKS + 1) if model.indivisible(size) is None
    ]
    return (
        f"parallel.tp is {cfg.parallel.tp}, but this {model.family} has {model.indivisible(cfg.parallel.tp)}, which "
        f"cannot be sharded evenly over so many ranks; use {either(sizes)}"
    )


def _sums_in_16_bits(cfg: RunConfig, model: ModelFacts) -> bool:
    return cfg.training.accumulation == "float32" and model.trains_in_16_bits


def _unknown_kinds(cfg: RunConfig, model: ModelFacts) -> list[str]:
    asked = cfg.training.checkpointing
    return sorted(set(asked) - set(model.kinds)) if isinstance(asked, list) else []


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
        lambda cfg, model: not model.is_listed and (cfg.parallel.tp > 1 or cfg.parallel.pp > 1),
        lambda cfg, model: (
            f"{layout_of(cfg.parallel)} is not offered for {model.family}, which is not a family that shardwise knows "
            "(`shardwise models` lists them); set parallel.pp and parallel.tp to 1"
        ),
        "how its blocks are sharded, and what it computes around its layers, is not known",
    ),
    _rule(
        "a loss on logits of a family that is not listed",
        lambda cfg, model: not model.is_listed and cfg.training.loss in ("chunked", "triton"),
        lambda cfg, model: (
            f"training.loss is {cfg.training.loss}, but what {model.family}, which is not listed, does to its logits "
            "is not known; use auto or plain"
        ),
        "a family may scale or cap its logits before the loss",
    ),
    _rule(
        "kinds of layers to recompute",
        lambda cfg, model: bool(_unknown_kinds(cfg, model)),
        lambda cfg, model: (
            f"training.checkpointing names {_unknown_kinds(cfg, model)[0]}, but this model's layers are of the kinds "
            f"{', '.join(sorted(model.kinds))}; choose among these, or full or operators"
        ),
        "nothing would be recomputed",
    ),
    _rule(
        "learned positions",
        lambda cfg, model: (
            model.num_positions is not None and cfg.data.sequence_length > model.num_positions
        ),
        lambda cfg, model: (
            f"data.sequence_length is {cfg.data.sequence_length}, but {model.family} has learned only "
            f"{model.num_positions} positions; lower it"
        ),
        "there is no embedding of a later position",
    ),
    _rule(
        "dropout inside attention",
        lambda cfg, model: model.attention_dropout is not None,
        lambda cfg, model: (
            f"{' is '.join(map(str, model.attention_dropout or ()))} in the model's config.json; set it to 0.0: its "
            "masks would differ between layouts and between runs"
        ),
        "the fused attention draws them from torch's global generator, which no seed of a run file reaches",
    ),
    _rule(
        "isolated documents with added positions",
        lambda cfg, model: cfg.data.keeps_documents_apart and model.adds_positions,
        lambda cfg, model: (
            f"data.packing isolated: {model.family} adds positions before its first layer, where they run on from one "
            "document to the next; use concat or none"
        ),
        "a document begins at position 0 only if it stands alone",
    ),
    _rule(
        "isolated documents in kinds without proof",
        lambda cfg, model: cfg.data.keeps_documents_apart and bool(model.kinds_without_isolation),
        lambda cfg, model: (
            f"data.packing isolated: no test shows that {model.family}'s layers "
            f"({', '.join(sorted(model.kinds_without_isolation))}) keep documents apart; use concat or none"
        ),
        "tests/models/patches/test_isolation.py::test_every_kind_of_layer_would_leak",
    ),
    _rule(
        "router loss without routers",
        lambda cfg, model: cfg.model.router_aux_loss_coef != 0 and not model.has_router_loss,
        lambda cfg, model: (
            f"model.router_aux_loss_coef is {cfg.model.router_aux_loss_coef}, but {model.family} has no router that "
            "takes a load-balancing loss here; leave it at 0"
        ),
        "the loss would be 0",
    ),
    _rule(
        "LoRA kernel without plain adapters",
        lambda cfg, model: (
            cfg.lora is not None
            and cfg.lora.kernel not in ("auto", "peft")
            and not model.has_plain_adapters
        ),
        lambda cfg, model: (
            f"lora.kernel is {cfg.lora.kernel if cfg.lora else ''}, but no adapter here is plain LoRA on a linear, "
            "which it is for; leave it out"
        ),
        "no layer would use the kernel",
    ),
    _rule(
        "fsdp1 with adapters on experts",
        lambda cfg, model: cfg.parallel.data == "fsdp1" and model.has_expert_adapters,
        lambda cfg, model: (
            "parallel.data fsdp1: PEFT computes adapters on routed experts over a parameter, and finds a view into a "
            "flat one in its place; use fsdp2, or leave the experts out of lora.targets"
        ),
        "PEFT's wrapper registers a parametrization, which needs the parameter itself",
    ),
    _rule(
        "tp with whole layers in modules_to_save",
        lambda cfg, model: cfg.parallel.tp > 1 and model.saved_layers is not None,
        lambda cfg, model: (
            f"lora.modules_to_save: {model.saved_layers} holds whole layers, and parallel.tp shards the blocks in "
            f"them; name the blocks instead ({', '.join(model.blocks)}), or set parallel.tp to 1"
        ),
        "tests/parallel/test_tensor_parallel.py::test_a_whole_layer_to_save_is_refused",
    ),
    _rule(
        "sizes over tp",
        lambda cfg, model: cfg.parallel.tp > 1 and model.indivisible(cfg.parallel.tp) is not None,
        _tensor_message,
        "a rank computes whole heads or channels",
    ),
    _rule(
        "compile with experts of odd widths",
        lambda cfg, model: (
            cfg.training.compile != "none" and model.odd_experts(cfg.parallel.tp) is not None
        ),
        lambda cfg, model: (
            f"training.compile: {model.odd_experts(cfg.parallel.tp)}; set it to none, or use such a width"
        ),
        "the experts then run one by one, and would be compiled for every number of tokens",
    ),
    _rule(
        "float32 sums in a pipeline whose stages add up",
        lambda cfg, model: (
            _sums_in_16_bits(cfg, model)
            and cfg.parallel.pp > 1
            and (cfg.parallel.data == "fsdp2" or cfg.parallel.schedule in HALVING)
        ),
        lambda cfg, model: (
            "training.accumulation is float32, but in a pipeline with fsdp2 or a zero-bubble schedule the gradients of "
            "bfloat16 weights add up in bfloat16; use 1f1b with ddp, or set model.dtype to float32"
        ),
        "torch's stage adds them up itself",
    ),
    _rule(
        "float32 sums with tp",
        lambda cfg, model: _sums_in_16_bits(cfg, model) and cfg.parallel.tp > 1,
        lambda cfg, model: (
            "training.accumulation is float32, but with tensor parallelism the gradients of bfloat16 weights add up in "
            "bfloat16; set it to model, or model.dtype to float32"
        ),
        "a DTensor's gradient has the dtype of its weight",
    ),
    _rule(
        "float32 sums with fsdp1",
        lambda cfg, model: _sums_in_16_bits(cfg, model) and cfg.parallel.data == "fsdp1",
        lambda cfg, model: (
            "training.accumulation is float32, but fsdp1 keeps the gradients of bfloat16 weights in bfloat16; use "
            "fsdp2, or set model.dtype to float32"
        ),
        "a flat parameter's gradient has its dtype: tests/parallel/test_accumulate.py",
    ),
    _rule(
        "tied weights on one rank, sharded",
        lambda cfg, model: (
            model.is_tied
            and cfg.parallel.schedule in V_SHAPED
            and cfg.parallel.data == "fsdp2"
            and cfg.parallel.pp > 1
        ),
        lambda cfg, model: (
            f"{cfg.parallel.schedule} has the embedding and the head on one rank, where they share their tied weight, "
            "and two stages that fsdp2 shards cannot share one; use interleaved-zero-bubble or 1f1b, or ddp"
        ),
        "fully_shard gives each of the two stages a shard of its own",
    ),
    _rule(
        "more stages than layers",
        lambda cfg, model: cfg.parallel.pp > 1 and _num_stages(cfg) > model.num_layers,
        lambda cfg, model: (
            f"{_num_stages(cfg)} pipeline stages ({cfg.parallel.pp} ranks x {cfg.parallel.num_virtual}) are more than "
            f"the model's {model.num_layers} layers; use fewer"
        ),
        "a stage would hold nothing",
    ),
    _rule(
        "a split of another model",
        _split_is_another_models,
        lambda cfg, model: (
            f"the split {cfg.parallel.split} does not cover the model; give {_num_stages(cfg)} numbers of layers that "
            f"add up to {model.num_layers}"
        ),
        "every layer belongs to one stage",
    ),
    _rule(
        "an empty stage",
        lambda cfg, model: cfg.parallel.pp > 1 and 0 in _given_split(cfg)[1:-1],
        lambda cfg, model: (
            f"the split {cfg.parallel.split} has a stage with nothing in it; only the first (embedding) and the last "
            "(head) can be without a layer"
        ),
        "a stage of a middle rank has something to compute",
    ),
)
