"""Latent attention: all heads share a latent of keys and values, which training expands.

Source: DeepSeek-V2, arXiv 2405.04434. Kimi Linear has it too.
"""

from dataclasses import replace
from functools import partial
from typing import Any

from transformers import PretrainedConfig

from shardwise.models.kinds.attention import FULL, Attention, over_ranks, rotary_size
from shardwise.models.moves import SMALL, WIDE
from shardwise.models.operations import TapedBlock
from shardwise.models.tape import Tensor
from shardwise.models.tensor_cuts import BlockSplit, evenly, require_divides


def cores(config: PretrainedConfig) -> tuple[Attention]:
    """Return the core of latent attention; `head_dim` in its config is another size."""
    key_dim = config.qk_nope_head_dim + config.qk_rope_head_dim
    return (Attention(config.num_attention_heads, key_dim, config.v_head_dim),)


def activations(block: TapedBlock, x: Tensor) -> Tensor:
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
        out = over_ranks(block, block.shares_rows, q, k, v, (nope + rope, values))
    else:
        out = _of_latents(block, q, k, v, num_heads)
    return block.linear("o_proj", out)


def _of_latent(block: TapedBlock, x: Tensor) -> Tensor:
    """Return features of latent attention that are rotated: as neighbours, or as halves."""
    size = block.config.qk_rope_head_dim
    return block.rotated(block.copied(x) if block.config.rope_interleave else x, size)


def _of_latents(block: TapedBlock, q: Tensor, k: Tensor, v: Tensor, num_heads: int) -> Tensor:
    """Return the output of attention whose values may have another size than its keys.

    torch has no fused kernel for that on a CPU: there all scores are kept, [B, N, T, T].
    """
    if not block.on_cpu or k.numel == v.numel:
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


def split(block: Any, num_ranks: int) -> BlockSplit:
    """Shard the projections out of a latent, and `o_proj`, by heads.

    All heads share the latent of keys and values (and that of queries, if there is one), so the
    projections into it are whole on every rank.
    """
    what = "attention heads"
    require_divides(num_ranks, block.num_heads, what)
    expanding = ("q_proj", "q_b_proj", "kv_b_proj")
    return BlockSplit(evenly(block, num_ranks, what, out=expanding, into=["o_proj"]))


LATENT = replace(
    FULL,
    cores=cores,
    activations=activations,
    split=split,
    shares_input=("q_proj", "q_a_proj", "kv_a_proj_with_mqa"),
)
