"""Gated DeltaNet (arXiv 2412.06464): a recurrence that decays its state and corrects what it reads.

Tensor parallelism shards the key heads, with the value heads that go with each. Families pack its
projections in three ways, each of which is a `Kind` here.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from transformers import PretrainedConfig

from shardwise.kernels.gated_delta_rule import RECURRENCE, backend
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
from shardwise.models.kinds.short_convolution import (
    CAUSAL_CONVOLUTION,
    UNCUT_CONVOLUTION,
    convolved,
)
from shardwise.models.moves import WIDE
from shardwise.models.operations import TapedBlock
from shardwise.models.tape import Tensor
from shardwise.models.tensor_cuts import (
    BlockSplit,
    DimCut,
    blocked,
    even,
    evenly,
    linear,
    require_divides,
)

HEADS = "key heads of Gated DeltaNet"
VALUE_HEADS = "value heads of Gated DeltaNet"
RULE_BACKEND = Backend("gated delta rule", backend)


class GatedDeltaNet(DeltaRule):
    """The gated delta rule (arXiv 2412.06464), whose decay is one number per head.

    Run by `kernels/gated_delta_rule/chunked.py`, per head and chunk. The forward: products k
    k^T and q k^T (2 C^2 K each), the inverse of the system times keys (2 C^2 K) and values (2 C^2
    V), weights times new values (2 C^2 V), the state read by keys and by queries and then updated
    (2 C K V each); and the inverse of a unit-triangular C x C matrix, C (C - 1) per column, which
    torch's FLOP counter counts as 0.

    The backward computes a chunk's forward again, without the output: seven products with the state
    or its gradient, of which one is of the forward; C x C matrices times K columns six times and
    times V columns five times, of which three and one are of the forward; and the inverse again.
    """

    def chunk_flops(self) -> tuple[ChunkFlops, ChunkFlops, ChunkFlops]:
        """See DeltaRule. An inverse has a triple for each three tokens, less one for each pair."""
        k, v = self.key_dim, self.value_dim
        return (
            ChunkFlops(6 * k * v, 2 * (3 * k + 2 * v) - 1, 1),
            ChunkFlops(14 * k * v, 2 * (6 * k + 5 * v) - 1, 1),
            ChunkFlops(4 * k * (k + v), 2 * (2 * k + v) - 1, 1),
        )


def cores(config: PretrainedConfig) -> tuple[GatedDeltaNet]:
    """Return the core by the config."""
    heads, key_dim = config.linear_num_value_heads, config.linear_key_head_dim
    return (GatedDeltaNet(heads, key_dim, config.linear_value_head_dim),)


def carries(config: PretrainedConfig, shapes: Shapes) -> Carried:
    """Return the channels of q, k and v, and a matrix S x S and a state S x V for each head."""
    return rule_carries(cores(config)[0], shapes["A_log"][0], shapes["conv1d.weight"][0])


def activations(block: TapedBlock, x: Tensor) -> Tensor:
    """Keep the input, q, k and v before and after the convolution, gates, decay and states.

    That is once more what goes into the norm, its gate, and what goes into the last projection.
    """
    names = block.parameters
    if "in_proj_qkvz.weight" in names:
        projected = block.linears(("in_proj_qkvz", "in_proj_ba"), x)
        mixed, z, b, a = _by_key_head(block, *projected)
    elif "in_proj_qkv.weight" in names:
        inputs = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
        mixed, z, b, a = block.linears(inputs, x)
    else:
        return _separate(block, x)
    mixed = convolved(block, mixed)
    beta = block.pointwise(b, keeps_outputs=True)
    g = decay(block, a)
    (rule,) = cores(block.config)
    qkv = parts_of(block, mixed, rule, beta.numel // block.tokens)
    out = gated_outputs(block, rule, qkv, g, beta)
    out = block.gated_norm("norm.weight", out, z)
    return block.linear("out_proj", out)


def _separate(block: TapedBlock, x: Tensor) -> Tensor:
    names = ("q_proj", "k_proj", "v_proj", "a_proj", "b_proj", "g_proj")
    *parts, a, b, gate = block.linears(names, x)
    mixed = block.joined(parts)
    del parts
    mixed = convolved(block, mixed)
    beta = block.scaled(block.pointwise(b, keeps_outputs=True))
    g = decay(block, a)
    (rule,) = cores(block.config)
    qkv = parts_of(block, mixed, rule, beta.numel // block.tokens)
    out = gated_outputs(block, rule, qkv, g, beta)
    return block.linear("o_proj", block.gated_norm("o_norm.weight", out, gate))


def _by_key_head(block: TapedBlock, qkvz: Tensor, ba: Tensor) -> list[Tensor]:
    """Return [q, k, v] joined, and z, b and a, each copied out of where its key head lies."""
    channels = block.parameters["conv1d.weight"].shape[0]
    z_size = block.num_out("in_proj_qkvz") - channels
    values, keys = z_size, (channels - z_size) // 2
    q, k, v, z = block.split(qkvz, (keys, keys, values, z_size))
    b, a = (block.copied(part) for part in block.split(ba, (1, 1)))
    z = block.copied(z)
    q, k, v = (block.copied(part) for part in (q, k, v))
    return [block.joined([q, k, v]), z, b, a]


def decay(block: TapedBlock, a: Tensor) -> Tensor:
    """Return -e^A softplus(a + bias) of each head and token, in 32 bits."""
    shifted = block.sum(block.as_dtype(a, WIDE), block.weight("dt_bias"))
    rate = block.pointwise(block.as_dtype(block.weight("A_log"), WIDE), keeps_outputs=True)
    return block.product(rate, block.pointwise(shifted, [shifted]))


def gated_outputs(
    block: TapedBlock, rule: GatedDeltaNet, qkv: Sequence[Tensor], g: Tensor, beta: Tensor
) -> Tensor:
    """Return the outputs of the rule: on a GPU in 16 bits, as fla's kernels make them."""
    if block.on_cpu or qkv[0].itemsize == WIDE:
        return rule_outputs(block, rule, qkv, g, beta, DELTA_RULE_SCRATCH)
    return _by_fla(block, rule, qkv, g, beta)


