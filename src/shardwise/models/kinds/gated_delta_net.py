"""Gated DeltaNet (arXiv 2412.06464): a recurrence that decays its state and corrects what it reads.

Tensor parallelism shards the key heads, with the value heads that go with each. Families pack its
projections in three ways, each of which is a `Kind` here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
from transformers import PretrainedConfig

from shardwise.kernels.gated_delta_rule import RECURRENCE, backend
from shardwise.kernels.recurrence import Recurrence, Tokens
from shardwise.models.kinds import short_convolution
from shardwise.models.kinds.base import Backend, Carried, Core, Kind, Shapes
from shardwise.models.kinds.short_convolution import (
    CAUSAL_CONVOLUTION,
    UNCUT_CONVOLUTION,
    convolved,
)
from shardwise.models.operations import WIDE, Block
from shardwise.models.tape import Tensor
from shardwise.models.tensor_cuts import (
    BlockSplit,
    Cut,
    blocked,
    even,
    evenly,
    linear,
    require_divides,
)

HEADS = "key heads of Gated DeltaNet"
VALUE_HEADS = "value heads of Gated DeltaNet"
RULE_BACKEND = Backend("gated delta rule", backend)


@dataclass(frozen=True)
class DeltaRule(Core):
    """A delta rule of N heads, with a state S of K x V (key and value size) per head.

    Model FLOPs, the recurrence on one token: decay S (K V), predict the value S^T k (2 K V), add k
    times its error (2 K V), read S^T q (2 K V): 7 N K V. (Megatron-LM counts 8 N V^2.)

    Executed, in chunks of C tokens, of which the last one may be shorter: of each, what the rule at
    hand says. Kernels of other packages chunk in their own way; their count differs.
    """

    num_heads: int
    key_dim: int
    value_dim: int
    chunk_size: int = 64
    num_pairs: ClassVar[int] = 3
    """Products [C, C] of a chunk's forward: pairs of keys, their inverse, and scores."""
    num_pairs_of_map: ClassVar[int] = 2
    """Those that the map of a rank's tokens needs: see Recurrence."""

    def model_forward(self, sequence_length: int) -> float:
        """See Core."""
        return 7.0 * self.num_heads * self.key_dim * self.value_dim

    def executed_forward(self, sequence_length: int) -> float:
        """See Core."""
        return self._over_chunks(sequence_length, lambda rule: rule.chunk_forward())

    def executed_backward(self, sequence_length: int) -> float:
        """See Core."""
        return self._over_chunks(sequence_length, lambda rule: rule.chunk_backward())

    def map_forward(self, sequence_length: int) -> float:
        """See Core. The state has K more columns, which begin as the identity."""
        return self._over_chunks(sequence_length, lambda rule: rule.chunk_map())

    def map_backward(self, sequence_length: int) -> float:
        """See Core. As many products as a forward has, with the gradient of outputs for values."""
        return self.executed_forward(sequence_length)

    def chunk_map(self) -> int:
        """Return what the map of a rank's tokens takes for one head and chunk."""
        raise NotImplementedError

    def chunk_forward(self) -> int:
        """Return what a forward runs for one head and chunk."""
        raise NotImplementedError

    def chunk_backward(self) -> int:
        """Return what a backward runs for one head and chunk."""
        raise NotImplementedError

    @property
    def products(self) -> int:
        """The numbers per token that products of a chunk give: selective checkpointing keeps them.

        Pairs; values, corrections and two parts of the output; what is read of the state, and the
        state after the chunk.
        """
        state = self.key_dim * self.value_dim // self.chunk_size
        return self.num_pairs * self.chunk_size + 4 * self.value_dim + self.key_dim + state

    @property
    def products_of_map(self) -> int:
        """The same for the map of a rank's tokens, whose state has a matrix [K, K] beside it."""
        columns = self.key_dim + self.value_dim
        state = self.key_dim * columns // self.chunk_size
        return self.num_pairs_of_map * self.chunk_size + 2 * columns + state

    def _over_chunks(self, sequence_length: int, flops: Callable[[DeltaRule], int]) -> float:
        """Return the FLOPs per token of full chunks and of the rest."""
        num_full, rest = divmod(sequence_length, self.chunk_size)
        of_sequence = num_full * flops(self) + flops(replace(self, chunk_size=rest))
        return self.num_heads * of_sequence / sequence_length


