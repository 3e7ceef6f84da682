"""Parameters and products of a model, unit by unit: arithmetic on shapes and `requires_grad`; nothing is run.

A multiply-add is 2 FLOPs. Only products count: linears, routers, experts, convolutions, LoRA factors (a Weight each)
and the sequence-mixing cores. Norms, activations, softmax, rotary embeddings, gates and biases count 0, as they do in
the figures of other projects; an embedding is looked up, not multiplied, and counts 0 too.

A core gives two numbers. Its *model* FLOPs are what the layer's definition asks for, whatever computes it; its
*executed* FLOPs are what transformers' torch code runs (fused attention; chunked Gated DeltaNet and Mamba2, padded to
full chunks).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Protocol

from peft.tuners.lora.layer import ParamWrapper
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from shardwise.models.spec import ModelSpec


class Core(Protocol):
    """What mixes the tokens of a sequence in one layer, by the sequence length T. Units: FLOPs per token."""

    def model_forward(self, sequence_length: int) -> float:
        """What the definition asks of a forward; a backward is twice that."""
        ...

    def executed_forward(self, sequence_length: int) -> float:
        """What a forward runs."""
        ...

    def executed_backward(self, sequence_length: int) -> float:
        """What a backward runs, the forward's recomputation by a checkpoint left out."""
        ...


@dataclass(frozen=True)
class Attention:
    """Causal softmax attention of N query heads of size H.

    Token t meets t keys, (T + 1) / 2 on average; a query-key pair costs 2 H for its score and 2 H for its value, so a
    forward is 2 N H (T + 1) per token: half of what counters that ignore causality give. Grouped key/value heads save
    memory, not products. Fused (flash) kernels skip the masked half, and in the backward they compute the scores
    again: five products (scores, dP, dV, dQ, dK) for the forward's two.
    """

    num_heads: int
    head_dim: int

    def model_forward(self, sequence_length: int) -> float:
        """See Core."""
        return 2.0 * self.num_heads * self.head_dim * (sequence_length + 1)

    def executed_forward(self, sequence_length: int) -> float:
        """See Core."""
        return self.model_forward(sequence_length)

    def executed_backward(self, sequence_length: int) -> float:
        """See Core."""
        return 2.5 * self.model_forward(sequence_length)


