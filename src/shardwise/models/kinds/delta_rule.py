"""Parts that all delta rules share: FLOPs, what crosses ranks, what a backward needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch

from shardwise.kernels.recurrence import Recurrence, Tokens
from shardwise.models.kinds.base import Carried, Core
from shardwise.models.operations import WIDE, Block
from shardwise.models.tape import Tensor


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


def rule_carries(rule: DeltaRule, num_heads: int, channels: int) -> Carried:
    """Return what any delta rule passes on, with so many heads on a rank."""
    transition = num_heads * rule.key_dim * rule.key_dim
    return Carried(channels, transition, num_heads * rule.key_dim * rule.value_dim)


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
