"""Kimi Delta Attention (Kimi Linear, arXiv 2510.26692): the delta rule, a decay for each channel.

Tensor parallelism shards the heads. Where a projection has two factors, all heads share the result
of the first one, which is whole on every rank.
"""

from typing import Any, ClassVar

from transformers import PretrainedConfig

from shardwise.kernels.kimi_delta_attention import RECURRENCE, backend
from shardwise.models.chunks import ChunkFlops
from shardwise.models.kinds import short_convolution
from shardwise.models.kinds.base import Backend, Carried, Kind, Shapes
from shardwise.models.kinds.delta_rule import (
    DeltaRule,
    Scratch,
    delta_rule,
    parts_of,
    rule_carries,
    rule_outputs,
)
from shardwise.models.kinds.short_convolution import UNCUT_CONVOLUTION, convolved
from shardwise.models.moves import WIDE
from shardwise.models.operations import TapedBlock
from shardwise.models.tape import Tensor
from shardwise.models.tensor_cuts import (
    BlockSplit,
    DimCut,
    blocked,
    depthwise,
    even,
    evenly,
    require_divides,
)


class KimiDeltaAttention(DeltaRule):
    """The delta rule with a decay per channel (arXiv 2510.26692).

    Run by `kernels/kimi_delta_attention/chunked.py`, per head and chunk: k k^T and q k^T by
    halves of blocks, of pairs of tokens that see each other alone (2 K a pair, C^2 pairs together;
    those of a token with itself are elementwise, so that torch's FLOP counter counts 0); a
    unit-triangular solve with K + V columns (C (C - 1) per column, which it counts as 0, too);
    weights times corrections (2 C^2 V); the state read by keys and by queries and then updated
    (2 C K V each). The backward computes pairs, solve and corrections again. It has two products
    for each that has two factors; a solve's are the transposed solve and one full product.
    """

    num_pairs: ClassVar[int] = 1
    """One product gives the pairs of keys and those of queries with keys."""
    num_pairs_of_map: ClassVar[int] = 1
    pads: ClassVar[bool] = True

    def chunk_flops(self) -> tuple[ChunkFlops, ChunkFlops, ChunkFlops]:
        """See DeltaRule. A solve has its columns for each pair, less those for each token."""
        k, v = self.key_dim, self.value_dim
        solve = k + v
        return (
            ChunkFlops(6 * k * v - solve, 2 * (k + v) + solve),
            ChunkFlops(14 * k * v - 2 * solve, 2 * (4 * k + 3 * v) + 2 * solve),
            ChunkFlops(4 * k * (k + v) - solve, 2 * k + solve),
        )


def cores(config: PretrainedConfig) -> tuple[KimiDeltaAttention]:
    """Return the core by the config."""
    size = config.linear_head_dim
    return (KimiDeltaAttention(config.linear_num_heads, size, size),)


def carries(config: PretrainedConfig, shapes: Shapes) -> Carried:
    """Return what the gated delta rule passes on: a decay by channels makes its map no larger."""
    num_heads = shapes["forget_gate.A_log"][2]
    return rule_carries(cores(config)[0], num_heads, shapes["conv1d.weight"][0])


def activations(block: TapedBlock, x: Tensor) -> Tensor:
    """Keep what a Gated DeltaNet keeps, and the decay of each channel in 32 bits three times.

    These are the sum that softplus reads, what it gives, and its product with the rate.
    """
    names = ("q_proj", "k_proj", "v_proj", "b_proj", "g_a_proj", "forget_gate.f_a_proj")
    *parts, b, gate, rate = block.linears(names, x)
    mixed = block.joined(parts)
    del parts
    mixed = convolved(block, mixed)
    g = _decay(block.within("forget_gate"), rate)
    beta = block.pointwise(b, keeps_outputs=True)
    (rule,) = cores(block.config)
    qkv = parts_of(block, mixed, rule, beta.numel // block.tokens)
    out = rule_outputs(block, rule, qkv, g, beta, SCRATCH)
    gate = block.linear("g_b_proj", gate)
    return block.linear("o_proj", block.gated_norm("o_norm.weight", out, gate))


def _decay(gate: TapedBlock, x: Tensor) -> Tensor:
    """Return the logarithm of the decay of each channel: see models/patches/forget_gate.py."""
    g = gate.linear("f_b_proj", x)
    g = gate.sum(gate.as_dtype(g, WIDE), gate.weight("dt_bias"))
    rate = gate.pointwise(gate.as_dtype(gate.weight("A_log"), WIDE), keeps_outputs=True)
    return gate.product(rate, gate.pointwise(g, [g]))


SCRATCH = Scratch(44, 5, 2), Scratch(43, 10, 6)
"""Temporary tensors of a chunk: in the forward, in the backward."""


def split(block: Any, num_ranks: int) -> BlockSplit:
    """Shard by heads: q, k, v, the gate of the output and the decay have H features a head.

    The convolution runs over [q, k, v].
    """
    width, num_heads, what = block.qkv_dim, block.num_heads, "heads of Kimi Delta Attention"
    require_divides(num_ranks, num_heads, what)
    weights = {
        "forget_gate.dt_bias": DimCut(0, even(num_ranks, width, what)),  # [N H]
        "forget_gate.A_log": DimCut(2, even(num_ranks, num_heads, what)),  # [1, 1, N, 1]
    }
    out = ("q_proj", "k_proj", "v_proj", "b_proj", "g_b_proj", "forget_gate.f_b_proj")
    weights |= evenly(block, num_ranks, what, out=out, into=["o_proj"])
    weights |= depthwise(block, "conv1d", blocked(num_ranks, (width, width, width), what))
    return BlockSplit(weights, {"qkv_dim": width // num_ranks})


KDA = Kind(
    "kda",
    cores=cores,
    functions={"chunk_kimi_delta_attention": delta_rule(RECURRENCE), **UNCUT_CONVOLUTION},
    carries=carries,
    activations=activations,
    backends=(Backend("Kimi Delta Attention", backend), short_convolution.BACKEND),
    split=split,
    keeps_documents_apart=True,
    shares_input=("q_proj", "k_proj", "v_proj", "b_proj", "g_a_proj", "forget_gate.f_a_proj"),
    gating=("forget_gate.f_a_proj", "forget_gate.f_b_proj", "b_proj"),
    rates=("forget_gate.A_log",),
)
