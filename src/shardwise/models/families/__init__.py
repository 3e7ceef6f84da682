"""The model families that are proven to train right, and the ModelSpec of a model of one of them."""

from __future__ import annotations

from transformers import PretrainedConfig, PreTrainedModel

from shardwise.models.families.base import HYBRID, HYBRID_MIXERS, SPLITS, Family
from shardwise.models.families.falcon_h1 import FALCON_H1
from shardwise.models.families.gpt2 import GPT2
from shardwise.models.families.granitemoehybrid import GRANITEMOEHYBRID
from shardwise.models.families.jamba import JAMBA
from shardwise.models.families.jet_nemotron.family import JET_NEMOTRON
from shardwise.models.families.kimi_linear import KIMI_LINEAR
from shardwise.models.families.lfm2 import LFM2
from shardwise.models.families.nemotron_h import NEMOTRON_H
from shardwise.models.families.qwen3_moe import QWEN3_MOE
from shardwise.models.families.qwen3_next import QWEN3_NEXT
from shardwise.models.families.unproven import inspect_family, unproven_note
from shardwise.models.names import hf_name, is_adapter
from shardwise.models.spec import LayerSpec, ModelSpec
from shardwise.models.tensor_splits import delta_net

__all__ = ["FAMILIES", "Family", "family_of", "spec_of", "unproven_note"]

_COMMON = (
    *(Family(name, token_mixers=HYBRID_MIXERS) for name in ("llama", "qwen3")),
    Family(
        "qwen3_5_text",
        mixers=HYBRID,
        token_mixers=HYBRID_MIXERS,
        splits=SPLITS | {"linear_attn": delta_net.qwen3_5},
        gating=("linear_attn.in_proj_a", "linear_attn.in_proj_b"),
    ),
    Family(
        "olmo_hybrid",
        mixers=HYBRID,
        token_mixers=HYBRID_MIXERS,
        splits=SPLITS | {"linear_attn": delta_net.olmo_hybrid},
        gating=("linear_attn.a_proj", "linear_attn.b_proj"),
    ),
)
_PROVEN = (
    *_COMMON,
    QWEN3_MOE,
    QWEN3_NEXT,
    NEMOTRON_H,
    LFM2,
    GPT2,
    GRANITEMOEHYBRID,
    FALCON_H1,
    KIMI_LINEAR,
    JAMBA,
    JET_NEMOTRON,
)
FAMILIES = {family.model_type: family for family in _PROVEN}


def family_of(model: PreTrainedModel) -> Family:
    """The family of a model, on any device: a listed one, or what inspection finds.

    UserError if the model type is not listed and not of the common shape.
    """
    return FAMILIES.get(model.config.model_type) or inspect_family(model)


def spec_of(config: PretrainedConfig, model: PreTrainedModel) -> ModelSpec:
    """The model as an ordered list of modules, each of which is checked to be there."""
    family = family_of(model)
    kinds = family.kinds(config)
    names = [f"{family.layers}.{i}" for i in range(len(kinds))]
    assert len(list(model.get_submodule(family.layers).children())) == len(names)
    for name in filter(None, (family.embed, family.positions, family.norm, family.head, *names)):
        model.get_submodule(name)  # raises AttributeError with the missing name
    return ModelSpec(
        family=family.model_type,
        embed=family.embed,
        positions=family.positions,
        layers=tuple(LayerSpec(n, kind, _feed_forward(model, n, family)) for n, kind in zip(names, kinds)),
        norm=family.norm,
        head=family.head,
        tied=f"{family.head}.weight" in model.all_tied_weights_keys,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
    )


def _feed_forward(model: PreTrainedModel, layer: str, family: Family) -> str:
    parameters = {hf_name(name) for name, _ in model.get_submodule(layer).named_parameters() if not is_adapter(name)}
    found = [name for name in parameters if any(name.startswith(f"{module}.") for module in family.feed_forward)]
    if not found:
        return "none"
    return "moe" if any(name in family.experts for name in found) else "dense"