class GatedDeltaNet(DeltaRule):
    """The gated delta rule (arXiv 2412.06464), whose decay is one number per head.

    Executed by `kernels/gated_delta_rule/chunked.py`, per head and chunk. The forward: products k
    k^T and q k^T (2 C^2 K each), the inverse of the system times keys (2 C^2 K) and values (2 C^2
    V), weights times new values (2 C^2 V), the state read by keys and by queries and then updated
    (2 C K V each); and the inverse of a unit-triangular C x C matrix, C (C - 1) per column, which
    torch's FLOP counter counts as 0.

    The backward computes a chunk's forward again, without the output: seven products with the state
    or its gradient, of which one is of the forward; C x C matrices times K columns six times and
    times V columns five times, of which three and one are of the forward; and the inverse again.
    """

    def chunk_forward(self) -> int:
        """See DeltaRule."""
        c, k, v = self.chunk_size, self.key_dim, self.value_dim
        return 6 * c * k * v + 2 * c * c * (3 * k + 2 * v) + self._inverse()

    def chunk_backward(self) -> int:
        """See DeltaRule."""
        c, k, v = self.chunk_size, self.key_dim, self.value_dim
        return 14 * c * k * v + 2 * c * c * (6 * k + 5 * v) + self._inverse()

    def chunk_map(self) -> int:
        """See DeltaRule."""
        c, k, v = self.chunk_size, self.key_dim, self.value_dim
        return 4 * c * k * (k + v) + 2 * c * c * (2 * k + v) + self._inverse()

    def _inverse(self) -> int:
        return self.chunk_size**2 * (self.chunk_size - 1)


def cores(config: PretrainedConfig) -> tuple[GatedDeltaNet]:
    """Return the core by the config."""
    heads, key_dim = config.linear_num_value_heads, config.linear_key_head_dim
    return (GatedDeltaNet(heads, key_dim, config.linear_value_head_dim),)


def carries(config: PretrainedConfig, shapes: Shapes) -> Carried:
    """Return the channels of q, k and v, and a matrix S x S and a state S x V for each head."""
    return rule_carries(cores(config)[0], shapes["A_log"][0], shapes["conv1d.weight"][0])


def rule_carries(rule: DeltaRule, num_heads: int, channels: int) -> Carried:
    """Return what any delta rule passes on, with so many heads on a rank."""
    transition = num_heads * rule.key_dim * rule.key_dim
    return Carried(channels, transition, num_heads * rule.key_dim * rule.value_dim)


def activations(block: Block, x: Tensor) -> Tensor:
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
    out = rule_outputs(block, rule, qkv, g, beta, DELTA_RULE_SCRATCH)
    out = block.gated_norm("norm.weight", out, z)
    return block.linear("out_proj", out)


