"""What the rest of the project knows of a model: which modules it is made of, in order, and of what kind each is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LayerSpec:
    """One decoder layer (or, where a family's blocks hold one mixer each, one block)."""

    name: str  # module path in the transformers model, such as "model.layers.3"
    kind: str  # full_attention | gated_delta_net | mamba2 | mlp | moe: what costs, cuts and kernels depend on


@dataclass(frozen=True)
class ModelSpec:
    """A causal language model as an ordered list of modules, by path in the transformers model."""

    family: str  # config.model_type
    embed: str
    layers: tuple[LayerSpec, ...]
    norm: str
    head: str
    tied: bool  # the head's weight is the embedding's
    hidden_size: int
    vocab_size: int
