"""Dense feed-forwards. Tensor parallelism shards the feed-forward width."""

from dataclasses import replace
from typing import Any

from shardwise.models.kinds.base import Kind
from shardwise.models.operations import TapedBlock
from shardwise.models.tape import Tensor
from shardwise.models.tensor_cuts import BlockSplit, blocked, evenly, linear, unwrapped

UP = ("gate_proj", "up_proj", "w1", "w3", "c_fc")
"""Names of linears from the model's width to the feed-forward width."""
DOWN = ("down_proj", "w2", "c_proj")
"""Names of linears from the feed-forward width to the model's."""
JOINED_NAMES = (("input_linear", "output_linear"), ("gate_up_proj", "down_proj"))
"""Names of a linear that gives gate and product, and of the one behind: Granite's, Phi's."""
FEATURES = "feed-forward features"


def split(block: Any, num_ranks: int) -> BlockSplit:
    """Shard one or two linears up, gate and product if there are two, and one down."""
    return BlockSplit(evenly(block, num_ranks, FEATURES, out=UP, into=DOWN))


def split_joined(block: Any, num_ranks: int) -> BlockSplit:
    """Shard one linear up, whose first half is the gate of the second, and one down."""
    up, down = next(names for names in JOINED_NAMES if hasattr(block, names[0]))
    width = unwrapped(getattr(block, down)).in_features
    rows = blocked(num_ranks, (width, width), FEATURES)
    return BlockSplit(
        linear(block, up, "out", rows) | evenly(block, num_ranks, FEATURES, into=[down])
    )


def activations(block: TapedBlock, x: Tensor) -> Tensor:
    """Keep the input, gate and product before the activation, and what goes into the last linear.

    An MLP without a gate keeps what goes into its activation and what comes out.
    """
    names = [name for name in UP if f"{name}.weight" in block.parameters]
    down = next(name for name in DOWN if f"{name}.weight" in block.parameters)
    if len(names) == 2:
        gate, up = block.linears(names, x)
        gate = block.multiplied(gate, "mlp_multipliers")
        hidden = block.gated(gate, up)
        del gate, up
        return block.multiplied(block.linear(down, hidden), "mlp_multipliers")
    out = block.linear(down, block.activation(block.linear(names[0], x)))
    return block.dropped(out, "resid_pdrop")


def activations_of_joined(block: TapedBlock, x: Tensor) -> Tensor:
    """Keep the input, what the first linear gives, and what goes into the last one."""
    up, down = next(n for n in JOINED_NAMES if f"{n[0]}.weight" in block.parameters)
    parts = block.split(block.linear(up, x), (1, 1))
    return block.dropped(block.linear(down, block.gated(*parts)), "resid_pdrop")


MLP = Kind(
    "mlp",
    split=split,
    mixes_tokens=False,
    activations=activations,
    shares_input=("gate_proj", "up_proj", "w1", "w3"),
)
JOINED = replace(MLP, split=split_joined, activations=activations_of_joined, shares_input=())
"""With one linear for gate and product."""
