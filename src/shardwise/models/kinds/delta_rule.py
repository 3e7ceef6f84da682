"""Parts that all delta rules share: FLOPs, what crosses ranks, what a backward needs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch

from shardwise.kernels.recurrence import Recurrence, Tokens
from shardwise.models.chunks import ChunkFlops, Chunks, CoreFlops, chunks_of
from shardwise.models.kinds.base import Carried, Core
from shardwise.models.moves import WIDE
from shardwise.models.operations import TapedBlock
from shardwise.models.tape import Tensor


@dataclass(frozen=True)
class DeltaRule(Core):
    """A delta rule of N heads, with a state S of K x V (key and value size) per head.

    Model FLOPs, the recurrence on one token: decay S (K V), predict the value S^T k (2 K V), add k
    times its error (2 K V), read S^T q (2 K V): 7 N K V. (Megatron-LM counts 8 N V^2.)

    As run, in chunks of C tokens, of which the last one may be shorter: of each, what the rule at
    hand says. Kernels of other packages chunk in their own way; their count differs.
    """

    num_heads: int
    key_dim: int
    value_dim: int
    chunk_size: int = 64
    num_pairs: ClassVar[int] = 3
    """Products [C, C] of a chunk's forward: pairs of keys, their inverse, and scores."""
    num_pairs_of_map: ClassVar[int] = 2
    """Pairs that the map of a rank's tokens needs: see Recurrence."""
    pads: ClassVar[bool] = False
    """Is the last chunk filled up with tokens that do nothing?"""

    def model_forward(self, sequence_length: int) -> float:
        """See Core."""
        return 7.0 * self.num_heads * self.key_dim * self.value_dim

    def flops(self, num_heads: int) -> CoreFlops:
        """Return the FLOPs of so many heads."""
        forward, backward, map_forward = self.chunk_flops()
        # As many products as a forward has, with the gradient of outputs for values.
        passes = forward, backward, map_forward, forward
        return CoreFlops(*passes, num_heads, self.chunk_size, self.pads)

    def chunk_flops(self) -> tuple[ChunkFlops, ChunkFlops, ChunkFlops]:
        """Return what a forward, a backward and the map of a rank's tokens run for one head.

        In that map the state has K more columns, which begin as the identity.
        """
        raise NotImplementedError

    def products(self, num_tokens: int) -> int:
        """Return the numbers that products of a chunk give: selective checkpointing keeps them.

        Pairs; values, corrections and two parts of the output; what is read of the state, and the
        state after the chunk.
        """
        per_token = self.num_pairs * num_tokens + 4 * self.value_dim + self.key_dim
        return num_tokens * per_token + self.key_dim * self.value_dim

    def products_of_map(self, num_tokens: int) -> int:
        """Return the same for the map of a rank's tokens, whose state has a matrix [K, K] beside
        it.
        """
        columns = self.key_dim + self.value_dim
        per_token = self.num_pairs_of_map * num_tokens + 2 * columns
        return num_tokens * per_token + self.key_dim * columns

    def chunks(self, sequence_length: int) -> Chunks:
        """Return the chunks in which a row is computed."""
        return chunks_of(sequence_length, self.chunk_size, self.pads)


def rule_carries(rule: DeltaRule, num_heads: int, channels: int) -> Carried:
    """Return what any delta rule passes on, with so many heads on a rank."""
    transition = num_heads * rule.key_dim * rule.key_dim
    return Carried(channels, transition, num_heads * rule.key_dim * rule.value_dim)


def parts_of(block: TapedBlock, mixed: Tensor, rule: DeltaRule, num_heads: int) -> list[Tensor]:
    """Return q, k and v, which lie one after the other."""
    values = num_heads * rule.value_dim
    keys = (mixed.numel // block.tokens - values) // 2
    return block.split(mixed, (keys, keys, values))


def rule_outputs(
    block: TapedBlock,
    rule: DeltaRule,
    qkv: Sequence[Tensor],
    g: Tensor,
    beta: Tensor,
    scratch: "tuple[Scratch, Scratch]",
) -> Tensor:
    """Return the outputs of a delta rule.

    It keeps its inputs, and the state before each chunk in 32 bits.
    """
    q, k, v = qkv
    num_heads = beta.numel // block.tokens
    state = block.rows * num_heads * rule.key_dim * rule.value_dim
    chunks = rule.chunks(block.length)
    at_once = 1 if block.on_cpu else max(chunks.num_full, 1)
    size = block.rows * num_heads
    if block.on_cpu:
        forward = chunks.in_forward(partial(scratch[0].bytes_of, rule, size))
        backward = chunks.in_backward(partial(scratch[1].bytes_of, rule, size))
    else:
        forward, backward = (
            part.bytes_of(rule, size * at_once, chunks.longest) for part in scratch
        )
    if block.shares_rows:
        block.tape.products_within(WIDE * size * chunks.sum(rule.products_of_map))
    made = v.num_bytes + WIDE * state
    products = WIDE * size * rule.products(chunks.longest) * at_once
    forward = block.tape.products_within(
        WIDE * size * chunks.sum(rule.products), made, forward, products
    )
    states = block.tape.tensor(chunks.number * state, WIDE)
    out, _ = block.tape.run(
        [q, k, v, g, beta],
        [(v.numel, v.itemsize), (state, WIDE)],
        keeps=[q, k, v, g, beta, states],
        forward=forward,
        backward=backward,
        flops=rule.flops(num_heads),
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

    def bytes_of(self, rule: DeltaRule, num: int, num_tokens: int) -> int:
        """Return the bytes of so many chunks and heads, by the tokens of a chunk."""
        per_token = self.keys * rule.key_dim + self.values * rule.value_dim
        return WIDE * num * num_tokens * (per_token + self.pairs * num_tokens)


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
