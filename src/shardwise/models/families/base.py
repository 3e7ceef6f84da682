"""Facts that may differ between model families, with the common shape as defaults."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from transformers import PretrainedConfig

from shardwise.config import UserError
from shardwise.models.kinds import attention, feed_forward
from shardwise.models.kinds.base import Kind
from shardwise.models.spec import Block, Norms

Blocks = Mapping[str, Kind]
"""Kinds of blocks by their path in a layer."""


@dataclass(frozen=True)
class Mixer:
    """Mixer of the tokens of a layer: one block, or several side by side on the same input."""

    name: str
    """`LayerSpec.kind` of such a layer."""
    blocks: tuple[Block, ...]


def mixer(path: str, kind: Kind) -> Mixer:
    """Return a mixer of one block, by its path in the layer."""
    return Mixer(kind.name, (Block(path, kind),))


def feed_forwards(mixture: Kind, path: str = "mlp") -> Mapping[str, Blocks]:
    """Return what comes after the mixers: an MLP or a mixture of experts, both at one path."""
    return {"dense": {path: feed_forward.MLP}, "moe": {path: mixture}}


FULL = mixer("self_attn", attention.FULL)
SOFTMAX = {"full_attention": FULL, "sliding_attention": mixer("self_attn", attention.SLIDING)}
"""`Family.mixers` of the common shape."""


@dataclass(frozen=True)
class StageFacts:
    """Facts of the base model around its layers, for pipeline stages (see models/stage.py)."""

    factor: str | None = None
    """Attribute of the base model that multiplies embeddings, also those that it is given."""
    factor_key: str | None = None
    """Key of the config that lets the base model do so."""
    dropout: str | None = None
    """The dropout between embedding and first layer."""
    layer_attribute: str | None = None
    """Attribute that the base model asks a layer for before it calls it."""
    layer_outputs: int | None = None
    """The length of the tuple that a layer returns, hidden states first; None: it returns them
    alone."""


@dataclass(frozen=True)
class Family:
    """The facts about a family of models, one `model_type`."""

    model_type: str
    embed: str = "model.embed_tokens"
    layers: str = "model.layers"
    norm: str = "model.norm"
    head: str = "lm_head"
    mixers: Mapping[str, Mixer] = field(default_factory=lambda: SOFTMAX)
    """Mixer of a layer, by its entry in `config.layer_types`."""
    feed_forward: Mapping[str, Blocks] = field(
        default_factory=lambda: {"dense": {"mlp": feed_forward.MLP}}
    )
    """Blocks after the mixer of a layer, in layers without experts (dense) and with them (moe).
    A family whose layers hold one block each has none."""
    norms: Norms = field(default_factory=Norms)
    """Names of a layer's own norms."""
    positions: str | None = None
    """A learned embedding of positions that is added to that of tokens."""
    cut: StageFacts = StageFacts()
    """Steps of its base model beside running its layers on the embeddings it is given."""
    router: str | None = None
    """Class of the routers that are trained with a load-balancing loss."""
    seeded: tuple[str, ...] = ()
    """Keys of its config with the rate of a dropout that is a module, or that it never runs."""

    logits_multiplied_by: str | None = None
    """Attribute of the config with a factor on what the head gives."""
    logits_divided_by: str | None = None
    """Attribute of the config with a divisor of it."""
    logits_capped_by: str | None = None
    """Attribute of the config with the cap c of c * tanh(logits / c); null in a config: no cap."""

    text_parts: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Model types of language models in multimodal classes that compute as this one on text, and of
    which transformers has no causal class; with keys of this config that those classes fix."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Keys of its config without which the model that transformers makes by default lacks a kind of
    layer, where `layer_types` is not such a key."""

    @cached_property
    def blocks(self) -> tuple[Block, ...]:
        """All blocks that a layer may have; several kinds may lie at one path."""
        mixers = [block for mixer in self.mixers.values() for block in mixer.blocks]
        after = [Block(*item) for blocks in self.feed_forward.values() for item in blocks.items()]
        return tuple(dict.fromkeys([*mixers, *after]))

    @cached_property
    def paths(self) -> tuple[str, ...]:
        """Paths of the blocks in a layer."""
        return tuple(dict.fromkeys(block.path for block in self.blocks))

    @cached_property
    def feed_forward_paths(self) -> tuple[str, ...]:
        """Paths of the feed-forwards in a layer."""
        paths = (path for blocks in self.feed_forward.values() for path in blocks)
        return tuple(dict.fromkeys(paths))

    @cached_property
    def keeps_documents_apart(self) -> bool:
        """Whether `data.packing: isolated` is proven for all of its mixers."""
        kinds = [block.kind for mixer in self.mixers.values() for block in mixer.blocks]
        return all(kind.keeps_documents_apart or not kind.mixes_tokens for kind in kinds)

    def mixers_of(self, config: PretrainedConfig) -> list[Mixer]:
        """Return the mixer of every layer, in order.

        Where the config lists none, all have the same attention. Raises UserError for an entry that
        is none of `mixers`.
        """
        common = (
            "sliding_attention" if getattr(config, "sliding_window", None) else "full_attention"
        )
        types = getattr(config, "layer_types", None) or [common] * config.num_hidden_layers
        for layer_type in types:
            if layer_type not in self.mixers:
                raise UserError(
                    f"layer_types in config.json has {layer_type!r}, which {self.model_type} does "
                    f"not know here; it may have {', '.join(self.mixers)}"
                )
        return [self.mixers[layer_type] for layer_type in types]

    def named(self, key: Literal["experts", "gates", "gating", "bypassed"]) -> tuple[str, ...]:
        """Return the names in a layer that the kinds of its blocks have under this field."""
        names = ((block.path, name) for block in self.blocks for name in getattr(block.kind, key))
        return tuple(dict.fromkeys(".".join(filter(None, parts)) for parts in names))
