"""Parameters and products of a model, unit by unit, by its shapes and `requires_grad`.

A multiply-add is 2 FLOPs. Only products count: linears, routers, experts, convolutions, LoRA
factors (a ProductWeight each) and the sequence-mixing cores. Norms, activations, softmax, rotary
embeddings, gates and biases count 0, as they do in the figures of other projects; an embedding is
looked up, not multiplied, and counts 0 too.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, replace
from functools import cached_property

from peft.tuners.lora.layer import ParamWrapper
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from shardwise.models.kinds import RATES
from shardwise.models.kinds.base import Core
from shardwise.models.lora import num_sharing
from shardwise.models.spec import CORE_STAGE, LayerSpec, ModelSpec


@dataclass(frozen=True)
class ProductWeight:
    """A weight that multiplies activations, 2 FLOPs per element and token in each product."""

    name: str
    numel: int
    trainable: bool
    input_gradient: bool
    """The backward needs the gradient of what this weight multiplies."""
    active: float = 1.0
    """Share of the weight that one token meets: top_k / E in a stack of experts, top_k of a factor
    that they share."""
    rerun: bool = True
    """Full activation checkpointing runs the product again; see `Kind.ends`."""
    on_stack: bool = False
    """This is a factor of adapters on a stack of experts; the backward multiplies by A again."""
    by_elements: bool = False
    """A convolution of each channel by itself: no matrix product, so `operators` runs it again."""


@dataclass(frozen=True)
class Unit:
    """The embedding, one layer, or the final norm with the head."""

    name: str
    kind: str  # embed, a layer kind of LayerSpec, or head
    parameters: int  # a tied head's weight belongs to the embedding
    trainable_parameters: int
    weights: tuple[ProductWeight, ...]
    cores: tuple[Core, ...]
    core_gradient: bool  # a gradient flows back through the cores
    backward: bool  # something here or below is trainable, so the backward reaches this unit
    layer: int | None = None
    """The number of the layer, from 0; None: it is no layer."""


@dataclass(frozen=True)
class ModelCounts:
    """A model as its units, from the embedding to the head."""

    units: tuple[Unit, ...]

    @cached_property
    def with_all_input_gradients(self) -> ModelCounts:
        """The same where gradients go down to the embedding's output, whatever is trained."""
        embedding, *above = self.units
        units = [replace(embedding, backward=True)]
        for unit in above:
            weights = tuple(replace(weight, input_gradient=True) for weight in unit.weights)
            units.append(replace(unit, weights=weights, core_gradient=True, backward=True))
        return ModelCounts(tuple(units))

    @property
    def parameters(self) -> int:
        """All parameters, adapters and saved copies included."""
        return sum(unit.parameters for unit in self.units)

    @property
    def active_parameters(self) -> int:
        """Parameters that one token meets: of routed experts its own, of all else everything."""
        weights = [weight for unit in self.units for weight in unit.weights]
        return self.parameters - round(sum(max(0, 1 - w.active) * w.numel for w in weights))

    @property
    def trainable_parameters(self) -> int:
        """Parameters that an optimizer updates."""
        return sum(unit.trainable_parameters for unit in self.units)


_BEYOND = (sys.maxsize, 0, 0, 0)
"""A stage after all others."""
_WRAPPING = re.compile(
    r"\.(base_layer|lora_(?:[AB]|magnitude_vector)\.\w+|modules_to_save\.\w+|weight|bias)(?=\.|$)"
)


def count_model(model: PreTrainedModel, spec: ModelSpec) -> ModelCounts:
    """Count a causal language model on any device, `meta` too, with LoRA adapters or without.

    `requires_grad` must be as in training. Sharded parameters (DTensor) count with their global
    shape.
    """
    counted: set[int] = set()
    units: list[Unit] = []
    for names, layer in zip(unit_modules(spec), (None, *spec.layers, None), strict=True):
        kind = layer.kind if layer else "head" if units else "embed"
        below = bool(units) and units[-1].backward
        units.append(_count_unit(model, names, kind, layer, counted, below))
    return ModelCounts(tuple(units))


def unit_modules(spec: ModelSpec) -> tuple[tuple[str, ...], ...]:
    """Return the paths of each unit's modules, from the embedding to the head."""
    embed = (spec.embed,) if spec.positions is None else (spec.embed, spec.positions)
    return (embed, *((layer.name,) for layer in spec.layers), (spec.norm, spec.head))


