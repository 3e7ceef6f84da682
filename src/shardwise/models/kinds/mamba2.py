"""Mamba2 (arXiv 2405.21060): a state-space scan by heads, which share groups of B and C.

Tensor parallelism shards the heads, with the group that each reads.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F
from transformers import PretrainedConfig

from shardwise.kernels.gated_delta_rule.naive import wide
from shardwise.kernels.recurrence import Tokens
from shardwise.kernels.state_space_duality import RECURRENCE, backend
from shardwise.kernels.state_space_duality.chunked import CHUNK
from shardwise.models.chunks import ChunkFlops, CoreFlops, chunks_of
from shardwise.models.kinds import short_convolution
from shardwise.models.kinds.base import Backend, Carried, Core, Kind, Shapes
from shardwise.models.kinds.short_convolution import CAUSAL_CONVOLUTION, convolved
from shardwise.models.moves import WIDE
from shardwise.models.operations import TapedBlock
from shardwise.models.tape import Tensor, parameter
from shardwise.models.tensor_cuts import (
    BlockSplit,
    DimCut,
    Indivisible,
    Rows,
    Segment,
    Sum,
    depthwise,
    even,
    linear,
)

HEADS = "heads of Mamba2"


@dataclass(frozen=True)
class Mamba2(Core):
    """The state-space scan of Mamba2 (arXiv 2405.21060): N heads of size P, with a state of P x S
    per head.

    Model FLOPs, the recurrence on one token: decay the state (P S), add x B^T (2 P S), read with C
    (2 P S): 5 N P S. (Megatron-LM counts 7, the discretisation included.)

    Run by `kernels/state_space_duality/chunked.py`, per chunk of C tokens, of which the last
    may be shorter. The forward: of each of K groups, scores C B^T (2 C^2 S); of each head, scores
    times x (2 C^2 P), and the state read and written (2 C P S each).

    The backward computes the scores and what was read of the state again. Of each group, it has two
    more products with the gradient of the scores; of each head, the gradients of x and of the
    scores (2 C^2 P each) and five products with the state or its gradient, that read included.
    """

    num_heads: int
    head_dim: int
    state_size: int
    num_groups: int
    chunk_size: int = CHUNK

    def model_forward(self, sequence_length: int) -> float:
        """See Core."""
        return 5.0 * self.num_heads * self.head_dim * self.state_size

    def flops(self, num_heads: int, num_groups: int) -> CoreFlops:
        """Return the FLOPs of so many heads and groups; one product writes all into a map."""
        head, group = num_heads * self.head_dim, num_groups * self.state_size
        state = head * self.state_size
        return CoreFlops(
            ChunkFlops(2 * 2 * state, 2 * (group + head)),
            ChunkFlops(5 * 2 * state, 2 * (3 * group + 2 * head)),
            ChunkFlops(2 * state),
            ChunkFlops(2 * state),
            chunk_size=self.chunk_size,
        )


def cores(config: PretrainedConfig) -> tuple[Mamba2]:
    """Return the core by the config, which has one of two sets of names."""
    if hasattr(config, "mamba_n_heads"):
        names = ("mamba_n_heads", "mamba_d_head", "mamba_d_state", "mamba_n_groups")
    else:
        names = ("mamba_num_heads", "mamba_head_dim", "ssm_state_size", "n_groups")
    return (Mamba2(*(getattr(config, name) for name in names)),)


def carries(config: PretrainedConfig, shapes: Shapes) -> Carried:
    """Return the channels of x, B and C, and one factor and a state P x S for each head."""
    (core,), num_heads = cores(config), shapes["A_log"][0]
    state = num_heads * core.head_dim * core.state_size
    return Carried(shapes["conv1d.weight"][0], num_heads, state)


def activations(block: TapedBlock, x: Tensor) -> Tensor:
    """Keep the input, what the first projection gives, the convolution's output, dt and states.

    That is once more what goes into the norm, and what goes into the last projection.
    """
    channels, num_heads = (
        block.parameters["conv1d.weight"].shape[0],
        block.parameters["A_log"].shape[0],
    )
    (core,) = cores(block.config)
    width = num_heads * core.head_dim
    x = block.multiplied(x, "ssm_in_multiplier")
    projected = block.linear("in_proj", x)
    if hasattr(block.config, "ssm_multipliers"):  # a buffer, in the dtype of hidden states
        projected = block.product(projected, parameter(0, block.hidden, is_trained=False))
    gate, mixed, dt = block.split(projected, (width, channels, num_heads))
    mixed = convolved(block, mixed)
    state_width = (channels - width) // 2
    hidden, b, c = block.split(mixed, (width, state_width, state_width))
    out = _scanned(block, core, hidden, dt, b, c)
    if "norm.weight" in block.parameters:
        out = _normed(block, out, gate)
    else:
        out = block.product(out, block.pointwise(gate, [gate]))
    return block.multiplied(block.linear("out_proj", out), "ssm_out_multiplier")


def _scanned(
    block: TapedBlock, core: Mamba2, x: Tensor, dt: Tensor, b: Tensor, c: Tensor
) -> Tensor:
    """Return the outputs of the scan, which keeps its inputs and the state before each chunk."""
    shifted = block.sum(block.as_dtype(dt, WIDE), block.weight("dt_bias"))
    softplus = block.pointwise(shifted, [shifted])
    dt = block.pointwise(softplus, [softplus])
    num_heads = dt.numel // block.tokens
    num_groups = b.numel // block.tokens // core.state_size
    rates = [block.pointwise(block.weight("A_log"), keeps_outputs=True), block.weight("D")]
    state = block.rows * num_heads * core.head_dim * core.state_size
    chunks = chunks_of(block.length, CHUNK)
    size = WIDE * block.rows * num_heads

    def in_forward(num_tokens: int) -> int:
        """Return the bytes of values, pairs, some of them in 64 bits, and copies of x, B and C."""
        per_token = size * (3 * core.head_dim + 5 * num_tokens)
        copied = (x.numel + 2 * b.numel) // block.length * (x.itemsize < WIDE)
        return num_tokens * (per_token + WIDE * copied)

    def in_backward(num_tokens: int) -> int:
        """Return the bytes of values, pairs, B, C and scores."""
        per_group = 2 * b.numel // block.length + num_groups * block.rows * num_tokens
        per_head = size * (7 * core.head_dim + 5 * num_tokens)
        return num_tokens * (per_head + 2 * WIDE * per_group)

    def products(num_tokens: int) -> int:
        """Return the bytes of what is read of the state, the scores of each group, what they give,
        and the state.
        """
        per_token = 2 * num_heads * core.head_dim + num_groups * num_tokens
        return WIDE * (block.rows * num_tokens * per_token + state)

    if block.shares_rows:
        block.tape.products_within(WIDE * state)  # that of the map of a rank's tokens
    made = x.num_bytes + WIDE * state
    forward = chunks.in_forward(in_forward)
    backward = chunks.in_backward(in_backward) + 3 * WIDE * state
    at_once = products(chunks.longest)
    forward = block.tape.products_within(chunks.sum(products), made, forward, at_once)
    states = block.tape.tensor(chunks.number * state, WIDE)
    out, _ = block.tape.run(
        [x, dt, b, c, *rates],
        [(x.numel, x.itemsize), (state, WIDE)],
        keeps=[x, dt, b, c, states],
        forward=forward,
        backward=backward,
        flops=core.flops(num_heads, num_groups),
    )
    return out


def _normed(block: TapedBlock, x: Tensor, gate: Tensor) -> Tensor:
    """Return transformers' norm with a gate, which keeps each of its steps in 32 bits.

    Falcon-H1's multiplies by its gate before x is in 32 bits, or after the norm, and by its weight
    in 32 bits.
    """
    is_falcon = hasattr(block.config, "mamba_norm_before_gate")
    gate_first = not getattr(block.config, "mamba_norm_before_gate", False)
    wide = x if is_falcon else block.as_dtype(x, WIDE)
    if gate_first:
        wide = block.product(wide, _opened(block, gate))
    wide = block.as_dtype(wide, WIDE)
    wide = block.rescaled(wide, wide.numel // block.tokens)
    if not is_falcon:
        return block.product(block.weight("norm.weight"), block.as_dtype(wide, x.itemsize))
    wide = block.product(block.weight("norm.weight"), wide)
    if not gate_first:
        wide = block.product(wide, _opened(block, gate))
    return block.as_dtype(wide, x.itemsize)


def _opened(block: TapedBlock, gate: Tensor) -> Tensor:
    """Return the gate's activation in 32 bits."""
    gate = block.as_dtype(gate, WIDE)
    return block.pointwise(gate, [gate])


