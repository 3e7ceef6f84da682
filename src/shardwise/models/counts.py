"""Parameters and products of a model, unit by unit: arithmetic on shapes and `requires_grad`; nothing is run.

A multiply-add is 2 FLOPs. Only products count: linears, routers, experts, convolutions, LoRA factors (a Weight each)
and the sequence-mixing cores. Norms, activations, softmax, rotary embeddings, gates and biases count 0, as they do in
the figures of other projects; an embedding is looked up, not multiplied, and counts 0 too.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from peft.tuners.lora.layer import ParamWrapper
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from shardwise.models.cores import Core, core_of
from shardwise.models.spec import ModelSpec


@dataclass(frozen=True)
class Weight:
    """A weight that multiplies activations, 2 FLOPs per element, token and product it takes part in."""

    name: str
    numel: int
    trainable: bool
    input_gradient: bool  # the backward needs the gradient of what this weight multiplies
    active: float = 1.0  # share of the weight that one token meets: top_k / E in a stack of experts
    rerun: bool = True  # full activation checkpointing runs the product again; see `_ends_layer`
    fold_rank: int = 0  # rank of an adapter that PEFT multiplies out and adds to this weight in each forward
    folded: bool = False  # this is a factor of such an adapter


@dataclass(frozen=True)
class Unit:
    """The embedding, one layer, or the final norm with the head."""

    name: str
    kind: str  # embed, a layer kind of LayerSpec, or head
    parameters: int  # a tied head's weight belongs to the embedding
    trainable_parameters: int
    weights: tuple[Weight, ...]
    core: Core | None
    core_gradient: bool  # a gradient flows back through the core
    backward: bool  # something here or below is trainable, so the backward reaches this unit


@dataclass(frozen=True)
class ModelCounts:
    """A model as its units, from the embedding to the head."""

    units: tuple[Unit, ...]

    @property
    def parameters(self) -> int:
        """All parameters, adapters and saved copies included."""
        return sum(unit.parameters for unit in self.units)

    @property
    def trainable_parameters(self) -> int:
        """Parameters that an optimizer updates."""
        return sum(unit.trainable_parameters for unit in self.units)


_CORE_STAGE = 6
# Where in its unit's dataflow a module acts, by the end of its name. A product needs the gradient of its input if
# something in an earlier unit or at an earlier stage is trainable. Branches that run side by side share a stage; one
# that joins late (such as the output gate) is taken to act where it starts.
_STAGES = {
    0: "embed_tokens embeddings wte wpe input_layernorm operator_norm ln_1 norm norm_f embedding_norm final_layernorm "
    "ln_f",
    1: "q_proj k_proj v_proj in_proj in_proj_qkvz in_proj_ba in_proj_qkv in_proj_z in_proj_b in_proj_a "
    "a_proj b_proj g_proj q_a_proj kv_a_proj_with_mqa f_a_proj g_a_proj c_attn kernel_generator.w1 lm_head",
    2: "conv1d conv.conv q_norm k_norm q_layernorm k_layernorm q_a_layernorm kv_a_layernorm A_log dt_bias D "
    "kernel_generator.w2",
    3: "q_b_proj kv_b_proj f_b_proj g_b_proj x_proj",
    4: "dt_layernorm b_layernorm c_layernorm",
    5: "dt_proj",
    7: "linear_attn.norm mixer.norm mamba.norm o_norm",
    8: "o_proj out_proj attn.c_proj",
    9: "post_attention_layernorm pre_ff_layernorm ffn_norm ln_2",
    10: "gate router gate_proj up_proj gate_up_proj input_linear shared_expert_gate fc1_latent_proj w1 w3 c_fc",
    11: "down_proj output_linear experts.up_proj w2 mlp.c_proj",
    12: "experts.down_proj",
    13: "fc2_latent_proj post_feedforward_layernorm",
}
_STAGE_OF = {name: stage for stage, names in _STAGES.items() for name in names.split()}
_WRAPPING = re.compile(r"\.(base_layer|lora_(embedding_)?[AB]\.\w+|modules_to_save\.\w+|weight|bias)(?=\.|$)")


def count_model(model: PreTrainedModel, spec: ModelSpec) -> ModelCounts:
    """Count a causal language model, on any device (`meta` too), with PEFT's LoRA layers or without.

    `requires_grad` must be as in training. Sharded parameters (DTensor) count with their global shape.
    """
    kinds = ("embed", *(layer.kind for layer in spec.layers), "head")
    counted: set[int] = set()
    units: list[Unit] = []
    for names, kind in zip(unit_modules(spec), kinds, strict=True):
        below = bool(units) and units[-1].backward
        units.append(_count_unit(model, names, kind, counted, below))
    return ModelCounts(tuple(units))


def unit_modules(spec: ModelSpec) -> tuple[tuple[str, ...], ...]:
    """The modules of each unit, from the embedding to the head, by path in the transformers model."""
    embed = (spec.embed,) if spec.positions is None else (spec.embed, spec.positions)
    return (embed, *((layer.name,) for layer in spec.layers), (spec.norm, spec.head))


def _count_unit(model: PreTrainedModel, names: tuple[str, ...], kind: str, counted: set[int], below: bool) -> Unit:
    owned = [(f"{name}.{n}", p) for name in names for n, p in model.get_submodule(name).named_parameters()]
    new = [p for _, p in owned if id(p) not in counted]
    counted.update(id(p) for p in new)
    # PEFT keeps the module that a `modules_to_save` copy stands for, but runs the copy only.
    used = [(name, p) for name, p in owned if ".original_module." not in name]
    stages = {name: _stage(model, name) for name, _ in used}
    lowest = min((stages[name] for name, p in used if p.requires_grad), default=float("inf"))
    if kind == "embed":
        used = [(name, p) for name, p in used if ".lora_embedding_B." in name]
    active = _active_share(used, model.config)
    ranks = {_site(model, name): _fold_rank(model, name) for name, _ in used if ".lora_A." in name}
    ends_layer = None if kind in ("embed", "head") else _ends_layer([name for name, _ in used], ranks)
    weights = tuple(
        Weight(
            name=name,
            numel=p.numel(),
            trainable=p.requires_grad,
            input_gradient=below or lowest < stages[name],
            active=active if ".experts." in name else 1.0,
            rerun=name != ends_layer,
            fold_rank=0 if ".lora_" in name else ranks.get(_site(model, name), 0),
            folded=".lora_" in name and _fold_rank(model, name) > 0,
        )
        for name, p in used
        if p.ndim >= 2 and not name.endswith("A_log")  # a matrix in some families, but never a factor of a product
    )
    return Unit(
        name=names[0] if kind == "embed" else names[-1],
        kind=kind,
        parameters=sum(p.numel() for p in new),
        trainable_parameters=sum(p.numel() for p in new if p.requires_grad),
        weights=weights,
        core=None if kind in ("embed", "head") else core_of(kind, model.config),
        core_gradient=below or lowest < _CORE_STAGE,
        backward=below or lowest < float("inf"),
    )


def _site(model: nn.Module, name: str) -> str:
    """The place in the transformers model where a parameter acts; for a LoRA factor, the place of what it adapts."""
    module, lora, _ = name.partition(".lora_")
    wrapper = model.get_submodule(module) if lora else None
    if isinstance(wrapper, ParamWrapper):
        name = f"{module}.{wrapper.parameter_name}"
    return _WRAPPING.sub("", name)


def _stage(model: nn.Module, name: str) -> float:
    site = _site(model, name)
    end = ".".join(site.split(".")[-2:])
    key = end if end in _STAGE_OF else end.rpartition(".")[2]
    assert key in _STAGE_OF, f"{name}: say in counts._STAGES where {site} acts"
    # A's output is B's input: with A trainable, B's input gradient is needed.
    return _STAGE_OF[key] + (0.5 if re.search(r"\.lora_(embedding_)?B\.", name) else 0.0)


def _active_share(parameters: list[tuple[str, nn.Parameter]], config: PretrainedConfig) -> float:
    """The share of the routed experts that a token is sent to."""
    stacks = [p for name, p in parameters if ".experts." in name and p.ndim == 3]
    return config.num_experts_per_tok / stacks[0].shape[0] if stacks else 1.0


def _fold_rank(model: nn.Module, name: str) -> int:
    """The rank of the adapter that a LoRA factor belongs to if PEFT folds it into its parameter, else 0."""
    module, _, rest = name.partition(".lora_")
    wrapper = model.get_submodule(module)
    return wrapper.r[rest.split(".")[1]] if isinstance(wrapper, ParamWrapper) else 0


def _ends_layer(names: list[str], ranks: dict[str, int]) -> str | None:
    """The weight of a layer's last product, if nothing after it is saved for the backward; None otherwise.

    torch's checkpoint (not reentrant) runs a layer again until the last tensor that its backward needs has been
    saved. A product saves its operands before it runs, so the one that only the residual sum follows is not run
    again. A norm after it, or the weighted sum of routed experts, saves its input and has it run.
    """
    last = (
        r"\.((mlp|feed_forward|mlp\.shared_experts)\.down_proj|mlp\.c_proj|feed_forward\.w2|shared_mlp\.output_linear"
        r"|mixer\.(down_proj|out_proj|o_proj|shared_experts\.down_proj))\."
    )
    candidates = [name for name in names if re.search(last, name) and name.endswith(".weight")]
    if not candidates or any("post_feedforward_layernorm" in name for name in names):
        return None
    return next((name for name in candidates if ".lora_B." in name), candidates[0])
