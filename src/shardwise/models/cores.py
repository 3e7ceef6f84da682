"""FLOPs of what mixes the tokens of a sequence, one core for each kind of layer: pure arithmetic on sizes.

A core gives two numbers. Its *model* FLOPs are what the layer's definition asks for, whatever computes it; its
*executed* FLOPs are what transformers' torch code runs (fused attention; recurrences in chunks, padded to full ones, or
token by token). Conventions are those of `models/counts.py`: a multiply-add is 2, and only products count.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from transformers import PretrainedConfig


class Core(Protocol):
    """What mixes the tokens of a sequence in one layer, by the sequence length T. Units: FLOPs per token."""

    def model_forward(self, sequence_length: int) -> float:
        """What the definition asks of a forward; a backward is twice that."""
        ...

    def executed_forward(self, sequence_length: int) -> float:
        """What a forward runs."""
        ...

    def executed_backward(self, sequence_length: int) -> float:
        """What a backward runs, the forward's recomputation by a checkpoint left out."""
        ...


@dataclass(frozen=True)
class Attention:
    """Causal softmax attention of N query heads, with queries and keys of size K and values of size V.

    Token t meets t keys, (T + 1) / 2 on average; a query-key pair costs 2 K for its score and 2 V for its value, so a
    forward is N (K + V) (T + 1) per token: half of what counters that ignore causality give. Grouped key/value heads
    save memory, not products, nor do latent ones (DeepSeek-V2, arXiv 2405.04434), which training expands. Fused (flash)
    kernels skip the masked half, and in the backward they compute the scores again: five products (scores, dQ and dK of
    K, dP and dV of V) for the forward's two.
    """

    num_heads: int
    key_dim: int
    value_dim: int

    def model_forward(self, sequence_length: int) -> float:
        """See Core."""
        return float(self.num_heads * (self.key_dim + self.value_dim) * (sequence_length + 1))

    def executed_forward(self, sequence_length: int) -> float:
        """See Core."""
        return self.model_forward(sequence_length)

    def executed_backward(self, sequence_length: int) -> float:
        """See Core."""
        return float(self.num_heads * (3 * self.key_dim + 2 * self.value_dim) * (sequence_length + 1))


@dataclass(frozen=True)
class SlidingAttention:
    """Attention of which a token meets the last W keys only, itself among them.

    On average over T tokens it meets W - W (W - 1) / 2T of them (W at most T), at 4 N H each. transformers hands fused
    attention that band as a mask, which it applies to all T x T pairs.
    """

    num_heads: int
    head_dim: int
    window: int

    def model_forward(self, sequence_length: int) -> float:
        """See Core."""
        window = min(self.window, sequence_length)
        keys = window - window * (window - 1) / (2 * sequence_length)
        return 4.0 * self.num_heads * self.head_dim * keys

    def executed_forward(self, sequence_length: int) -> float:
        """See Core."""
        return 4.0 * self.num_heads * self.head_dim * sequence_length

    def executed_backward(self, sequence_length: int) -> float:
        """See Core."""
        return 2.5 * self.executed_forward(sequence_length)


