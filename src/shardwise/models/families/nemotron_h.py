"""Nemotron-H: one mixer per block, which is Mamba2, full attention, an MLP or a mixture of experts."""

from shardwise.models.families.base import Cut, Family

NEMOTRON_H = Family(
    "nemotron_h",
    embed="model.embeddings",
    norm="model.norm_f",
    mixers={"linear_attention": "mamba2", "full_attention": "full_attention", "mlp": "mlp", "moe": "moe"},
    feed_forward=(),  # a block of its own
    token_mixers={"mamba2": ("mixer",), "full_attention": ("mixer",)},
    # No router: its load is balanced by a bias on the scores (e_score_correction_bias), not by a loss.
    attention="mixer",
    cut=Cut(layer_attribute="block_type"),
    experts=("mixer.experts.up_proj", "mixer.experts.down_proj"),
    gating=("mixer.gate",),
    # mamba_ssm's training kernel ends with the output projection and takes its weight as an argument.
    bypassed=("mixer.out_proj",),
)