def _count_unit(
    model: PreTrainedModel,
    names: tuple[str, ...],
    kind: str,
    layer: LayerSpec | None,
    counted: set[int],
    below: bool,
) -> Unit:
    owned = [
        (f"{name}.{n}", p)
        for name in names
        for n, p in model.get_submodule(name).named_parameters()
    ]
    new = [p for _, p in owned if id(p) not in counted]
    counted.update(id(p) for p in new)
    # PEFT keeps the module that a `modules_to_save` copy stands for, but runs the copy only.
    used = [(name, p) for name, p in owned if ".original_module." not in name]
    stages = {name: _stage(model, name, names, layer) for name, _ in used}
    lowest = min((stages[name] for name, p in used if p.requires_grad), default=_BEYOND)
    if kind == "embed":  # a lookup multiplies nothing
        used = []
    experts = {f"{layer.name}.{name}" for name in layer.experts} if layer else set()
    stacks = [name for name, _ in used if _site(model, name) in experts]
    active = _active_share([p for name, p in used if name in stacks], model.config)
    last = _last_product(layer, [name for name, _ in used]) if layer else None
    weights = tuple(
        ProductWeight(
            name=name,
            numel=p.numel(),
            trainable=p.requires_grad,
            input_gradient=below or lowest < stages[name],
            active=active * num_sharing(_adapter_of(model, name)) if name in stacks else 1.0,
            rerun=name != last,
            on_stack=".lora_" in name and name in stacks,
            by_elements=isinstance(model.get_submodule(name.rpartition(".")[0]), nn.Conv1d),
        )
        for name, p in used
        if p.ndim >= 2 and name.rpartition(".")[2] not in RATES
    )
    return Unit(
        name=names[0] if kind == "embed" else names[-1],
        kind=kind,
        parameters=sum(p.numel() for p in new),
        trainable_parameters=sum(p.numel() for p in new if p.requires_grad),
        weights=weights,
        cores=_cores(layer, model.config) if layer else (),
        core_gradient=below or lowest < (*CORE_STAGE, 0),
        backward=below or lowest < _BEYOND,
        layer=None if layer is None else layer.number,
    )


def _cores(layer: LayerSpec, config: PretrainedConfig) -> tuple[Core, ...]:
    return tuple(core for block in layer.mixers for core in block.kind.cores(config))


def _adapter_of(model: nn.Module, name: str) -> nn.Module | None:
    """Return PEFT's module that has this parameter as a LoRA factor."""
    module, _, factor = name.partition(".lora_")
    return model.get_submodule(module) if factor else None


def _site(model: nn.Module, name: str) -> str:
    """Return where in the transformers model a parameter acts; a LoRA factor acts on its base."""
    wrapper = _adapter_of(model, name)
    if isinstance(wrapper, ParamWrapper):
        name = f"{name.partition('.lora_')[0]}.{wrapper.parameter_name}"
    return _WRAPPING.sub("", name)


def _stage(
    model: nn.Module, name: str, modules: tuple[str, ...], layer: LayerSpec | None
) -> tuple[int, int, int, int]:
    """Return where in the dataflow of its unit a parameter acts.

    A product needs the gradient of its input if something in an earlier unit or at an earlier stage
    is trainable. Branches that run side by side share stages; one that joins late (such as the
    output gate) is taken to act where it starts.
    """
    site = _site(model, name)
    if layer is None:  # the head after the final norm
        places = [i for i, module in enumerate(modules) if f"{site}.".startswith(f"{module}.")]
        stage = (places[0], 0, 0)
    else:
        within = site.removeprefix(f"{layer.name}.")
        stage = layer.stage_of(within)
        assert stage is not None, (
            f"{name}: say in models/kinds, or in the family's norms, where {within} acts"
        )
    # A's output is B's input: with A trainable, B's input gradient is needed.
    return (*stage, int(".lora_B." in name))


def _active_share(stacks: list[nn.Parameter], config: PretrainedConfig) -> float:
    """Return the share of the routed experts that a token is sent to."""
    stacks = [p for p in stacks if p.ndim == 3]
    return config.num_experts_per_tok / stacks[0].shape[0] if stacks else 1.0


def _last_product(layer: LayerSpec, names: list[str]) -> str | None:
    """Return the weight of a layer's last product if nothing later is saved (`Kind.ends`)."""
    after = f"{layer.name}.{layer.norms.after}."
    block = layer.blocks[-1]
    ends = tuple(f"{layer.name}.{block.path}.{end}." for end in block.kind.ends)
    products = [name for name in names if name.startswith(ends) and name.endswith(".weight")]
    if not products or any(name.startswith(after) for name in names):
        return None
    return next((name for name in products if ".lora_B." in name), products[0])
