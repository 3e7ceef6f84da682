"""What the rest of the project knows of a model: which modules it is made of, in order, and of what kind each is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LayerSpec:
    """One decoder layer (or, where a family's blocks hold one mixer each, one block)."""

    name: str  # module path in the transformers model, such as "model.layers.3"
    kind: str
    """What mixes tokens: full_attention | sliding_attention | gated_delta_net | mamba2 | mamba | kda |
    short_convolution | jet_block | attention_and_mamba2 (side by side); or mlp | moe, a block that mixes none."""
    feed_forward: str  # what follows in the same layer: dense | moe | none


@dataclass(frozen=True)
class ModelSpec:
    """A causal language model, or a pipeline stage of one, as an ordered list of modules by path in the whole model."""

    family: str  # config.model_type
    embed: str
    positions: str | None  # learned embedding of positions, used with `embed`
    layers: tuple[LayerSpec, ...]
    norm: str
    head: str
    tied: bool  # the head's weight is the embedding's
    hidden_size: int
    vocab_size: int
    first: bool = True
    """Holds the embedding, and that of positions. (A last stage has a tied one too, but only as its head's weight.)"""
    last: bool = True
    """Holds final norm, head and loss."""
