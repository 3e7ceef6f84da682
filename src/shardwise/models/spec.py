"""Facts of a model for the rest of the project: its modules in order, and the kind of each."""

from dataclasses import dataclass, field

from shardwise.models.kinds.base import Kind


@dataclass(frozen=True)
class Block:
    """A mixer or a feed-forward of a layer."""

    path: str  # path in the layer, such as "self_attn"
    kind: Kind


@dataclass(frozen=True)
class Norms:
    """Names of the norms that a layer has by itself; it need not have all of them."""

    before: str = "input_layernorm"
    behind: str | None = None
    """After the mixer. None: that is `between`, in layers that have `after`."""
    between: str = "post_attention_layernorm"
    """Before the feed-forward."""
    after: str = "post_feedforward_layernorm"


@dataclass(frozen=True)
class LayerSpec:
    """One decoder layer (or, where a family's blocks hold one mixer each, one block)."""

    name: str  # module path in the transformers model, such as "model.layers.3"
    kind: str
    """Kind of its mixer: the name of a kind of `models/kinds`, or one that the family gives to
    mixers side by side."""
    feed_forward: str  # feed-forward in the same layer: dense | moe | none
    mixers: tuple[Block, ...] = field(default=(), repr=False)
    """Mixers of the layer, which give it its kind: one block, or several side by side."""
    feed_forwards: tuple[Block, ...] = field(default=(), repr=False)
    """Blocks that follow: one, or several side by side."""
    norms: Norms = field(default=Norms(), repr=False)
    number: int = field(default=0, repr=False)
    """Its place among the layers of the whole model, from 0."""

    @property
    def blocks(self) -> tuple[Block, ...]:
        """All blocks, in the order in which data meets them."""
        return (*self.mixers, *self.feed_forwards)

    @property
    def keeps_documents_apart(self) -> bool:
        """Whether `data.packing: isolated` is proven to keep documents apart in it."""
        apart = [
            block.kind.keeps_documents_apart or not block.kind.mixes_tokens for block in self.mixers
        ]
        return bool(apart) and all(apart)

    @property
    def attention(self) -> tuple[Block, ...]:
        """Blocks of softmax attention."""
        return tuple(block for block in self.mixers if block.kind.is_attention)

    @property
    def experts(self) -> tuple[str, ...]:
        """Paths of its stacks of experts."""
        return tuple(f"{block.path}.{name}" for block in self.blocks for name in block.kind.experts)


@dataclass(frozen=True)
class ModelSpec:
    """A causal language model, or a pipeline stage of one, as its modules' paths in order."""

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
    """Holds the embedding, and that of positions. (A last stage has a tied one too, but only as its
    head's weight.)"""
    last: bool = True
    """Holds final norm, head and loss."""

    def __hash__(self) -> int:
        # What is cached by a model asks often, and some models have a hundred layers.
        return hash((self.family, len(self.layers), self.first, self.last))

    @property
    def has_ends(self) -> bool:
        """Whether the embedding, the final norm and the head are known."""
        return bool(self.embed)

    @property
    def is_own(self) -> bool:
        """Whether it is a module of the caller, of which only the layers are known."""
        return not self.has_ends
