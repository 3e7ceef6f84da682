"""Dense feed-forwards. Tensor parallelism shards the feed-forward width."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shardwise.models.kinds.base import Kind
from shardwise.models.tensor_cuts import BlockSplit, Cut, blocked, even, linear, unwrapped

UP = ("gate_proj", "up_proj", "w1", "w3", "c_fc")
"""Names of linears from the model's width to the feed-forward width."""
DOWN = ("down_proj", "w2", "c_proj")
"""Names of linears from the feed-forward width to the model's."""


def split(block: Any, num_ranks: int) -> BlockSplit:
    """Shard one or two linears up, gate and product if there are two, and one down."""
    return BlockSplit(cuts(block, "", num_ranks))


def split_joined(block: Any, num_ranks: int) -> BlockSplit:
    """Shard one linear up, whose first half is the gate of the second, and one down."""
    width = unwrapped(block.output_linear).in_features
    rows = blocked(num_ranks, (width, width), "feed-forward features")
    return BlockSplit(
        linear(block, "input_linear", "out", rows)
        | linear(block, "output_linear", "in", even(num_ranks, width, "feed-forward features"))
    )


def cuts(block: Any, path: str, num_ranks: int) -> dict[str, Cut]:
    """Return how the weights of an MLP are cut that lies at a path in a block."""
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


MLP = Kind(
    "mlp",
    before=(UP, DOWN),
    split=split,
    mixes_tokens=False,
    keeps_more=False,
    shares_input=("gate_proj", "up_proj", "w1", "w3"),
    ends=DOWN,
)
JOINED = replace(
    MLP,
    before=(("input_linear",), ("output_linear",)),
    split=split_joined,
    shares_input=(),
    ends=("output_linear",),
)
"""Granite's, with one linear for gate and product."""