@dataclass(frozen=True)
class GatedDeltaNet:
    """The gated delta rule (arXiv 2412.06464) of N value heads, with a state S of K x V (key and value size) per head.

    Model FLOPs, the recurrence on one token: decay S (K V), predict the value S^T k (2 K V), add k times its error
    (2 K V), read S^T q (2 K V): 7 N K V. (Megatron-LM counts 8 N V^2.)

    Executed, per head and chunk of C tokens: products k k^T and q k^T (2 C^2 K each), weights times new values (2 C^2
    V), the state read by keys and by queries and then updated (2 C K V each); and two unit-triangular solves of a C x
    C system with K and with V columns, C (C - 1) per column, which torch's FLOP counter counts as 0. The backward has
    two products for each of those, less what has no gradient: the first chunk reads a constant state (2 C K V saved
    twice) and the last one's updated state is dropped (4 C K V). A solve's backward is the transposed solve and one
    full product, 2 C^2 per column. Kernels of other packages chunk in their own way; their count differs.
    """

    num_heads: int
    key_dim: int
    value_dim: int
    chunk_size: int = 64

    def model_forward(self, sequence_length: int) -> float:
        """See Core."""
        return 7.0 * self.num_heads * self.key_dim * self.value_dim

    def executed_forward(self, sequence_length: int) -> float:
        """See Core."""
        return self._per_token(sequence_length, self._products() + self._solves())

    def executed_backward(self, sequence_length: int) -> float:
        """See Core."""
        columns = self.key_dim + self.value_dim
        per_chunk = 2 * self._products() + self._solves() + 2 * self.chunk_size**2 * columns
        return self._per_token(sequence_length, per_chunk, -8 * self.chunk_size * self.key_dim * self.value_dim)

    def _products(self) -> int:
        c, k, v = self.chunk_size, self.key_dim, self.value_dim
        return 2 * c * c * (2 * k + v) + 6 * c * k * v

    def _solves(self) -> int:
        return self.chunk_size * (self.chunk_size - 1) * (self.key_dim + self.value_dim)

    def _per_token(self, sequence_length: int, per_chunk: int, per_sequence: int = 0) -> float:
        chunks = -(-sequence_length // self.chunk_size)
        return self.num_heads * (chunks * per_chunk + per_sequence) / sequence_length


@dataclass(frozen=True)
class Mamba2:
    """The state-space scan of Mamba2 (arXiv 2405.21060): N heads of size P, with a state of P x S per head.

    Model FLOPs, the recurrence on one token: decay the state (P S), add x B^T (2 P S), read with C (2 P S): 5 N P S.
    (Megatron-LM counts 7, the discretisation included.)

    Executed, per head and chunk of Q tokens: scores C B^T (2 Q^2 S), scores times x (2 Q^2 P), the chunk's state and
    the read of the state before it (2 Q P S each); then, over the n chunks of a sequence, all states passed on at
    once by one (n + 1) x (n + 1) product, 2 (n + 1)^2 P S. Twice that in the backward.
    """

    num_heads: int
    head_dim: int
    state_size: int
    chunk_size: int

    def model_forward(self, sequence_length: int) -> float:
        """See Core."""
        return 5.0 * self.num_heads * self.head_dim * self.state_size

    def executed_forward(self, sequence_length: int) -> float:
        """See Core."""
        q, p, s = self.chunk_size, self.head_dim, self.state_size
        chunks = -(-sequence_length // q)
        per_chunk = 2 * q * q * (p + s) + 4 * q * p * s
        return self.num_heads * (chunks * per_chunk + 2 * (chunks + 1) ** 2 * p * s) / sequence_length

    def executed_backward(self, sequence_length: int) -> float:
        """See Core."""
        return 2.0 * self.executed_forward(sequence_length)


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


# From a layer's kind to its core. The attribute names are those of the transformers configs of all proven families.
_CORES = {
    "full_attention": lambda c: Attention(
        c.num_attention_heads, getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    ),
    "gated_delta_net": lambda c: GatedDeltaNet(
        c.linear_num_value_heads, c.linear_key_head_dim, c.linear_value_head_dim
    ),
    "mamba2": lambda c: Mamba2(c.mamba_num_heads, c.mamba_head_dim, c.ssm_state_size, c.chunk_size),
    "mlp": lambda c: None,
    "moe": lambda c: None,
}

_CORE_STAGE = 3
# Where in its unit's dataflow a module acts, by the end of its name. A product needs the gradient of its input if
# something in an earlier unit or at an earlier stage is trainable. Branches that run side by side share a stage; one
# that joins late (such as the output gate) is taken to act where it starts.
_STAGES = {
    0: "embed_tokens embeddings input_layernorm norm norm_f",
    1: "q_proj k_proj v_proj in_proj in_proj_qkvz in_proj_ba in_proj_qkv in_proj_z in_proj_b in_proj_a "
    "a_proj b_proj g_proj lm_head",
    2: "conv1d q_norm k_norm A_log dt_bias D",
    4: "linear_attn.norm mixer.norm o_norm",
    5: "o_proj out_proj",
    6: "post_attention_layernorm",
    7: "gate gate_proj up_proj gate_up_proj shared_expert_gate fc1_latent_proj",
    8: "down_proj experts.up_proj",
    9: "experts.down_proj",
    10: "fc2_latent_proj post_feedforward_layernorm",
}
_STAGE_OF = {name: stage for stage, names in _STAGES.items() for name in names.split()}
_WRAPPING = re.compile(r"\.(base_layer|lora_(embedding_)?[AB]\.\w+|modules_to_save\.\w+|weight|bias)(?=\.|$)")


def count_model(model: PreTrainedModel, spec: ModelSpec) -> ModelCounts:
    """Count a causal language model, on any device (`meta` too), with PEFT's LoRA layers or without.

    `requires_grad` must be as in training. Sharded parameters (DTensor) count with their global shape.
    """
    sites = [
        (tuple(filter(None, (spec.embed, spec.positions))), "embed"),
        *(((layer.name,), layer.kind) for layer in spec.layers),
    ]
    counted: set[int] = set()
    units: list[Unit] = []
    for names, kind in [*sites, ((spec.norm, spec.head), "head")]:
        below = bool(units) and units[-1].backward
        units.append(_count_unit(model, names, kind, counted, below))
    return ModelCounts(tuple(units))


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
        if p.ndim >= 2
    )
    return Unit(
        name=names[0] if kind == "embed" else names[-1],
        kind=kind,
        parameters=sum(p.numel() for p in new),
        trainable_parameters=sum(p.numel() for p in new if p.requires_grad),
        weights=weights,
        core=None if kind in ("embed", "head") else _CORES[kind](model.config),
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
    last = r"\.(mlp\.down_proj|mixer\.(down_proj|out_proj|o_proj|shared_experts\.down_proj))\."
    candidates = [name for name in names if re.search(last, name) and name.endswith(".weight")]
    if not candidates or any("post_feedforward_layernorm" in name for name in names):
        return None
    return next((name for name in candidates if ".lora_B." in name), candidates[0])
