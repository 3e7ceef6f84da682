"""What may differ from one model family to the next, with the common shape as defaults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from transformers import PretrainedConfig

from shardwise.config import UserError
from shardwise.models.tensor_splits.attention import attention
from shardwise.models.tensor_splits.base import SplitBlock
from shardwise.models.tensor_splits.feed_forward import feed_forward

SOFTMAX = {"full_attention": "full_attention", "sliding_attention": "sliding_attention"}
"""`Family.mixers` of families with attention only."""
HYBRID = {"linear_attention": "gated_delta_net", "full_attention": "full_attention"}
"""Those of hybrids with Gated DeltaNet."""
ATTENTION = ("full_attention", "sliding_attention", "attention_and_mamba2")
"""Layer kinds with softmax attention: what `lora.targets: attention` means."""
HYBRID_MIXERS = {
    "full_attention": ("self_attn",),
    "sliding_attention": ("self_attn",),
    "gated_delta_net": ("linear_attn",),
}
"""`Family.token_mixers` of families that call them so."""


SPLITS: dict[str, SplitBlock | None] = {"self_attn": attention, "mlp": feed_forward}
"""`Family.splits` of the common shape."""


@dataclass(frozen=True)
class Cut:
    """What a pipeline stage must know of the base model around the layers (see models/stage.py)."""

    factor: str | None = None
    """Attribute of the base model that multiplies the embeddings it is given, and not only its own."""
    dropout: str | None = None
    """The dropout between embedding and first layer."""
    layer_attribute: str | None = None
    """What the base model asks a layer for before it calls it."""
    layers_return_tuples: bool = False


@dataclass(frozen=True)
class Family:
    """The facts about a family of models (one `model_type`) that the rest of the project goes by."""

    model_type: str
    embed: str = "model.embed_tokens"
    layers: str = "model.layers"
    norm: str = "model.norm"
    head: str = "lm_head"
    mixers: Mapping[str, str] = field(default_factory=lambda: SOFTMAX)
    """From the entries of `config.layer_types` to layer kinds."""
    feed_forward: tuple[str, ...] = ("mlp",)
    """Modules of a layer that come after its mixer, those of them that it has: an MLP or a mixture of experts."""
    positions: str | None = None
    """A learned embedding of positions that is added to that of tokens."""
    token_mixers: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """From layer kinds to the modules of a layer that carry something from one token to the next, where they are proven
    to keep documents apart (tests/models/patches/test_isolation.py); `data.packing: isolated` refuses the others."""
    cut: Cut = Cut()
    """Where it differs from a base model that only runs its layers on the embeddings it is given."""
    splits: Mapping[str, SplitBlock | None] = field(default_factory=lambda: SPLITS)
    """How tensor parallelism cuts the blocks of a layer, by path; None: not at all, every rank computes all of it."""
    router: str | None = None
    """Class of the routers that are trained with a load-balancing loss, called with hidden states."""

    logits_multiplied_by: str | None = None
    """Attribute of the config with a factor on what the head gives."""
    logits_divided_by: str | None = None
    """Attribute of the config with a divisor of it."""
    logits_capped_by: str | None = None
    """Attribute of the config with the cap c of c * tanh(logits / c); null in a config: no cap."""

    attention: str = "self_attn"
    """The module of an attention layer that holds its projections."""
    experts: tuple[str, ...] = ()
    """Parameters of a layer that stack the weights of all routed experts, [E, out, in]."""
    gates: tuple[str, ...] = ()
    """Linears of a layer that give a score rather than a projection; `lora.targets: auto` leaves them frozen."""
    gating: tuple[str, ...] = ()
    """Linears of a layer whose output only routes tokens or sets how fast a state decays and is written; weight decay
    leaves them alone. (The gate of an MLP or of a mixer's output weighs features: it is a weight like any other.)"""
    bypassed: tuple[str, ...] = ()
    """Linears of a layer whose weight is read past the module, by a fused GPU kernel or by the layer itself, so that an
    adapter would do nothing."""
    renamed_by_peft: tuple[str, ...] = ()
    """Last parts of linears' names that PEFT takes for the names of routed experts (see `lora.save_adapter`)."""

    def kinds(self, config: PretrainedConfig) -> list[str]:
        """The kind of every layer, in order (see LayerSpec); the same attention in all where the config lists none.

        UserError for an entry that is none of `mixers`.
        """
        attention = "sliding_attention" if getattr(config, "sliding_window", None) else "full_attention"
        types = getattr(config, "layer_types", None) or [attention] * config.num_hidden_layers
        for layer_type in types:
            if layer_type not in self.mixers:
                raise UserError(
                    f"layer_types in config.json has {layer_type!r}, which {self.model_type} does not know here; "
                    f"it may have {', '.join(self.mixers)}"
                )
        return [self.mixers[layer_type] for layer_type in types]