def scan(
    tokens: Tokens,
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    *,
    D: torch.Tensor,
    dt_bias: torch.Tensor,
    dt_limit: tuple[float, float],
    dt_softplus: bool,
    initial_states: torch.Tensor | None,
    return_final_states: bool,
    **flags: Any,
) -> torch.Tensor:
    """Return the outputs of a mixer's scan, and no state: parts are trained without a cache."""
    assert dt_softplus
    assert initial_states is None
    assert not return_final_states
    # In float32, as in mamba_ssm: the decay is an exponential of it.
    dt = F.softplus(wide(dt) + dt_bias).clamp(*dt_limit)
    return tokens.recur(RECURRENCE, x, dt, a, b, c, D)


def no_fused_mixer(tokens: Tokens, *args: Any, **kwargs: Any) -> None:
    """Return None, as transformers does without mamba_ssm.

    That package's kernel for training computes the whole mixer, past the adapter of its last
    projection and past a norm over features that tensor parallelism shards.
    """


def split(block: Any, num_ranks: int) -> BlockSplit:
    """Shard by heads. The first projection gives [z, x, B, C, dt]; x, B and C go through the
    convolution.

    Consecutive heads read one group. With fewer groups than ranks, neighbours hold the same one.
    """
    groups = block.n_groups
    shares = min(num_ranks, groups)
    heads = even(num_ranks, block.num_heads, HEADS)
    if groups % shares or num_ranks % shares:
        raise Indivisible(f"{groups} groups of {HEADS}")
    features = Segment(block.intermediate_size, num_ranks)
    states = Segment(groups * block.ssm_state_size, shares)
    way_in = Rows(num_ranks, (features, features, states, states, *heads.segments))
    channels = Rows(num_ranks, (features, states, states))
    out = Rows(num_ranks, (features,))
    weights = {
        **linear(block, "in_proj", "out", way_in),
        **linear(block, "out_proj", "in", out),
        **depthwise(block, "conv1d", channels),
        **{name: DimCut(0, heads) for name in ("A_log", "D", "dt_bias")},
    }
    attributes = {
        "num_heads": heads.local_size,
        "intermediate_size": out.local_size,
        "n_groups": groups // shares,
        "conv_dim": channels.local_size,
        "conv1d.groups": channels.local_size,
    }
    normed = _norm_groups(block)
    spread = 0 < normed < num_ranks
    if normed:
        weights["norm.weight"] = DimCut(0, out)
    if hasattr(block.norm, "n_groups"):
        attributes["norm.n_groups"] = groups // shares
    return BlockSplit(
        weights,
        attributes,
        norms={"norm": partial(gated_rms_norm, normed)} if spread else {},
        norm_groups=max(normed, 1),
        buffers={"mup_vector": DimCut(2, way_in)} if hasattr(block, "mup_vector") else {},
    )


