"""Softmax attention: over all tokens before, or a window of them.

Tensor parallelism shards the heads.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from math import lcm
from typing import Any

from transformers import PretrainedConfig

from shardwise.kernels.attention.places import for_mixer
from shardwise.models.elementwise import SharedRows
from shardwise.models.kinds.base import Core, Kind
from shardwise.models.moves import SMALL, WIDE, attention_in_pieces
from shardwise.models.operations import TapedBlock
from shardwise.models.tape import Moves, Tensor
from shardwise.models.tensor_cuts import (
    BlockSplit,
    DimCut,
    Indivisible,
    Rows,
    Segment,
    blocked,
    even,
    evenly,
    linear,
    require_divides,
    rms_norm,
    unwrapped,
)


@dataclass(frozen=True)
class Attention(Core):
    """Causal softmax attention of N query heads, with queries and keys of size K, values of size V.

    Token t meets t keys, (T + 1) / 2 on average; a query-key pair costs 2 K for its score and 2 V
    for its value, so a forward is N (K + V) (T + 1) per token: half of what counters that ignore
    causality give. Grouped key/value heads save memory, not products, nor do latent ones
    (DeepSeek-V2, arXiv 2405.04434), which training expands. Fused (flash) kernels skip the masked
    half, and in the backward they compute the scores again: five products (scores, dQ and dK of K,
    dP and dV of V) for the forward's two.

    With a window a token meets the last W keys only, itself among them: W - W (W - 1) / 2T on
    average over T tokens (W at most T). transformers hands fused attention that band as a mask,
    which it applies to all T x T pairs.
    """

    num_heads: int
    key_dim: int
    value_dim: int
    window: int | None = None
    cap: float | None = None
    """The cap of scores, which makes no products."""

    def model_forward(self, sequence_length: int) -> float:
        """See Core."""
        window = min(self.window or sequence_length, sequence_length)
        keys = window - window * (window - 1) / (2 * sequence_length)
        return 2.0 * self.num_heads * (self.key_dim + self.value_dim) * keys


def full_cores(config: PretrainedConfig) -> tuple[Attention]:
    """Return the core of attention over all tokens before."""
    size = _head_dim(config)
    return (Attention(config.num_attention_heads, size, size),)


def sliding_cores(config: PretrainedConfig) -> tuple[Attention]:
    """Return the core of attention over a window."""
    return (replace(full_cores(config)[0], window=config.sliding_window),)


def _capped(
    cores: Callable[[PretrainedConfig], tuple[Attention]],
) -> Callable[[PretrainedConfig], tuple[Attention]]:
    """Return what gives the same core with the cap of a config."""
    return lambda config: (replace(cores(config)[0], cap=config.attn_logit_softcapping),)


def _head_dim(config: PretrainedConfig) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def activations(
    block: TapedBlock,
    x: Tensor,
    rotates_wide: bool = False,
    rotates_windows: bool = False,
    rotates_pairs: bool = False,
) -> Tensor:
    """Keep the input of the projections, queries, keys, values, and the output once.

    Fused attention keeps a number per query and head beside them, and no scores. A gate on the
    output (Qwen3-Next, Qwen3.5) keeps the gate and what it multiplies. With `rotates_windows` only
    layers with a window are rotated, in a model that has such layers. `rotates_wide`: in 32 bits;
    `rotates_pairs`: neighbouring features.
    """
    size = _head_dim(block.config)
    output = "o_proj" if "o_proj.weight" in block.parameters else "out_proj"
    q, k, v, *gates = _projected(block, x, output)
    gate = gates[0] if gates else None
    if block.num_in(output) < q.numel // block.tokens:
        q, gate = block.split(q, (1, 1))
        gate = block.copied(gate)
        if not block.on_cpu:  # the kernel of the norm takes no heads with gaps between them
            q = block.copied(q)
    rotary = rotary_size(block.config, size)
    is_global = rotates_windows and block.config.sliding_window and not block.is_windowed
    if is_global or not block.is_rotated:
        rotary = 0
    q = _normed(block, ("q_norm", "q_layernorm"), q, size)
    k = _normed(block, ("k_norm", "k_layernorm"), k, size)
    mask = 0
    window = getattr(block.config, "sliding_window", None) if block.is_windowed else None
    # A shorter row needs none, and attention under cp makes none.
    if window and window <= block.length and not block.shares_rows:
        mask = block.rows * block.length * block.length
    # What turns some of the features lays heads before tokens, as attention with a mask does on a
    # CPU. What joins the gradients of queries and gates copies them.
    lays = 0 < rotary < size or (rotary > 0 and mask > 0 and block.on_cpu)
    joins = gate is not None and block.on_cpu
    q = block.viewed(q, is_copied=lays and not joins)
    k = block.viewed(k, is_copied=lays)
    v = block.viewed(v, is_copied=False)
    if rotary:
        share = rotary / size
        q, k = (block.rotated(y, size, share, rotates_wide, rotates_pairs) for y in (q, k))
    q = _normed(block, ("query_layernorm",), q, size)  # HunYuan's, after the rotation
    k = _normed(block, ("key_layernorm",), k, size)
    if "llama_4_scaling_beta" in (getattr(block.config, "rope_parameters", None) or {}):
        q = block.product(q, _scales_by_position(block, q.itemsize))
    if block.shares_rows:
        out = over_ranks(block, block.shares_rows, q, k, v, (size, size))
    else:
        out = block.fused_attention(q, k, v, q.numel, size, mask)
    if gate is not None:
        out = block.product(out, block.pointwise(gate, keeps_outputs=True))
    out = block.multiplied(block.linear(output, out), "attention_out_multiplier")
    return block.dropped(out, "resid_pdrop")


def _projected(block: TapedBlock, x: Tensor, output: str) -> list[Tensor]:
    """Return queries, keys, values and, where a projection gives it, the gate of the output."""
    if "qkv_proj.weight" in block.parameters:
        joined = block.linear("qkv_proj", x)
        queries = block.num_in(output)
        keys = (block.num_out("qkv_proj") - queries) // 2
        return [block.slice(joined, n * block.tokens) for n in (queries, keys, keys)]
    names = ["q_proj", "k_proj", "v_proj"]
    names += ["gate_proj"] * ("gate_proj.weight" in block.parameters)
    q, k, v, *gate = block.linears(names, block.multiplied(x, "attention_in_multiplier"))
    return [q, block.multiplied(k, "key_multiplier"), v, *gate]


def activations_of_joined(block: TapedBlock, x: Tensor) -> Tensor:
    """Keep the input, what the projection gives, and the output once."""
    parts = block.split(block.linear("c_attn", x), (1, 1, 1))
    q, k, v = (block.viewed(part, is_copied=False) for part in parts)
    size = block.config.n_embd // block.config.n_head
    if block.shares_rows:
        out = over_ranks(block, block.shares_rows, q, k, v, (size, size))
    else:
        out = block.fused_attention(q, k, v, q.numel, size)
    return block.tape.hold(block.dropped(block.linear("c_proj", out), "resid_pdrop"))


def over_ranks(
    block: TapedBlock, shared: SharedRows, q: Tensor, k: Tensor, v: Tensor, sizes: tuple[int, int]
) -> Tensor:
    """Return the output of kernels/attention/places.py; `sizes`: of a head of keys and of values.

    An operator computes some queries on some keys, with heads of one size. Its output is scaled, in
    a new tensor, and added to what is merged. That is kept; selective checkpointing keeps each
    output of an operator instead.
    """
    q, k, v = (block.as_dtype(x, block.cast or x.itemsize) for x in (q, k, v))
    key_size, value_size = sizes
    received = None
    if shared.way == "ulysses":
        # Ranks exchange tokens for heads; what arrives is copied into tensors of its own.
        num_heads = k.numel // key_size // block.tokens
        copies = lcm(num_heads, shared.num_ranks) // num_heads
        numels = q.numel, k.numel * copies, v.numel * copies
        received = block.tape.tensor(sum(numels), q.itemsize)
        q, k, v = (
            block.tape.run([x], [(numel, x.itemsize)])[0]
            for x, numel in zip((q, k, v), numels, strict=True)
        )
    queries, itemsize = q.numel // key_size, q.itemsize  # of all heads
    padded = -(-max(sizes) // 8) * 8
    merged = queries * (value_size + 1) * WIDE
    each = queries * (padded * itemsize + WIDE)
    padding = sum(
        x.numel // size * padded * itemsize
        for x, size in ((q, key_size), (k, key_size), (v, value_size))
        if size < padded
    )
    row = block.length * (shared.num_ranks if shared.way == "ulysses" else 1)
    repeats = sum(num_queries for num_queries, *_ in shared.pieces) / row
    # Scores that a cap changes are there whole; in the backward with gradients and what was capped.
    most = max(num_queries * num_keys for num_queries, num_keys, _ in shared.pieces)
    scores = queries // row * most * WIDE * shared.is_capped
    rounded = scores // 2 * (not block.on_cpu and itemsize < WIDE)
    inside = 0
    if shared.is_capped:
        # Queries in the order of keys' heads, or outputs; 32 bits of all on a CPU; and the mask.
        widened = WIDE * (itemsize < WIDE and block.on_cpu)
        first = q.num_bytes + widened * (q.numel + k.numel)
        last = queries * (value_size + 3) * WIDE + widened * v.numel
        inside = merged + scores + rounded + most + max(first, last)
        inside -= queries * (value_size * itemsize + WIDE)  # there is no result yet
    forward = block.tape.products_within(
        int(each * repeats), merged, max(2 * merged + each, inside) + padding, each
    )
    numels = q.numel, k.numel, v.numel
    moves, moves_back = attention_in_pieces(
        *(shared.pieces, shared.is_capped, queries // row, row, value_size, numels, itemsize)
    )
    moves_of_sinks, back_of_sinks = _moves_of_sinks(block, queries, value_size)
    lse = block.tape.tensor(queries, WIDE)
    # The gradients of other ranks' keys and values, and what an operator gives to be added.
    others = (k.numel + v.numel) * WIDE + (q.numel + k.numel + v.numel) * itemsize
    output_bytes = 2 * queries * padded * itemsize * (value_size < padded)
    (out,) = block.tape.run(
        [q, k, v],
        [(queries * value_size, itemsize)],
        keeps=[q, k, v, lse],
        keeps_outputs=True,
        forward=forward,
        forward_moves=(*moves, *moves_of_sinks),
        backward=others + padding + output_bytes + 3 * scores + rounded,
        backward_moves=(*moves_back, *back_of_sinks),
        flops=block.attention_flops(q, queries * value_size),
    )
    del received
    return block.copied(out) if shared.way == "ulysses" else out


def _moves_of_sinks(block: TapedBlock, queries: int, value_size: int) -> tuple[Moves, Moves]:
    """Return the moves that join sinks to what has been merged, and those of their gradient."""
    if "sinks" not in block.parameters:
        return (), ()
    lse, out = queries * WIDE, queries * value_size * WIDE
    forward = 2 * lse, *[2 * lse] * 4, 2 * out + lse, 2 * lse
    gradient = 2 * lse, 2 * lse, 3 * out, out + lse, 3 * lse, lse, SMALL
    return forward, gradient if block.weight("sinks").slot is not None else ()


def _normed(block: TapedBlock, names: tuple[str, ...], x: Tensor, size: int) -> Tensor:
    """Return the norm of queries or keys, over a head or all features, where the block has one."""
    for name in names:
        if f"{name}.weight" in block.parameters:
            return block.rms_norm(f"{name}.weight", x, block.parameters[f"{name}.weight"].shape[0])
    return x


def _scales_by_position(block: TapedBlock, itemsize: int) -> Tensor:
    """Return Ministral's factor of the queries of each position."""
    moves = (SMALL,) * (5 + (itemsize < WIDE))
    return block.tape.run([], [(block.length, itemsize)], forward_moves=moves)[0]