def _by_fla(
    block: TapedBlock, rule: GatedDeltaNet, qkv: Sequence[Tensor], g: Tensor, beta: Tensor
) -> Tensor:
    """Keep q and k of length 1, v, the sums of g, and the inverse of each chunk, all as copies.

    The backward makes the rest again: keys and values times the inverse, and the states. Source:
    fla/ops/gated_delta_rule/chunk.py of fla-core 0.4.2.
    """
    size, tape = qkv[0].itemsize, block.tape
    values, num = qkv[2].numel, beta.numel
    keys = num * rule.key_dim
    state = block.rows * num // block.tokens * rule.key_dim * rule.value_dim
    states = rule.chunks(block.length).number * state
    pairs = num * rule.chunk_size
    copies = [tape.tensor(numel, size) for numel in (keys, keys, values, pairs)]
    sums = tape.tensor(num, WIDE)
    out, _ = tape.run(
        [*qkv, g, beta],
        [(values, size), (state, WIDE)],
        keeps=[*copies, sums, beta],
        forward=size * (keys + 2 * values + states),
        backward=size * (3 * keys + 3 * values + 2 * states),
        flops=rule.flops(num // block.tokens),
    )
    return out


DELTA_RULE_SCRATCH = Scratch(9, 4, 5), Scratch(15, 6, 9)
"""Temporary tensors of a chunk: in the forward, in the backward."""


def split_by_key_head(block: Any, num_ranks: int) -> BlockSplit:
    """Shard two projections: q, k, v and z of a key head lie together, and so do its b and a."""
    return _split(block, num_ranks, out=("in_proj_qkvz", "in_proj_ba"), into="out_proj")


def split_joined(block: Any, num_ranks: int) -> BlockSplit:
    """Shard a projection of q, k and v, one after the other, and one each of z, b and a."""
    split = _split(block, num_ranks, out=("in_proj_z", "in_proj_b", "in_proj_a"), into="out_proj")
    rows = split.weights["conv1d.weight"].rows
    return replace(split, weights={**split.weights, **linear(block, "in_proj_qkv", "out", rows)})


def split_separate(block: Any, num_ranks: int) -> BlockSplit:
    """Shard one projection for each of q, k, v, gate, a and b."""
    names = ("q_proj", "k_proj", "v_proj", "g_proj", "a_proj", "b_proj")
    return _split(block, num_ranks, out=names, into="o_proj")


def _split(block: Any, num_ranks: int, out: tuple[str, ...], into: str) -> BlockSplit:
    """Shard the projections that lie head by head, the convolution over [q, k, v], and the rates of
    decay.
    """
    require_divides(num_ranks, block.num_k_heads, HEADS)
    keys, values = block.key_dim, block.value_dim
    channels = blocked(num_ranks, (keys, keys, values), HEADS)
    per_head = even(num_ranks, block.num_v_heads, VALUE_HEADS)
    weights = {
        **evenly(block, num_ranks, HEADS, out=out, into=[into]),
        "conv1d.weight": DimCut(0, channels),
        "A_log": DimCut(0, per_head),
        "dt_bias": DimCut(0, per_head),
    }
    attributes = {
        name: getattr(block, name) // num_ranks
        for name in ("num_k_heads", "num_v_heads", "key_dim", "value_dim", "conv_dim")
        if hasattr(block, name)
    }
    return BlockSplit(weights, attributes | {"conv1d.groups": channels.local_size})


BY_KEY_HEAD = Kind(
    "gated_delta_net",
    cores=cores,
    functions={"torch_chunk_gated_delta_rule": delta_rule(RECURRENCE), **CAUSAL_CONVOLUTION},
    carries=carries,
    activations=activations,
    backends=(RULE_BACKEND, short_convolution.BACKEND),
    split=split_by_key_head,
    keeps_documents_apart=True,
    shares_input=("in_proj_qkvz", "in_proj_ba"),
    gating=("in_proj_ba",),
    rates=("A_log",),
)
"""Qwen3-Next's: a head's rows lie together."""
JOINED = replace(
    BY_KEY_HEAD,
    split=split_joined,
    shares_input=("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),
    gating=("in_proj_a", "in_proj_b"),
)
"""Qwen3.5's: q, k and v in one projection, one after the other."""
SEPARATE = replace(
    BY_KEY_HEAD,
    functions={"torch_chunk_gated_delta_rule": delta_rule(RECURRENCE), **UNCUT_CONVOLUTION},
    split=split_separate,
    shares_input=("q_proj", "k_proj", "v_proj", "a_proj", "b_proj", "g_proj"),
    gating=("a_proj", "b_proj"),
)
"""OLMo-Hybrid's: a projection each."""