def _norm_groups(block: Any) -> int:
    """Return the number of groups of features that the norm is over, 0 if there is no norm.

    Falcon-H1 may choose to have none.
    """
    if not hasattr(block.norm, "weight"):
        return 0
    if hasattr(block.norm, "group_size"):
        return block.intermediate_size // block.norm.group_size
    # In transformers 5.17, Granite's is over all features, whatever their groups.
    return getattr(block.norm, "n_groups", 1)


def gated_rms_norm(
    num_groups: int, norm: Any, num_features: int, add_up: Sum
) -> Callable[..., torch.Tensor]:
    """Return an RMS norm over each group of features, which several ranks share, before or after a
    gate.

    It computes in float32, as transformers' Mamba2 layers do.
    """
    gate_first = not getattr(norm, "norm_before_gate", False)

    def forward(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        wide, factor = x.float(), F.silu(gate.float())
        if gate_first:
            wide = wide * factor
        squares = add_up(wide.square().sum(-1, keepdim=True), num_groups)
        mean_square = squares * (num_groups / num_features)
        normed = norm.weight * (wide * torch.rsqrt(mean_square + norm.variance_epsilon))
        return (normed if gate_first else normed * factor).to(x.dtype)

    return forward


MAMBA2 = Kind(
    "mamba2",
    cores=cores,
    functions={
        "mamba2_split_conv1d_scan_combined": no_fused_mixer,
        "mamba2_chunk_scan": scan,
        **CAUSAL_CONVOLUTION,
    },
    carries=carries,
    activations=activations,
    backends=(Backend("Mamba2 scan", backend), short_convolution.BACKEND),
    split=split,
    keeps_documents_apart=True,
    rates=("A_log",),
    # Elsewhere, mamba_ssm's training kernel takes the weight of the output projection as an
    # argument.
    bypassed=("out_proj",),
)
