"""Attention heads meet the key/value heads that were theirs."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaAttention

from shardwise.models.kinds import attention
from shardwise.models.tensor_cuts import Indivisible

HEAD_DIM = 2


def block(num_heads: int, num_kv_heads: int) -> LlamaAttention:
    config = LlamaConfig(
        hidden_size=HEAD_DIM * num_heads,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
    )
    with torch.device("meta"):
        return LlamaAttention(config, 0)


@settings(deadline=None)
@given(num_kv_heads=st.integers(1, 8), groups=st.integers(1, 6), num_ranks=st.integers(1, 12))
def test_a_query_head_finds_its_own_key_head(num_kv_heads, groups, num_ranks):
    num_heads = groups * num_kv_heads
    try:
        split = attention.split(block(num_heads, num_kv_heads), num_ranks)
    except Indivisible:
        shares = min(num_ranks, num_kv_heads)
        assert num_heads % num_ranks or num_kv_heads % shares or num_ranks % shares
        return
    # Which head each row of a weight belongs to.
    queries, keys = (torch.arange(n).repeat_interleave(HEAD_DIM) for n in (num_heads, num_kv_heads))
    for rank in range(num_ranks):
        own = {
            name: split.weights[f"{name}.weight"].rows.take(heads, 0, rank)[::HEAD_DIM].tolist()
            for name, heads in (
                ("q_proj", queries),
                ("k_proj", keys),
                ("v_proj", keys),
                ("o_proj", queries),
            )
        }
        assert (
            own["q_proj"]
            == own["o_proj"]
            == list(range(num_heads))[rank * num_heads // num_ranks :][: num_heads // num_ranks]
        )
        # transformers repeats each key head for as many query heads, one after the other.
        repeated = [
            head for head in own["k_proj"] for _ in range(split.attributes["num_key_value_groups"])
        ]
        assert repeated == [head // groups for head in own["q_proj"]]
        assert own["v_proj"] == own["k_proj"]


def test_heads_that_cannot_be_sharded_are_named():
    with pytest.raises(Indivisible, match=r"^6 attention heads$"):
        attention.split(block(6, 2), 4)
    with pytest.raises(Indivisible, match=r"^6 key/value heads$"):
        attention.split(block(12, 6), 4)
