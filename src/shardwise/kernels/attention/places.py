"""Attention of queries at some places of their rows, as a mixer of transformers calls it.

Keys come in rounds, from this rank alone or from others (parallel/context_exchange.py). Which keys
a query sees is decided by places alone, so the host never waits. Tensors are [B, heads, tokens, H].
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch.autograd.function import once_differentiable

from shardwise.config import UserError
from shardwise.kernels.attention.blocks import Merged, attend, attend_backward
from shardwise.kernels.attention.naive import Sight
from shardwise.kernels.recurrence import Tokens

Pair = tuple[torch.Tensor, torch.Tensor]
"""Keys [B, K, T, H] and values, or their gradients."""


class Scores(NamedTuple):
    """How a mixer has its scores, and which a query sees."""

    scale: float
    """Factor of q . k."""
    window: int | None = None
    """Number of keys that a query sees, the last ones up to its own place."""
    cap: float | None = None
    """The cap c of scores: c tanh(s / c) of a score s."""
    sinks: torch.Tensor | None = None
    """[N]: a score of each head beside those of keys, which has no value."""


class Keys(NamedTuple):
    """Keys and values of some stretches of a row."""

    places: tuple[range, ...]
    k: torch.Tensor
    v: torch.Tensor


@dataclass(frozen=True)
class Message:
    """Keys and values, or gradients, that are on their way to this rank."""

    pair: Pair
    """Buffers that they will be in."""
    columns: slice
    """Gradients: the tokens of this rank that they are of."""
    works: tuple[Any, ...] = ()
    """Works of torch.distributed, which go on meanwhile."""
    sent: torch.Tensor | None = None
    """Tensors that leave this rank at the same time, kept until it has left."""

    def wait(self) -> Pair:
        """Return them once they are here."""
        for work in self.works:
            work.wait()
        return self.pair


class Exchange(Protocol):
    """How a rank gets the keys of others, in rounds, and their owners the gradients."""

    def rounds(self, k: torch.Tensor, v: torch.Tensor) -> Iterator[Keys]:
        """Yield keys to compute with, given this rank's own; ranks have equally many rounds."""
        ...

    def give_back(self, number: int, grad_k: torch.Tensor, grad_v: torch.Tensor) -> Message:
        """Send the gradients of a round's keys home; return those of this rank's own keys."""
        ...


class Alone:
    """No other rank has keys."""

    def rounds(self, k: torch.Tensor, v: torch.Tensor) -> Iterator[Keys]:
        """See Exchange: one round."""
        yield Keys((range(k.shape[2]),), k, v)

    def give_back(self, number: int, grad_k: torch.Tensor, grad_v: torch.Tensor) -> Message:
        """See Exchange."""
        return Message((grad_k, grad_v), slice(None))


class Places(NamedTuple):
    """Where this rank's queries lie in their rows, and what they see."""

    queries: tuple[range, ...]
    scores: Scores
    documents: torch.Tensor | None = None
    """[B, T] int64 of complete rows."""

    def blocks(self, keys: tuple[range, ...]) -> Iterator[tuple[slice, slice, Sight]]:
        """Yield some queries and some keys, by their place in a tensor, of which any sees any."""
        scale, window, cap, _ = self.scores
        for rows, queries in _stretches(self.queries):
            for columns, some_keys in _stretches(keys):
                sight = Sight(scale, queries.start - some_keys.start, window, cap=cap)
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


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, exchange: Exchange, places: Places
) -> torch.Tensor:
    """Return the output [B, N, T, H] of queries on the keys of all rounds."""
    return _Attention.apply(q, k, v, places.scores.sinks, exchange, places)


class _Attention(torch.autograd.Function):
    """Attention of places. It keeps this rank's q, k, v, output and log-sum-exp over all keys."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None,
        exchange: Exchange,
        places: Places,
    ) -> torch.Tensor:
        merged = Merged.without_keys(q, v)
        for keys in exchange.rounds(k, v):
            for rows, columns, sight in places.blocks(keys.places):
                some_k, some_v = keys.k[:, :, columns], keys.v[:, :, columns]
                attend(q[:, :, rows], some_k, some_v, sight, merged.of(rows))
        if sinks is not None:  # once, after the keys of all ranks
            merged.add(None, sinks.to(merged.lse.dtype)[:, None])
        ctx.exchange, ctx.places = exchange, places
        out = merged.out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, merged.lse, sinks)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, out, lse, sinks = ctx.saved_tensors
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
        grads = grad_q.to(q.dtype), grad_own[0].to(k.dtype), grad_own[1].to(v.dtype)
        trained = sinks if ctx.needs_input_grad[3] else None
        return *grads, _grad_sinks(gradients[0], out, lse, trained), None, None


def _add(grad_own: list[torch.Tensor], message: Message) -> None:
    for own, gradient in zip(grad_own, message.wait()):
        own[:, :, message.columns].add_(gradient)


def _grad_sinks(
    grad_out: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor | None
) -> torch.Tensor | None:
    """Return the gradient of sinks, whose share of each query's sum is lost to the output."""
    if sinks is None:
        return None
    shares = torch.exp(sinks.to(lse.dtype)[:, None] - lse)
    rows = (grad_out.to(lse.dtype) * out).sum(-1)
    return -(shares * rows).sum((0, 2)).to(sinks.dtype)


def for_mixer(
    tokens: Tokens,
    module: torch.nn.Module,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    over_ranks: Callable[..., torch.Tensor] | None = None,
    **flags: Any,
) -> tuple[torch.Tensor, None]:
    """Return [B, T, N, H], as a function of transformers' registry of attention does.

    With rows that lie on this rank alone, such as those of generation, keys may be more than
    queries, which are the last ones; `over_ranks` computes other rows. Places say what a query
    sees, so a mask is not needed. Raises UserError for a bias by place.
    """
    assert attention_mask is None, "what a mask hides is not known here"
    assert dropout == 0.0, "a rule refuses dropout inside attention"
    if flags.get("position_bias") is not None:
        raise UserError(
            f"{type(module).__name__} has position_bias, which attention under parallel.cp "
            "cannot have; set parallel.cp to 1"
        )
    if torch.is_autocast_enabled(q.device.type):
        dtype = torch.get_autocast_dtype(q.device.type)
        q, k, v = (x.to(dtype) for x in (q, k, v))
    scale = q.shape[-1] ** -0.5 if scaling is None else scaling
    scores = Scores(scale, sliding_window, softcap, s_aux)
    if over_ranks is not None and tokens.neighbours is not None:
        out = over_ranks(q, k, v, scores, tokens.neighbours.documents)
    else:
        queries = (range(k.shape[2] - q.shape[2], k.shape[2]),)
        out = attention(q, k, v, Alone(), Places(queries, scores, tokens.documents))
    return out.transpose(1, 2).contiguous(), None
