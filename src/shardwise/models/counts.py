"""Parameters and products of a model, unit by unit, by its shapes and `requires_grad`.

A multiply-add is 2 FLOPs. Only products count: linears, routers, experts, convolutions, LoRA
factors (a ProductWeight each) and the sequence-mixing cores. Norms, activations, softmax, rotary
embeddings, gates and biases count 0, as they do in the figures of other projects; an embedding is
looked up, not multiplied, and counts 0 too.
"""

import re
from dataclasses import dataclass, replace
from functools import cached_property

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from shardwise.models.chunks import CoreFlops
from shardwise.models.kinds import RATES
from shardwise.models.kinds.base import Core
from shardwise.models.names import is_wrapper, num_sharing
from shardwise.models.spec import LayerSpec, ModelSpec
from shardwise.models.walk import walk_of


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
    """Full activation checkpointing runs the product again; see models/walk.py."""
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
    idle_parameters: float  # parameters that one token does not meet
    weights: tuple[ProductWeight, ...]
    cores: tuple[Core, ...]
    core_flops: tuple[CoreFlops, ...]  # FLOPs of these as they run
    core_gradient: bool  # a gradient flows back through the cores
    backward: bool  # something here or below is trainable, so the backward reaches this unit
    layer: int | None = None
    """The number of the layer, from 0; None: it is no layer."""


@dataclass(frozen=True)
class ModelCounts:
    """A model as its units, from the embedding to the head."""

    units: tuple[Unit, ...]

    @cached_property
    def with_all_input_gradients(self) -> "ModelCounts":
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
        return self.parameters - round(sum(unit.idle_parameters for unit in self.units))

    @property
    def trainable_parameters(self) -> int:
        """Parameters that an optimizer updates."""
        return sum(unit.trainable_parameters for unit in self.units)


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
    trained = {name for name, p in used if p.requires_grad}
    below_or_norm = below or any(name.startswith(f"{names[0]}.") for name in trained)
    walk = _Walk(model, layer, below) if layer else None
    if kind == "embed":  # a lookup multiplies nothing
        used = []
    experts = {f"{layer.name}.{name}" for name in layer.experts} if layer else set()
    stacks = [name for name, _ in used if _site(model, name) in experts]
    active = _active_share([p for name, p in used if name in stacks], model.config)
    weights = tuple(
        ProductWeight(
            name=name,
            numel=p.numel(),
            trainable=p.requires_grad,
            # A's output is B's input: with A trained, B's input gradient is needed.
            input_gradient=(walk.needs_input(name) if walk else below_or_norm)
            or (".lora_B." in name and name.replace(".lora_B.", ".lora_A.") in trained),
            active=active * num_sharing(_adapter_of(model, name)) if name in stacks else 1.0,
            rerun=walk is None or walk.is_rerun(name),
            on_stack=".lora_" in name and name in stacks,
            by_elements=isinstance(model.get_submodule(name.rpartition(".")[0]), nn.Conv1d),
        )
        for name, p in used
        if p.ndim >= 2 and not name.endswith(("bias", *RATES))
    )
    biases = {f"{path}_bias" for path in experts}
    idle = sum((1 - active) * p.numel() for name, p in used if _site(model, name) in biases)
    idle += sum(max(0.0, 1 - weight.active) * weight.numel for weight in weights)
    mixers = layer.mixers if layer else ()
    return Unit(
        name=names[0] if kind == "embed" else names[-1],
        kind=kind,
        parameters=sum(p.numel() for p in new),
        trainable_parameters=sum(p.numel() for p in new if p.requires_grad),
        idle_parameters=idle,
        weights=weights,
        cores=tuple(c for block in mixers for c in block.kind.cores(model.config)),
        core_flops=tuple(walk.tape.core_flops) if walk else (),
        core_gradient=walk is not None and walk.tape.mixes_backward,
        backward=below or bool(trained),
        layer=None if layer is None else layer.number,
    )


class _Walk:
    """Facts of the products with the weights of a layer, from its walk."""

    def __init__(self, model: PreTrainedModel, layer: LayerSpec, below: bool) -> None:
        self.tape = walk_of(model.get_submodule(layer.name), layer, model.config, below)
        self.prefix = f"{layer.name}."
        # A product keeps its operands before it runs: the one after which nothing is kept does not
        # run again. Of a linear and its adapter that is B's.
        last = self.tape.last_saving
        ends = {name for name, use in self.tape.uses.items() if 0 < last <= use.number}
        self.last = {name for name in ends if ".lora_B." in name} or ends

    def needs_input(self, name: str) -> bool:
        """Return whether the backward gives the gradient of what a weight multiplies."""
        use = self.tape.uses.get(name.removeprefix(self.prefix))
        assert use, f"{name}: say in models/kinds what the layer does with it"
        return use.needs_input

    def is_rerun(self, name: str) -> bool:
        """Return whether full checkpointing runs the product with a weight again."""
        return name.removeprefix(self.prefix) not in self.last


def _adapter_of(model: nn.Module, name: str) -> nn.Module | None:
    """Return PEFT's module that has this parameter as a LoRA factor."""
    module, _, factor = name.partition(".lora_")
    return model.get_submodule(module) if factor else None


def _site(model: nn.Module, name: str) -> str:
    """Return where in the transformers model a parameter acts; a LoRA factor acts on its base."""
    wrapper = _adapter_of(model, name)
    if is_wrapper(wrapper):
        name = f"{name.partition('.lora_')[0]}.{wrapper.parameter_name}"
    return _WRAPPING.sub("", name)


def _active_share(stacks: list[nn.Parameter], config: PretrainedConfig) -> float:
    """Return the share of the routed experts that a token is sent to."""
    stacks = [p for p in stacks if p.ndim == 3]
    return config.num_experts_per_tok / stacks[0].shape[0] if stacks else 1.0
