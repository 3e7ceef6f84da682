"""MLPs and mixtures of experts: the feed-forward width is cut, in every expert alike."""

from __future__ import annotations

from typing import Any

from shardwise.models.tensor_splits.base import BlockSplit, Cut, Rows, Segment, blocked, even, linear, unwrapped

UP = ("gate_proj", "up_proj", "w1", "w3", "c_fc")
"""Names of linears from the model's width to the feed-forward width."""
DOWN = ("down_proj", "w2", "c_proj")
"""And back."""


def mlp(block: Any, num_ranks: int) -> BlockSplit:
    """One or two linears up, gate and product if there are two, and one down."""
    return BlockSplit(_mlp(block, "", num_ranks))


def gate_up_mlp(block: Any, num_ranks: int) -> BlockSplit:
    """One linear up, whose first half is the gate of the second, and one down."""
    width = unwrapped(block.output_linear).in_features
    rows = blocked(num_ranks, (width, width), "feed-forward features")
    return BlockSplit(
        linear(block, "input_linear", "out", rows)
        | linear(block, "output_linear", "in", even(num_ranks, width, "feed-forward features"))
    )


def _mlp(block: Any, path: str, num_ranks: int) -> dict[str, Cut]:
    weights: dict[str, Cut] = {}
    for names, features in ((UP, "out"), (DOWN, "in")):
        for name in names:
            module = getattr(block.get_submodule(path), name, None)
            if module is not None:
                width = (
                    getattr(unwrapped(module), f"{features}_features", None)
                    or unwrapped(module).weight.shape[
                        1 if features == "out" else 0  # Conv1D keeps [in, out]
                    ]
                )
                rows = even(num_ranks, width, "feed-forward features")
                weights |= linear(block, f"{path}.{name}".lstrip("."), features, rows)
    return weights


def mixture(block: Any, num_ranks: int) -> BlockSplit:
    """Routed experts, stacked [E, out, in], and one that is shared by all tokens; the router is held whole.

    Rows of gate and up lie one after the other in one stack.
    """
    experts = unwrapped(block.experts)
    weights: dict[str, Cut] = {}
    width = experts.down_proj.shape[2]
    if hasattr(experts, "gate_up_proj"):
        weights["experts.gate_up_proj"] = Cut(1, blocked(num_ranks, (width, width), "features of an expert"))
    else:
        weights["experts.up_proj"] = Cut(1, even(num_ranks, width, "features of an expert"))
    weights["experts.down_proj"] = Cut(2, even(num_ranks, width, "features of an expert"))
    latent = getattr(block, "fc2_latent_proj", None)  # Nemotron-H, where experts have a narrower width of their own
    if getattr(latent, "bias", None) is not None:
        # Held whole, but called a share, so that its bias is added once and not on each rank.
        weights |= linear(block, "fc2_latent_proj", "in", Rows(num_ranks, (Segment(unwrapped(latent).in_features, 1),)))
    for name in ("shared_expert", "shared_experts"):
        if hasattr(block, name):
            weights |= _mlp(block, name, num_ranks)
    return BlockSplit(weights)


def feed_forward(block: Any, num_ranks: int) -> BlockSplit:
    """A mixture in some layers and an MLP in others."""
    return mixture(block, num_ranks) if hasattr(block, "experts") else mlp(block, num_ranks)