def _separate(block: Block, x: Tensor) -> Tensor:
    names = ("q_proj", "k_proj", "v_proj", "a_proj", "b_proj", "g_proj")
    *parts, a, b, gate = block.linears(names, x)
    mixed = block.joined(parts)
    del parts
    mixed = convolved(block, mixed)
    beta = block.scaled(block.pointwise(b, keeps_outputs=True))
    g = decay(block, a)
    (rule,) = cores(block.config)
    qkv = parts_of(block, mixed, rule, beta.numel // block.tokens)
    out = rule_outputs(block, rule, qkv, g, beta, DELTA_RULE_SCRATCH)
    return block.linear("o_proj", block.gated_norm("o_norm.weight", out, gate))


def _by_key_head(block: Block, qkvz: Tensor, ba: Tensor) -> list[Tensor]:
    """Return [q, k, v] joined, and z, b and a, each copied out of where its key head lies."""
    channels = block.parameters["conv1d.weight"].shape[0]
    z_size = block.num_out("in_proj_qkvz") - channels
    values, keys = z_size, (channels - z_size) // 2
    q, k, v, z = block.split(qkvz, (keys, keys, values, z_size))
    b, a = (block.copied(part) for part in block.split(ba, (1, 1)))
    z = block.copied(z)
    q, k, v = (block.copied(part) for part in (q, k, v))
    return [block.joined([q, k, v]), z, b, a]


def decay(block: Block, a: Tensor) -> Tensor:
    """Return -e^A softplus(a + bias) of each head and token, in 32 bits."""
    shifted = block.sum(block.as_dtype(a, WIDE), block.weight("dt_bias"))
    rate = block.pointwise(block.as_dtype(block.weight("A_log"), WIDE), keeps_outputs=True)
    return block.product(rate, block.pointwise(shifted, [shifted]))


def parts_of(block: Block, mixed: Tensor, rule: DeltaRule, num_heads: int) -> list[Tensor]:
    """Return q, k and v, which lie one after the other."""
    values = num_heads * rule.value_dim
    keys = (mixed.numel // block.tokens - values) // 2
    return block.split(mixed, (keys, keys, values))


def rule_outputs(
    block: Block,
    rule: DeltaRule,
    qkv: Sequence[Tensor],
    g: Tensor,
    beta: Tensor,
    scratch: tuple[Scratch, Scratch],
) -> Tensor:
    """Return the outputs of a delta rule.

    It keeps its inputs, and the state before each chunk in 32 bits.
    """
    q, k, v = qkv
    num_heads = beta.numel // block.tokens
    state = block.rows * num_heads * rule.key_dim * rule.value_dim
    num_chunks = block.num_chunks(rule.chunk_size)
    at_once = 1 if block.on_cpu else num_chunks
    size = block.rows * num_heads * at_once
    forward, backward = (part.bytes_of(rule, size) for part in scratch)
    products = WIDE * block.rows * num_heads * rule.chunk_size * rule.products
    if block.shares_rows:
        of_map = products // rule.products * rule.products_of_map
        block.tape.products_within(of_map * num_chunks)
    made = v.num_bytes + WIDE * state
    forward = block.tape.products_within(products * num_chunks, made, forward, products * at_once)
    states = block.tape.tensor(num_chunks * state, WIDE)
    out, _ = block.tape.run(
        [q, k, v, g, beta],
        [(v.numel, v.itemsize), (state, WIDE)],
        keeps=[q, k, v, g, beta, states],
        forward=forward,
        backward=backward,
    )
    return out


class Scratch(NamedTuple):
    """How many matrices in 32 bits are alive at once while a chunk of a head is computed."""

    keys: int
    """[C, S]."""
    values: int
    """[C, H]."""
    pairs: int
    """[C, C]."""

    def bytes_of(self, rule: DeltaRule, num: int) -> int:
        """Return the bytes of so many chunks and heads."""
        c = rule.chunk_size
        per_token = self.keys * rule.key_dim + self.values * rule.value_dim + self.pairs * c
        return WIDE * num * c * per_token


DELTA_RULE_SCRATCH = Scratch(9, 4, 5), Scratch(15, 6, 9)
"""In the forward and in the backward."""


def delta_rule(core: Recurrence) -> Callable[..., tuple[torch.Tensor, None]]:
    """Return what mixers call as their rule: it gives no state, as parts train without a cache."""

    def run(
        tokens: Tokens,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        g: torch.Tensor,
        beta: torch.Tensor,
        initial_state: torch.Tensor | None,
        output_final_state: bool,
        **flags: Any,
    ) -> tuple[torch.Tensor, None]:
        assert initial_state is None
        assert not output_final_state
        return tokens.recur(core, q, k, v, g, beta), None

    return run


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
        "conv1d.weight": Cut(0, channels),
        "A_log": Cut(0, per_head),
        "dt_bias": Cut(0, per_head),
    }
    attributes = {
        name: getattr(block, name) // num_ranks
        for name in ("num_k_heads", "num_v_heads", "key_dim", "value_dim", "conv_dim")
        if hasattr(block, name)
    }
    return BlockSplit(weights, attributes | {"conv1d.groups": channels.local_size})


BY_KEY_HEAD = Kind(
    "gated_delta_net",
    before=(("in_proj_qkvz", "in_proj_ba"), ("conv1d", "A_log", "dt_bias")),
    after=(("norm",), ("out_proj",)),
    cores=cores,
    functions={"torch_chunk_gated_delta_rule": delta_rule(RECURRENCE), **CAUSAL_CONVOLUTION},
    carries=carries,
    activations=activations,
    backends=(RULE_BACKEND, short_convolution.BACKEND),
    split=split_by_key_head,
    keeps_documents_apart=True,
    shares_input=("in_proj_qkvz", "in_proj_ba"),
    ends=("out_proj",),
    gating=("in_proj_ba",),
    rates=("A_log",),
)
"""Qwen3-Next's: a head's rows lie together."""
JOINED = replace(
    BY_KEY_HEAD,
    before=(("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"), ("conv1d", "A_log", "dt_bias")),
    split=split_joined,
    shares_input=("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),
    gating=("in_proj_a", "in_proj_b"),
)
"""Qwen3.5's: q, k and v in one projection, one after the other."""
SEPARATE = replace(
    BY_KEY_HEAD,
    before=(
        ("q_proj", "k_proj", "v_proj", "a_proj", "b_proj", "g_proj"),
        ("conv1d", "A_log", "dt_bias"),
    ),
    after=(("o_norm",), ("o_proj",)),
    functions={"torch_chunk_gated_delta_rule": delta_rule(RECURRENCE), **UNCUT_CONVOLUTION},
    split=split_separate,
    shares_input=("q_proj", "k_proj", "v_proj", "a_proj", "b_proj", "g_proj"),
    ends=("o_proj",),
    gating=("a_proj", "b_proj"),
)
"""OLMo-Hybrid's: a projection each."""
