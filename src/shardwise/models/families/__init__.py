"""The model families that are proven to train right, and the ModelSpec of a model of one of them."""

from __future__ import annotations

from transformers import PretrainedConfig, PreTrainedModel

from shardwise.config import UserError
from shardwise.models.families.base import Family
from shardwise.models.families.nemotron_h import NEMOTRON_H
from shardwise.models.families.qwen3_next import QWEN3_NEXT
from shardwise.models.spec import LayerSpec, ModelSpec

__all__ = ["FAMILIES", "Family", "family_of", "spec_of"]

_PROVEN = (Family("llama"), Family("qwen3_5_text"), Family("olmo_hybrid"), QWEN3_NEXT, NEMOTRON_H)
FAMILIES = {family.model_type: family for family in _PROVEN}


def family_of(config: PretrainedConfig) -> Family:
    """The family of a model; UserError if it is not one of the proven ones."""
    family = FAMILIES.get(config.model_type)
    if family is None:
        proven = ", ".join(sorted(FAMILIES))
        raise UserError(f"model type {config.model_type} is not proven to train right here; choose one of: {proven}")
    return family


def spec_of(config: PretrainedConfig, model: PreTrainedModel) -> ModelSpec:
    """The model as an ordered list of modules, each of which is checked to be there."""
    family = family_of(config)
    kinds = family.kinds(config)
    layers = tuple(LayerSpec(f"{family.layers}.{i}", kind) for i, kind in enumerate(kinds))
    assert len(list(model.get_submodule(family.layers).children())) == len(layers)
    for name in (family.embed, family.norm, family.head, *(layer.name for layer in layers)):
        model.get_submodule(name)  # raises AttributeError with the missing name
    return ModelSpec(
        family=family.model_type,
        embed=family.embed,
        layers=layers,
        norm=family.norm,
        head=family.head,
        tied=f"{family.head}.weight" in model.all_tied_weights_keys,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
    )
