"""The shape of a model's attention, by which bytes under context parallelism are counted."""

from __future__ import annotations

from transformers import PretrainedConfig

from shardwise.models.kinds.attention import Attention, SlidingAttention
from shardwise.models.spec import ModelSpec
from shardwise.schedule.context import AttentionShape


def attention_shape(
    spec: ModelSpec, config: PretrainedConfig, num_tokens: int, itemsize: int, tp: int = 1
) -> AttentionShape | None:
    """Return the shape of the first attention of a model; None if it has none.

    `num_tokens`: tokens of a rank's micro-batch; `itemsize`: bytes of an element of keys. Of the
    heads of a layer each rank along tp has 1/tp, at least one of keys and values.
    """
    for layer in spec.layers:
        for block in layer.mixers:
            for core in block.kind.cores(config) if block.kind.is_attention else ():
                if isinstance(core, Attention):
                    sizes = core.key_dim, core.value_dim
                else:
                    assert isinstance(core, SlidingAttention)
                    sizes = core.head_dim, core.head_dim
                num_kv_heads = getattr(config, "num_key_value_heads", None) or core.num_heads
                heads = core.num_heads // tp, max(1, num_kv_heads // tp)
                return AttentionShape(num_tokens, *heads, *sizes, itemsize)
    return None