@dataclass(frozen=True)
class GatedDeltaNet:
    """The gated delta rule (arXiv 2412.06464) of N value heads, with a state S of K x V (key and value size) per head.

    Model FLOPs, the recurrence on one token: decay S (K V), predict the value S^T k (2 K V), add k times its error
    (2 K V), read S^T q (2 K V): 7 N K V. (Megatron-LM counts 8 N V^2.)

    Executed, per head and chunk of C tokens: products k k^T and q k^T (2 C^2 K each), weights times new values (2 C^2
    V), the state read by keys and by queries and then updated (2 C K V each); and two unit-triangular solves of a C x
    C system with K and with V columns, C (C - 1) per column, which torch's FLOP counter counts as 0. The backward has
    two products for each of those, less what has no gradient: the first chunk reads a constant state (2 C K V saved
    twice) and the last one's updated state is dropped (4 C K V). A solve's backward is the transposed solve and one
    full product, 2 C^2 per column. Kernels of other packages chunk in their own way; their count differs.
    """

    num_heads: int
    key_dim: int
    value_dim: int
    chunk_size: int = 64

    def model_forward(self, sequence_length: int) -> float:
        """See Core."""
        return 7.0 * self.num_heads * self.key_dim * self.value_dim

    def executed_forward(self, sequence_length: int) -> float:
        """See Core."""
        return self._per_token(sequence_length, self._products() + self._solves())

    def executed_backward(self, sequence_length: int) -> float:
        """See Core."""
        columns = self.key_dim + self.value_dim
        per_chunk = 2 * self._products() + self._solves() + 2 * self.chunk_size**2 * columns
        return self._per_token(sequence_length, per_chunk, -8 * self.chunk_size * self.key_dim * self.value_dim)

    def _products(self) -> int:
        c, k, v = self.chunk_size, self.key_dim, self.value_dim
        return 2 * c * c * (2 * k + v) + 6 * c * k * v

    def _solves(self) -> int:
        return self.chunk_size * (self.chunk_size - 1) * (self.key_dim + self.value_dim)

    def _per_token(self, sequence_length: int, per_chunk: int, per_sequence: int = 0) -> float:
        chunks = -(-sequence_length // self.chunk_size)
        return self.num_heads * (chunks * per_chunk + per_sequence) / sequence_length


@dataclass(frozen=True)
class DynamicConvolution:
    """A convolution of C channels whose kernel of W taps is an activation: another one for each token and channel.

    A tap is a multiply-add, so a forward is 2 W C; a backward has as much for the values and as much for the kernels.
    All of it is elementwise, so that torch's FLOP counter counts 0. (What generates the kernels are linears.)
    """

    num_channels: int
    width: int

    def model_forward(self, sequence_length: int) -> float:
        """See Core."""
        return 2.0 * self.num_channels * self.width

    def executed_forward(self, sequence_length: int) -> float:
        """See Core."""
        return self.model_forward(sequence_length)

    def executed_backward(self, sequence_length: int) -> float:
        """See Core."""
        return 2.0 * self.model_forward(sequence_length)


@dataclass(frozen=True)
class KimiDeltaAttention:
    """The delta rule with a decay per channel (Kimi Linear, arXiv 2510.26692): N heads, with a state of H x H per head.

    Model FLOPs, the recurrence on one token: as in Gated DeltaNet, whose decay is one number per head, 7 N H^2.

    Executed, per head and chunk of C tokens. As matrix products: the inverted system times values and keys, and weights
    times new values (2 C^2 H each); the state read by keys and by queries and then updated (2 C H^2 each). Written out
    with elements, as the decay lies inside the sums, so that torch's FLOP counter counts 0: k k^T and q k^T (2 C^2 H
    each) and the inversion row by row (2 i^2 for row i: C (C - 1) (2 C - 1) / 3). The backward has two products for
    each, less what has no gradient: as in Gated DeltaNet, 8 C H^2 per sequence.
    """

    num_heads: int
    head_dim: int
    chunk_size: int = 64

    def model_forward(self, sequence_length: int) -> float:
        """See Core."""
        return 7.0 * self.num_heads * self.head_dim**2

    def executed_forward(self, sequence_length: int) -> float:
        """See Core."""
        return self._per_token(sequence_length, self._per_chunk())

    def executed_backward(self, sequence_length: int) -> float:
        """See Core."""
        return self._per_token(sequence_length, 2 * self._per_chunk(), -8 * self.chunk_size * self.head_dim**2)

    def _per_chunk(self) -> int:
        c, h = self.chunk_size, self.head_dim
        return 10 * c * c * h + 6 * c * h * h + c * (c - 1) * (2 * c - 1) // 3

    def _per_token(self, sequence_length: int, per_chunk: int, per_sequence: int = 0) -> float:
        chunks = -(-sequence_length // self.chunk_size)
        return self.num_heads * (chunks * per_chunk + per_sequence) / sequence_length


@dataclass(frozen=True)
class Mamba:
    """The selective scan of Mamba (arXiv 2312.00752): C channels, each with a state of S.

    Model FLOPs, the recurrence on one token: decay the state (C S), add x B^T (2 C S), read with C (2 C S): 5 C S, as
    for Mamba2. Executed: the same, token by token; the read alone is a matrix product.
    """

    num_channels: int
    state_size: int

    def model_forward(self, sequence_length: int) -> float:
        """See Core."""
        return 5.0 * self.num_channels * self.state_size

    def executed_forward(self, sequence_length: int) -> float:
        """See Core."""
        return self.model_forward(sequence_length)

    def executed_backward(self, sequence_length: int) -> float:
        """See Core."""
        return 2.0 * self.model_forward(sequence_length)


@dataclass(frozen=True)
class Mamba2:
    """The state-space scan of Mamba2 (arXiv 2405.21060): N heads of size P, with a state of P x S per head.

    Model FLOPs, the recurrence on one token: decay the state (P S), add x B^T (2 P S), read with C (2 P S): 5 N P S.
    (Megatron-LM counts 7, the discretisation included.)

    Executed, per head and chunk of Q tokens: scores C B^T (2 Q^2 S), scores times x (2 Q^2 P), the chunk's state and
    the read of the state before it (2 Q P S each); then, over the n chunks of a sequence, all states passed on at
    once by one (n + 1) x (n + 1) product, 2 (n + 1)^2 P S. Twice that in the backward.
    """

    num_heads: int
    head_dim: int
    state_size: int
    chunk_size: int

    def model_forward(self, sequence_length: int) -> float:
        """See Core."""
        return 5.0 * self.num_heads * self.head_dim * self.state_size

    def executed_forward(self, sequence_length: int) -> float:
        """See Core."""
        q, p, s = self.chunk_size, self.head_dim, self.state_size
        chunks = -(-sequence_length // q)
        per_chunk = 2 * q * q * (p + s) + 4 * q * p * s
        return self.num_heads * (chunks * per_chunk + 2 * (chunks + 1) ** 2 * p * s) / sequence_length

    def executed_backward(self, sequence_length: int) -> float:
        """See Core."""
        return 2.0 * self.executed_forward(sequence_length)


@dataclass(frozen=True)
class Both:
    """Two cores in one layer: side by side on the same input, or one after the other."""

    one: Core
    other: Core

    def model_forward(self, sequence_length: int) -> float:
        """See Core."""
        return self.one.model_forward(sequence_length) + self.other.model_forward(sequence_length)

    def executed_forward(self, sequence_length: int) -> float:
        """See Core."""
        return self.one.executed_forward(sequence_length) + self.other.executed_forward(sequence_length)

    def executed_backward(self, sequence_length: int) -> float:
        """See Core."""
        return self.one.executed_backward(sequence_length) + self.other.executed_backward(sequence_length)


def core_of(kind: str, config: PretrainedConfig) -> Core | None:
    """The core of a layer of this kind; None where tokens do not meet."""
    return _CORES[kind](config)


def _attention(config: PretrainedConfig) -> Attention:
    heads = config.num_attention_heads
    if hasattr(config, "kv_lora_rank"):  # latent attention; `head_dim` is the rotary part of its keys
        return Attention(heads, config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim)
    return Attention(heads, _head_dim(config), _head_dim(config))


def _gated_delta_net(config: PretrainedConfig) -> GatedDeltaNet:
    return GatedDeltaNet(config.linear_num_value_heads, config.linear_key_head_dim, config.linear_value_head_dim)


def _jet_block(config: PretrainedConfig) -> Both:
    rule = _gated_delta_net(config)
    return Both(DynamicConvolution(rule.num_heads * rule.value_dim, config.jet["conv_size"]), rule)


def _mamba2(config: PretrainedConfig) -> Mamba2:
    if hasattr(config, "mamba_n_heads"):
        return Mamba2(config.mamba_n_heads, config.mamba_d_head, config.mamba_d_state, config.mamba_chunk_size)
    return Mamba2(config.mamba_num_heads, config.mamba_head_dim, config.ssm_state_size, config.chunk_size)


# By the attribute names of the transformers configs of the proven families.
_CORES = {
    "full_attention": _attention,
    "sliding_attention": lambda c: SlidingAttention(c.num_attention_heads, _head_dim(c), c.sliding_window),
    "gated_delta_net": _gated_delta_net,
    "jet_block": _jet_block,
    "kda": lambda c: KimiDeltaAttention(c.linear_num_heads, c.linear_head_dim),
    "mamba": lambda c: Mamba(c.mamba_expand * c.hidden_size, c.mamba_d_state),
    "mamba2": _mamba2,
    "attention_and_mamba2": lambda c: Both(_attention(c), _mamba2(c)),
    "short_convolution": lambda c: None,  # its convolution is a weight like any other
    "mlp": lambda c: None,
    "moe": lambda c: None,
}


def _head_dim(config: PretrainedConfig) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
