"""Softmax attention: over all tokens before, a window of them, or keys and values of a latent.

Tensor parallelism shards the heads.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from math import lcm
from typing import Any

from transformers import PretrainedConfig

from shardwise.models.elementwise import SharedRows
from shardwise.models.kinds.base import Core, Kind
from shardwise.models.moves import SMALL, WIDE
from shardwise.models.operations import TapedBlock
from shardwise.models.tape import Tensor
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


def latent_cores(config: PretrainedConfig) -> tuple[Attention]:
    """Return the core of latent attention; `head_dim` in its config is another size."""
    key_dim = config.qk_nope_head_dim + config.qk_rope_head_dim
    return (Attention(config.num_attention_heads, key_dim, config.v_head_dim),)


def _head_dim(config: PretrainedConfig) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def activations(
    block: TapedBlock, x: Tensor, rotates_wide: bool = False, rotates_windows: bool = False
) -> Tensor:
    """Keep the input of the projections, queries, keys, values, and the output once.

    Fused attention keeps a number per query and head beside them, and no scores. A gate on the
    output (Qwen3-Next, Qwen3.5) keeps the gate and what it multiplies. With `rotates_windows` only
    layers with a window are rotated, in a model that has such layers.
    """
    size = _head_dim(block.config)
    names = ("q_proj", "k_proj", "v_proj")
    q, k, v = block.linears(names, block.multiplied(x, "attention_in_multiplier"))
    k = block.multiplied(k, "key_multiplier")
    gate = None
    output = "o_proj" if "o_proj.weight" in block.parameters else "out_proj"
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
    # What joins the gradients of queries and gates copies them.
    joins = gate is not None and block.on_cpu
    q = block.viewed(q, is_copied=rotary > 0 and not joins)
    k = block.viewed(k, is_copied=rotary > 0)
    v = block.viewed(v, is_copied=False)
    if rotary:
        q, k = (block.rotated(y, size, rotary / size, rotates_wide) for y in (q, k))
    mask = 0
    window = getattr(block.config, "sliding_window", None) if block.is_windowed else None
    # A shorter row needs none, and attention under cp makes none.
    if window and window <= block.length and not block.shares_rows:
        mask = block.rows * block.length * block.length
    if block.shares_rows:
        out = _over_ranks(block, block.shares_rows, q, k, v, (size, size))
    else:
        out = block.fused_attention(q, k, v, q.numel, size, mask)
    if gate is not None:
        out = block.product(out, block.pointwise(gate, keeps_outputs=True))
    return block.multiplied(block.linear(output, out), "attention_out_multiplier")


def activations_of_latent(block: TapedBlock, x: Tensor) -> Tensor:
    """Keep the inputs of the projections, latents, queries, joined keys, values, and the output."""
    config = block.config
    nope, rope, values = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
    is_rotated = rotary_size(config, rope) > 0
    first = "q_proj" if "q_proj.weight" in block.parameters else "q_a_proj"
    q, joined = block.linears((first, "kv_a_proj_with_mqa"), x)
    if first == "q_a_proj":
        latent = block.rms_norm("q_a_layernorm.weight", q, block.num_out(first))
        q = block.linear("q_b_proj", latent)
    num_heads = q.numel // block.tokens // (nope + rope)
    # transformers' code refers to it until it returns.
    q = queries = block.viewed(q, is_copied=True)
    if is_rotated:
        turned = _of_latent(block, block.slice(queries, q.numel * rope // (nope + rope)))
        q = block.beside_turned(turned, block.slice(queries, q.numel * nope // (nope + rope)))
    rank = config.kv_lora_rank
    compressed, k_rot = block.split(joined, (rank, rope))
    compressed = block.rms_norm("kv_a_layernorm.weight", compressed, rank)
    if is_rotated:
        k_rot = _of_latent(block, k_rot)
    expanded = block.viewed(block.linear("kv_b_proj", compressed), is_copied=True)
    k, v = block.split(expanded, (nope, values))
    keys = num_heads * (nope + rope) * block.tokens
    whole, part = keys * expanded.itemsize, k.num_bytes
    last = whole - part  # all heads have the same features there
    back = (2 * whole, 2 * last, last, 2 * last, 2 * whole, 2 * part, last + k_rot.num_bytes)
    (k,) = block.tape.run(
        [k, k_rot],
        [(keys, expanded.itemsize)],
        forward_moves=(2 * part, last + k_rot.num_bytes),
        backward_moves=back,
    )
    if block.shares_rows:
        out = _over_ranks(block, block.shares_rows, q, k, v, (nope + rope, values))
    else:
        out = _of_latents(block, q, k, v, num_heads)
    return block.linear("o_proj", out)


def _of_latent(block: TapedBlock, x: Tensor) -> Tensor:
    """Return features of latent attention that are rotated: as neighbours, or as halves."""
    size = block.config.qk_rope_head_dim
    return block.rotated(block.copied(x) if block.config.rope_interleave else x, size)


def _of_latents(block: TapedBlock, q: Tensor, k: Tensor, v: Tensor, num_heads: int) -> Tensor:
    """Return the output of attention whose values have another size than its keys.

    torch has no fused kernel for that on a CPU: there all scores are kept, [B, N, T, T].
    """
    if not block.on_cpu:
        return block.fused_attention(q, k, v, v.numel, v.numel // block.tokens // num_heads)
    itemsize = block.cast or v.itemsize
    wide = [block.as_dtype(block.as_dtype(x, itemsize), WIDE) for x in (q, k, v)]
    q, k, v = block.scaled(wide[0]), block.scaled(wide[1]), wide[2]
    pairs = block.rows * num_heads * block.length * block.length
    run, size = partial(block.tape.run, product=True, mixes=True), [(pairs, q.itemsize)]
    square = block.length**2
    masked = [square, 2 * square, SMALL, SMALL, 5 * square, 2 * pairs * q.itemsize]
    flops, moves = block.attention_flops(q, v.numel), [0, *masked]
    (scores,) = run([q, k], size, keeps=[q, k], forward=pairs, flops=flops, forward_moves=moves)
    shares = block.pointwise(scores, keeps_outputs=True, forward=pairs)
    del scores
    size = [(v.numel, v.itemsize)]
    copied = [pairs * (WIDE + itemsize)] * (itemsize < WIDE)  # autocast rounds them
    (out,) = run([shares, v], size, keeps=[shares, v], forward_moves=[0, *copied])
    return block.copied(block.as_dtype(out, itemsize))


def activations_of_joined(block: TapedBlock, x: Tensor) -> Tensor:
    """Keep the input, what the projection gives, and the output once."""
    parts = block.split(block.linear("c_attn", x), (1, 1, 1))
    q, k, v = (block.viewed(part, is_copied=False) for part in parts)
    size = block.config.n_embd // block.config.n_head
    if block.shares_rows:
        out = _over_ranks(block, block.shares_rows, q, k, v, (size, size))
    else:
        out = block.fused_attention(q, k, v, q.numel, size)
    return block.tape.hold(block.dropped(block.linear("c_proj", out), "resid_pdrop"))


def _over_ranks(
    block: TapedBlock, shared: SharedRows, q: Tensor, k: Tensor, v: Tensor, sizes: tuple[int, int]
) -> Tensor:
    """Return the output of parallel/context_attention.py; `sizes`: of a head of keys and of values.

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
    forward = block.tape.products_within(
        int(each * shared.repeats), merged, 2 * merged + each + padding, each
    )
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
        backward=others + padding + output_bytes,
        flops=block.attention_flops(q, queries * value_size),
    )
    del received
    return block.copied(out) if shared.way == "ulysses" else out


