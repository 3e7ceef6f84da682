"""Softmax attention of rows whose tokens lie on several ranks, in three ways.

- Ring: in round d, rank r sends its keys and values to rank r + d if that sees them, and reads
  those of rank r - d, while it computes those of the round before. In the backward it reads them
  again, and sends their gradients home.
- Gather: all ranks gather the keys and values of all, once in the forward and once in the backward,
  and add up their gradients by a reduce-scatter.
- Ulysses: ranks exchange tokens for heads, so that each has all tokens of some heads.

schedule/context.py has the cut and counts the bytes. Which keys a query sees is decided by places
alone, so the host never waits. Tensors are [B, heads, tokens, H].
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import lcm
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from shardwise.base.schedule.context import TokenSplit, Way, reach_of, way_taken
from shardwise.config import UserError
from shardwise.kernels.attention import Merged, Sight, attend, attend_backward
from shardwise.kernels.recurrence import Tokens
from shardwise.parallel.context_exchange import Alone, Exchange, Gather, Message, Ring, ranges_of

CHANGES_OF_SCORES = ("softcap", "s_aux", "position_bias")
"""Arguments that transformers' attention of some models takes: a cap of scores, sinks, a bias by
place."""


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
        scale: float,
        window: int | None = None,
        documents: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the output [B, N, T/n, H] of this rank's queries on the keys of all ranks.

        q, k, v have this rank's tokens; a query sees the last `window` keys up to its own place,
        of its own document: `documents` [B, T] are those of complete rows, in the order of places.
        """
        rank, chunks = dist.get_rank(self.group), self.cut.chunks_per_rank
        chunk_length = q.shape[2] // chunks
        assert q.shape[2] % chunks == 0
        if self.way == "ulysses":
            assert not self.cut.zigzag
            return _by_heads(q, k, v, Places((), scale, window, documents), self.group)
        places = Places(ranges_of(self.cut.chunks(rank), chunk_length), scale, window, documents)
        reach = reach_of(window, chunk_length)
        exchange: Exchange = Ring(self.group, self.cut, rank, chunk_length, reach)
        if way_taken(self.way, self.cut, reach) == "gather":
            exchange = Gather(self.group, self.cut)
        return _Attention.apply(q, k, v, exchange, places)

    def for_mixer(
        self,
        tokens: Tokens,
        module: torch.nn.Module,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        sliding_window: int | None = None,
        **flags: Any,
    ) -> tuple[torch.Tensor, None]:
        """Return [B, T, N, H], as a function of transformers' registry of attention does.

        With rows that lie on this rank alone, such as those of generation, keys may be more than
        queries, which are the last ones. Places say what a query sees, so a mask is not needed.
        Raises UserError for attention whose scores are changed before the softmax.
        """
        assert mask is None, "what a mask hides is not known here"
        assert dropout == 0.0, "a rule refuses dropout inside attention"
        changes = [name for name in CHANGES_OF_SCORES if flags.get(name) is not None]
        if changes:
            raise UserError(
                f"{type(module).__name__} has {changes[0]}, which attention under parallel.cp "
                "cannot have; set parallel.cp to 1"
            )
        if torch.is_autocast_enabled(q.device.type):
            dtype = torch.get_autocast_dtype(q.device.type)
            q, k, v = (x.to(dtype) for x in (q, k, v))
        scale = q.shape[-1] ** -0.5 if scaling is None else scaling
        if tokens.neighbours is not None:
            out = self(q, k, v, scale, sliding_window, tokens.neighbours.documents)
        else:
            queries = (range(k.shape[2] - q.shape[2], k.shape[2]),)
            places = Places(queries, scale, sliding_window, tokens.documents)
            out = _Attention.apply(q, k, v, Alone(), places)
        return out.transpose(1, 2).contiguous(), None


class Places(NamedTuple):
    """Where this rank's queries lie in their rows, and what they see."""

    queries: tuple[range, ...]
    scale: float
    window: int | None
    documents: torch.Tensor | None

    def blocks(self, keys: tuple[range, ...]) -> Iterator[tuple[slice, slice, Sight]]:
        """Yield some queries and some keys, by their place in a tensor, of which any sees any."""
        for rows, queries in _stretches(self.queries):
            for columns, some_keys in _stretches(keys):
                sight = Sight(self.scale, queries.start - some_keys.start, self.window)
                if sight.sees_none(len(queries), len(some_keys)):
                    continue
                if self.documents is not None:
                    sight = sight._replace(
                        query_documents=self.documents[:, queries.start : queries.stop],
                        key_documents=self.documents[:, some_keys.start : some_keys.stop],
                    )
                yield rows, columns, sight


def _stretches(places: tuple[range, ...]) -> Iterator[tuple[slice, range]]:
    """Yield stretches of a row with where their tokens lie in a tensor that has one by one."""
    start = 0
    for stretch in places:
        yield slice(start, start + len(stretch)), stretch
        start += len(stretch)


class _Attention(torch.autograd.Function):
    """Attention of places. It keeps this rank's q, k, v, output and log-sum-exp over all keys."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        exchange: Exchange,
        places: Places,
    ) -> torch.Tensor:
        merged = Merged.without_keys(q, v)
        for keys in exchange.rounds(k, v):
            for rows, columns, sight in places.blocks(keys.places):
                some_k, some_v = keys.k[:, :, columns], keys.v[:, :, columns]
                attend(q[:, :, rows], some_k, some_v, sight, merged.of(rows))
        ctx.exchange, ctx.places = exchange, places
        out = merged.out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, merged.lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        grad_q, *grad_own = (torch.zeros_like(x, dtype=lse.dtype) for x in (q, k, v))
        arriving: list[Message] = []
        for number, keys in enumerate(ctx.exchange.rounds(k, v)):
            grad_k, grad_v = (torch.zeros_like(x, dtype=lse.dtype) for x in (keys.k, keys.v))
            for rows, columns, sight in ctx.places.blocks(keys.places):
                queries = [x[:, :, rows] for x in (gradients[0], q, out, lse)]
                some = keys.k[:, :, columns], keys.v[:, :, columns]
                parts = grad_q[:, :, rows], grad_k[:, :, columns], grad_v[:, :, columns]
                attend_backward(*queries[:2], *some, *queries[2:], sight, parts)
            grad_k, grad_v = grad_k.to(k.dtype), grad_v.to(v.dtype)
            arriving.append(ctx.exchange.give_back(number, grad_k, grad_v))
            if number:  # the gradients of a round travel during the next one
                _add(grad_own, arriving.pop(0))
        for message in arriving:
            _add(grad_own, message)
        return grad_q.to(q.dtype), grad_own[0].to(k.dtype), grad_own[1].to(v.dtype), None, None


def _add(grad_own: list[torch.Tensor], message: Message) -> None:
    for own, gradient in zip(grad_own, message.wait()):
        own[:, :, message.columns] += gradient


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
    complete_rows = places._replace(queries=(range(complete[0].shape[2]),))
    out = _Attention.apply(*complete, Alone(), complete_rows)
    by_tokens = out.unflatten(2, (n, -1)).permute(2, 0, 1, 3, 4)  # [n, B, N/n, T/n, H]
    return _AllToAll.apply(by_tokens, group).transpose(0, 1).flatten(1, 2)
