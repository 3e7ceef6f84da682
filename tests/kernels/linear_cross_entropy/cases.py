"""Random inputs of the loss, and what comes of them: for each way that it is computed."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from shardwise.kernels.linear_cross_entropy import Vocabulary, chunked

IGNORED = -100


def inputs(
    n: int,
    d: int,
    v: int,
    ignored: float = 0.3,
    dtype: torch.dtype = torch.float64,
    frozen: bool = False,
):
    """Return hidden [n, d], weight [v, d], bias [v] and labels [n], a share of them IGNORED."""
    generator = torch.Generator().manual_seed(n + v)
    hidden, weight, bias = (
        torch.randn(s, generator=generator, dtype=torch.float64) for s in ((n, d), (v, d), (v,))
    )
    labels = torch.randint(0, v, (n,), generator=generator)
    labels[torch.rand(n, generator=generator) < ignored] = IGNORED
    tensors = [(t * d**-0.25).to(dtype) for t in (hidden, weight, bias)]  # logits of size 1
    return [t.requires_grad_(i == 0 or not frozen) for i, t in enumerate(tensors)], labels


def run(loss, tensors, labels, with_bias: bool = True, **options):
    """The loss, and the gradients of the tensors that have one."""
    hidden, weight, bias = tensors
    value = loss(hidden, weight, labels, bias=bias if with_bias else None, **options)
    wanted = [t for t in (hidden, weight, *([bias] if with_bias else [])) if t.requires_grad]
    return value.detach(), torch.autograd.grad(value * 0.7, wanted)


def reduced(x: torch.Tensor, operation: dist.ReduceOp.RedOpType) -> torch.Tensor:
    x = x.clone()
    dist.all_reduce(x, operation)
    return x


def own_vocabulary(size: int) -> tuple[Vocabulary, slice]:
    """What this rank has of `size` tokens."""
    most = -(-size // dist.get_world_size())
    first = dist.get_rank() * most
    vocabulary = Vocabulary(
        first,
        most,
        lambda x: reduced(x, dist.ReduceOp.SUM),
        lambda x: reduced(x, dist.ReduceOp.MAX),
    )
    return vocabulary, slice(first, min(first + most, size))


def run_shared(
    tensors: list[torch.Tensor], labels: torch.Tensor, **options: Any
) -> tuple[torch.Tensor, list[Any]]:
    """Return the loss and the full gradients: hidden's partial sums added up, rows joined."""
    vocabulary, rows = own_vocabulary(len(tensors[1]))
    hidden, weight, bias = (
        t.detach() if i == 0 else t.detach()[rows].clone() for i, t in enumerate(tensors)
    )
    local = [
        t.requires_grad_(whole.requires_grad) for t, whole in zip((hidden, weight, bias), tensors)
    ]
    value, (partial_sum, *shares) = run(
        chunked.linear_cross_entropy, local, labels, vocabulary=vocabulary, **options
    )
    joined: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(joined, shares)
    assert partial_sum[labels == IGNORED].eq(0).all()
    return value, [
        reduced(partial_sum, dist.ReduceOp.SUM),
        *(torch.cat(pieces) for pieces in zip(*joined)),
    ]