def _normed(block: TapedBlock, names: tuple[str, ...], x: Tensor, size: int) -> Tensor:
    """Return the norm of queries or keys, over a head or all features, where the block has one."""
    for name in names:
        if f"{name}.weight" in block.parameters:
            return block.rms_norm(f"{name}.weight", x, block.parameters[f"{name}.weight"].shape[0])
    return x


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
    shares = min(num_ranks, num_kv_heads)
    if num_kv_heads % shares or num_ranks % shares:
        raise Indivisible(f"{num_kv_heads} key/value heads")
    # A head of q may come with as many features for its gate.
    queries = even(num_ranks, unwrapped(block.q_proj).out_features, "query features")
    keys = Rows(num_ranks, (Segment(num_kv_heads * size, shares),))
    weights = {
        **linear(block, "q_proj", "out", queries),
        **linear(block, "k_proj", "out", keys),
        **linear(block, "v_proj", "out", keys),
        **evenly(block, num_ranks, "attention heads", into=[output]),
    }
    norms = {}
    for name, rows in (("q_norm", queries), ("k_norm", keys)):
        norm = getattr(block, name, None)
        if norm is not None and norm.weight.numel() == rows.size and rows.size != size:
            weights[f"{name}.weight"] = DimCut(0, rows)
            norms[name] = rms_norm
    groups = {"num_key_value_groups": num_heads // num_ranks * shares // num_kv_heads}
    return BlockSplit(weights, groups, norms)


def split_latent(block: Any, num_ranks: int) -> BlockSplit:
    """Shard the projections out of a latent, and `o_proj`, by heads.

    All heads share the latent of keys and values (and that of queries, if there is one), so the
    projections into it are whole on every rank.
    """
    what = "attention heads"
    require_divides(num_ranks, block.num_heads, what)
    expanding = ("q_proj", "q_b_proj", "kv_b_proj")
    return BlockSplit(evenly(block, num_ranks, what, out=expanding, into=["o_proj"]))


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
    shares_input=("q_proj", "k_proj", "v_proj"),
)
SLIDING = replace(FULL, name="sliding_attention", cores=sliding_cores)
ROTATED_WIDE = replace(FULL, activations=partial(activations, rotates_wide=True))
"""OLMo's, whose positions are rotated in 32 bits."""
BESIDE_WINDOWS = replace(FULL, activations=partial(activations, rotates_windows=True))
"""EXAONE's, whose positions are rotated in layers with a window, where it has any."""
SLIDING_ROTATED_WIDE = replace(ROTATED_WIDE, name="sliding_attention", cores=sliding_cores)
LATENT = replace(
    FULL,
    cores=latent_cores,
    activations=activations_of_latent,
    split=split_latent,
    shares_input=("q_proj", "q_a_proj", "kv_a_proj_with_mqa"),
)
"""Latent attention of DeepSeek-V2 and V3, which Kimi Linear has too."""
JOINED = replace(
    FULL,
    split=split_joined,
    activations=activations_of_joined,
    # Its family adds positions before the first layer, which run on from one document to the next.
    keeps_documents_apart=False,
    shares_input=(),
)
"""GPT-2's, with one projection for q, k and v."""
