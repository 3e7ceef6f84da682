"""The families that are proven to train right, and the ModelSpec of a model of one of them."""

from importlib import import_module
from pkgutil import iter_modules

from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

from shardwise.config import require
from shardwise.models.families.base import Family, Mixer
from shardwise.models.families.unproven import inspect_family, unproven_note
from shardwise.models.names import hf_name, is_adapter
from shardwise.models.spec import Block, LayerSpec, ModelSpec

__all__ = ["FAMILIES", "Family", "every_kind", "family_of", "spec_of", "unproven_note"]

_FILES = [import_module(f"{__name__}.{file.name}") for file in iter_modules(__path__)]
_PROVEN = [value for file in _FILES for value in vars(file).values() if isinstance(value, Family)]
FAMILIES = {family.model_type: family for family in _PROVEN}


def family_of(model: PreTrainedModel) -> Family:
    """Return the family of a model, on any device: a listed one, or what inspection finds.

    Raises UserError if the model type is not listed and not of the common shape.
    """
    return FAMILIES.get(model.config.model_type) or inspect_family(model)


def spec_of(config: PretrainedConfig, model: PreTrainedModel) -> ModelSpec:
    """Return the model as an ordered list of modules, each of which is checked to be there."""
    family = family_of(model)
    mixers = family.mixers_of(config)
    num_layers = len(list(model.get_submodule(family.layers).children()))
    require(
        num_layers == len(mixers),
        f"model type {family.model_type}: its config.json counts {len(mixers)} layers, but "
        f"{family.layers} has {num_layers}; give a model of a family that `shardwise models` lists",
    )
    layers = tuple(_layer(model, number, mixer, family) for number, mixer in enumerate(mixers))
    paths = [family.embed, family.norm, family.head, *(layer.name for layer in layers)]
    if family.positions is not None:
        paths.append(family.positions)
    paths += [f"{layer.name}.{block.path}" for layer in layers for block in layer.blocks]
    for path in paths:
        model.get_submodule(path)  # raises AttributeError with the missing name
    return ModelSpec(
        family=family.model_type,
        embed=family.embed,
        positions=family.positions,
        layers=layers,
        norm=family.norm,
        head=family.head,
        tied=f"{family.head}.weight" in model.all_tied_weights_keys,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
    )


def every_kind(family: Family) -> PretrainedConfig:
    """Return transformers' config of a family, changed so that it has each kind of layer."""
    config = AutoConfig.for_model(family.model_type, **family.options)
    types = getattr(config, "layer_types", family.mixers)
    if types is None or len(set(types)) < len(family.mixers):
        kinds, num_layers = [*family.mixers], config.num_hidden_layers
        config.layer_types = [kinds[i % len(kinds)] for i in range(num_layers)]
    if hasattr(config, "mlp_only_layers"):  # a mixture of experts in all other layers
        config.mlp_only_layers = [0]
    return config


def _layer(model: PreTrainedModel, number: int, mixer: Mixer, family: Family) -> LayerSpec:
    name = f"{family.layers}.{number}"
    label = _feed_forward(model, name, family)
    after = tuple(Block(path, kind) for path, kind in family.feed_forward.get(label, {}).items())
    mixers = mixer.blocks
    if family.model_type not in FAMILIES:  # which blocks a layer of a type has is a guess
        there = {path for path, _ in model.get_submodule(name).named_modules()}
        mixers, after = (
            tuple(block for block in blocks if block.path in there) for blocks in (mixers, after)
        )
    return LayerSpec(name, mixer.name, label, mixers, after, family.norms, number)


def _feed_forward(model: PreTrainedModel, layer: str, family: Family) -> str:
    parameters = {
        hf_name(name)
        for name, _ in model.get_submodule(layer).named_parameters()
        if not is_adapter(name)
    }
    inside = tuple(f"{path}." for path in family.feed_forward_paths)
    weights = [name for name in parameters if name.startswith(inside)]
    if not weights:
        return "none"
    return "dense" if {*family.named("experts")}.isdisjoint(weights) else "moe"