def rotary_size(config: PretrainedConfig, size: int) -> int:
    """Return how many features of a head are rotated; 0 in a model without rotary positions."""
    parameters = getattr(config, "rope_parameters", None)
    if not parameters or getattr(config, "position_embedding_type", None) == "nope":
        return 0
    return int(size * parameters.get("partial_rotary_factor", 1.0))


def split(block: Any, num_ranks: int) -> BlockSplit:
    """Shard q, k, v by heads, o by what the heads give: the shape of most families, with grouped
    heads or without.

    With fewer key/value heads than ranks, neighbours hold the same one. Norms of q and k over a
    head are whole on every rank; those over all heads are sharded.
    """
    size = block.head_dim
    output = "o_proj" if hasattr(block, "o_proj") else "out_proj"
    num_heads = unwrapped(block.get_submodule(output)).in_features // size
    num_kv_heads = unwrapped(block.v_proj).out_features // size
    require_divides(num_ranks, num_heads, "attention heads")
    shares = _shares_of_keys(num_kv_heads, num_ranks)
    # A head of q may come with as many features for its gate.
    queries = even(num_ranks, unwrapped(block.q_proj).out_features, "query features")
    keys = Rows(num_ranks, (Segment(num_kv_heads * size, shares),))
    weights = {
        **linear(block, "q_proj", "out", queries),
        **linear(block, "k_proj", "out", keys),
        **linear(block, "v_proj", "out", keys),
        **evenly(block, num_ranks, "attention heads", out=["gate_proj"], into=[output]),
    }
    if hasattr(block, "sinks"):
        weights["sinks"] = DimCut(0, even(num_ranks, num_heads, "attention heads"))
    norms = {}
    for name, rows in (("q_norm", queries), ("k_norm", keys)):
        norm = getattr(block, name, None)
        if norm is not None and norm.weight.numel() == rows.size and rows.size != size:
            weights[f"{name}.weight"] = DimCut(0, rows)
            norms[name] = rms_norm
    groups = {"num_key_value_groups": num_heads // num_ranks * shares // num_kv_heads}
    return BlockSplit(weights, groups, norms)


def _shares_of_keys(num_kv_heads: int, num_ranks: int) -> int:
    """Return in how many shares key/value heads are cut; neighbours may have the same one."""
    shares = min(num_ranks, num_kv_heads)
    if num_kv_heads % shares or num_ranks % shares:
        raise Indivisible(f"{num_kv_heads} key/value heads")
    return shares


def split_grouped(block: Any, num_ranks: int) -> BlockSplit:
    """Shard a linear in which q, k and v lie one after the other, with grouped heads or without."""
    size, num_heads = block.head_dim, block.config.num_attention_heads
    num_kv_heads = block.num_key_value_heads
    require_divides(num_ranks, num_heads, "attention heads")
    shares = _shares_of_keys(num_kv_heads, num_ranks)
    keys = Segment(num_kv_heads * size, shares)
    rows = Rows(num_ranks, (Segment(num_heads * size, num_ranks), keys, keys))
    weights = linear(block, "qkv_proj", "out", rows)
    weights |= evenly(block, num_ranks, "attention heads", into=["o_proj"])
    config = copy.copy(block.config)  # Its forward asks it where keys begin.
    config.num_attention_heads = num_heads // num_ranks
    sizes = {
        "num_key_value_heads": num_kv_heads // shares,
        "num_key_value_groups": num_heads // num_ranks * shares // num_kv_heads,
    }
    return BlockSplit(weights, {"config": config, **sizes})


def split_joined(block: Any, num_ranks: int) -> BlockSplit:
    """Shard a Conv1D in which q, k and v lie one after the other."""
    require_divides(num_ranks, block.num_heads, "attention heads")
    width = block.embed_dim
    rows = blocked(num_ranks, (width, width, width), "query features")
    weights = linear(block, "c_attn", "out", rows)
    weights |= evenly(block, num_ranks, "attention features", into=["c_proj"])
    return BlockSplit(
        weights, {"split_size": width // num_ranks, "num_heads": block.num_heads // num_ranks}
    )


FULL = Kind(
    "full_attention",
    cores=full_cores,
    split=split,
    keeps_documents_apart=True,
    is_attention=True,
    activations=activations,
    shares_input=("q_proj", "k_proj", "v_proj", "gate_proj"),
)
SLIDING = replace(FULL, name="sliding_attention", cores=sliding_cores)
ROTATED_WIDE = replace(FULL, activations=partial(activations, rotates_wide=True))
"""OLMo's, whose positions are rotated in 32 bits."""
BESIDE_WINDOWS = replace(FULL, activations=partial(activations, rotates_windows=True))
"""EXAONE's, whose positions are rotated in layers with a window, where it has any."""
SLIDING_ROTATED_WIDE = replace(ROTATED_WIDE, name="sliding_attention", cores=sliding_cores)
ROTATED_PAIRS = replace(FULL, activations=partial(activations, rotates_pairs=True))
"""GLM's, which rotates neighbouring features."""
ROTATED_WIDE_PAIRS = replace(
    FULL, activations=partial(activations, rotates_pairs=True, rotates_wide=True)
)
"""ERNIE's, which does so in 32 bits."""
PAIRS_BESIDE_WINDOWS = replace(
    FULL,
    activations=partial(activations, rotates_windows=True, rotates_pairs=True, rotates_wide=True),
)
"""Cohere's, whose layers with a window rotate neighbouring features in 32 bits."""
SLIDING_PAIRS = replace(PAIRS_BESIDE_WINDOWS, name="sliding_attention", cores=sliding_cores)
GROUPED = replace(FULL, split=split_grouped, shares_input=())
"""Phi's, with one projection for queries and grouped keys and values."""
SLIDING_GROUPED = replace(GROUPED, name="sliding_attention", cores=sliding_cores)
_OWN = {"ALL_ATTENTION_FUNCTIONS": for_mixer}
CAPPED = replace(FULL, cores=_capped(full_cores), functions=_OWN)
"""Gemma 2's, whose scores are capped, which no operator of torch does."""
SLIDING_CAPPED = replace(SLIDING, cores=_capped(sliding_cores), functions=_OWN)
SINKS = replace(FULL, functions=_OWN)
"""Attention each head of which has a sink: a score without a value."""
SLIDING_SINKS = replace(SLIDING, functions=_OWN)
ANGLES_ONCE = replace(SINKS, activations=partial(activations, rotates_pairs=True))
"""gpt-oss', whose angles stand once: they turn halves as others do neighbours."""
SLIDING_ANGLES_ONCE = replace(ANGLES_ONCE, name="sliding_attention", cores=sliding_cores)
JOINED = replace(
    FULL,
    split=split_joined,
    activations=activations_of_joined,
    # Its family adds positions before the first layer, which run on from one document to the next.
    keeps_documents_apart=False,
    shares_input=(),
)
"""GPT-2's, with one projection for q, k and v."""
