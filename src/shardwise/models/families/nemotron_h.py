"""Nemotron-H: one mixer per block, which is Mamba2, full attention, an MLP or a mixture of experts."""

from typing import Any

from shardwise.models.families.base import Cut, Family
from shardwise.models.tensor_splits.attention import attention
from shardwise.models.tensor_splits.base import BlockSplit
from shardwise.models.tensor_splits.feed_forward import feed_forward
from shardwise.models.tensor_splits.mamba2 import mamba2


def _mixer(block: Any, num_ranks: int) -> BlockSplit:
    split = mamba2 if hasattr(block, "A_log") else attention if hasattr(block, "q_proj") else feed_forward
    return split(block, num_ranks)


NEMOTRON_H = Family(
    "nemotron_h",
    embed="model.embeddings",
    norm="model.norm_f",
    mixers={"linear_attention": "mamba2", "full_attention": "full_attention", "mlp": "mlp", "moe": "moe"},
    feed_forward=(),  # a block of its own
    token_mixers={"mamba2": ("mixer",), "full_attention": ("mixer",)},
    # No router: its load is balanced by a bias on the scores (e_score_correction_bias), not by a loss.
    splits={"mixer": _mixer},
    attention="mixer",
    cut=Cut(layer_attribute="block_type"),
    experts=("mixer.experts.up_proj", "mixer.experts.down_proj"),
    gating=("mixer.gate",),
    # mamba_ssm's training kernel ends with the output projection and takes its weight as an argument.
    bypassed=("mixer.out_proj",),
)
