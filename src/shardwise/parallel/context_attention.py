"""Softmax attention of rows whose tokens lie on several ranks, in three ways.

- Ring: in round d, rank r sends its keys and values to rank r + d if that sees them, and reads
  those of rank r - d, while it computes those of the round before. In the backward it reads them
  again, and sends their gradients home.
- Gather: all ranks gather the keys and values of all, once in the forward and once in the backward,
  and add up their gradients by a reduce-scatter.
- Ulysses: ranks exchange tokens for heads, so that each has all tokens of some heads.

schedule/context.py has the cut and counts the bytes; kernels/attention/places.py computes. Tensors
are [B, heads, tokens, H].
"""

from dataclasses import dataclass
from math import lcm
from typing import Any

import torch
import torch.distributed as dist

from shardwise.base.schedule.context import TokenSplit, Way, reach_of, way_taken
from shardwise.kernels.attention.places import Alone, Exchange, Places, Scores, attention, for_mixer
from shardwise.parallel.context_exchange import Gather, Ring, ranges_of


@dataclass(frozen=True)
class ContextAttention:
    """Attention of the tokens of a rank on those of all ranks of a group."""

    group: dist.ProcessGroup
    cut: TokenSplit
    way: Way

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scores: Scores,
        documents: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the output [B, N, T/n, H] of this rank's queries on the keys of all ranks.

        q, k, v have this rank's tokens; a query sees the keys of its own document: `documents`
        [B, T] are those of complete rows, in the order of places.
        """
        rank, chunks = dist.get_rank(self.group), self.cut.chunks_per_rank
        chunk_length = q.shape[2] // chunks
        assert q.shape[2] % chunks == 0
        if self.way == "ulysses":
            assert not self.cut.zigzag
            return _by_heads(q, k, v, Places((), scores, documents), self.group)
        places = Places(ranges_of(self.cut.chunks(rank), chunk_length), scores, documents)
        reach = reach_of(scores.window, chunk_length)
        exchange: Exchange = Ring(self.group, self.cut, rank, chunk_length, reach)
        if way_taken(self.way, self.cut, reach) == "gather":
            exchange = Gather(self.group, self.cut)
        return attention(q, k, v, exchange, places)

    def for_mixer(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
        """Return [B, T, N, H], as a function of transformers' registry of attention does."""
        return for_mixer(*args, over_ranks=self, **kwargs)


# ----------------------------------------------------------------------------------------- by heads


class _AllToAll(torch.autograd.Function):
    """Part i [X] of x [n, X] goes to rank i, whose part comes here; gradients go the same way.

    (n-1)/n of the bytes leave each rank.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        received = torch.empty_like(x, memory_format=torch.contiguous_format)
        dist.all_to_all_single(received, x.contiguous(), group=group)
        return received

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _AllToAll.apply(gradients[0], ctx.group), None


def _by_heads(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, places: Places, group: dist.ProcessGroup
) -> torch.Tensor:
    """Return attention of this rank's tokens, each rank computing 1/n of the heads for all tokens.

    With fewer key/value heads than ranks, several ranks get the same one, and its gradients are
    added up by autograd.
    """
    n, num_heads = dist.get_world_size(group), q.shape[1]
    assert num_heads % n == 0
    copies = lcm(k.shape[1], n) // k.shape[1]
    inputs = q, *(x.repeat_interleave(copies, 1) for x in (k, v))
    shares = [x.unflatten(1, (n, -1)).transpose(0, 1) for x in inputs]  # [n, B, N/n, T/n, H]
    received = _AllToAll.apply(torch.cat([x.flatten(1) for x in shares], 1), group)
    parts = received.split([x[0].numel() for x in shares], 1)
    complete = [
        part.view(x.shape).permute(1, 2, 0, 3, 4).flatten(2, 3) for part, x in zip(parts, shares)
    ]
    scores = places.scores
    if scores.sinks is not None:  # those of this rank's heads; other ranks have other gradients
        scores = scores._replace(sinks=scores.sinks.chunk(n)[dist.get_rank(group)])
    complete_rows = Places((range(complete[0].shape[2]),), scores, places.documents)
    out = attention(*complete, Alone(), complete_rows)
    by_tokens = out.unflatten(2, (n, -1)).permute(2, 0, 1, 3, 4)  # [n, B, N/n, T/n, H]
    return _AllToAll.apply(by_tokens, group).transpose(0, 1).flatten(1, 2)
