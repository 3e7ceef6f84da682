"""Rows that go to the ranks of their experts: any routing, beside all experts on one process."""

from __future__ import annotations

import random

import pytest
import torch
import torch.distributed as dist

from shardwise.kernels.grouped_linear.naive import grouped_linear
from shardwise.parallel import expert_axis
from shardwise.parallel.expert_axis import ExpertAxis
from tests.distributed import run_ranks

RANKS, EXPERTS, WIDTH = 4, 8, 3
Routing = list[list[int]]
"""The experts of the rows of each rank."""
NAMED: dict[str, Routing] = {
    "every rank to the next one": [[2, 3], [4, 5, 5], [6], [0, 1]],
    "one token of all": [[], [], [5], []],
    "all tokens for one expert": [[7] * 5, [7], [7] * 3, [7]],
    "a rank without tokens": [[0, 1], [], [1, 1], [0]],
    "only their own": [[0, 1], [2, 2], [4], [6, 7]],
    "none at all": [[], [], [], []],
}


def drawn(seed: int) -> Routing:
    """Some tokens on each rank, of which most like the same experts."""
    numbers = random.Random(seed)
    liked = [numbers.random() ** 4 for _ in range(EXPERTS)]
    return [
        sorted(numbers.choices(range(EXPERTS), liked, k=numbers.randrange(9))) for _ in range(RANKS)
    ]


def test_any_routing_equals_one_process():
    routings = [*NAMED.values(), *map(drawn, range(40))]
    for rank, outcomes in enumerate(run_ranks(RANKS, _outcomes, routings)):
        for routing, (y, dx, dw, num_calls) in zip(routings, outcomes, strict=True):
            expected_y, expected_dx, expected_dw = expected(routing)
            first, last = (sum(map(len, routing[:n])) for n in (rank, rank + 1))
            experts = slice(rank * EXPERTS // RANKS, (rank + 1) * EXPERTS // RANKS)
            torch.testing.assert_close(y, expected_y[first:last])
            torch.testing.assert_close(dx, expected_dx[first:last])
            torch.testing.assert_close(dw, expected_dw[experts])
            assert num_calls == 5


def weights() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(EXPERTS, WIDTH, WIDTH, dtype=torch.float64, generator=generator)


def rows_of(rank: int, num_rows: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1 + rank)
    return torch.randn(num_rows, WIDTH, dtype=torch.float64, generator=generator)


def ends_of(experts: list[int], num_experts: int) -> torch.Tensor:
    numbers = torch.arange(num_experts)
    return torch.searchsorted(torch.tensor(experts).long(), numbers, right=True, out_int32=True)


def expected(routing: Routing) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Output, gradient of the rows and of the weights, of all ranks' rows on one process."""
    x = torch.cat([rows_of(rank, len(experts)) for rank, experts in enumerate(routing)])
    experts = torch.tensor([e for experts in routing for e in experts], dtype=torch.long)
    x, w = x.requires_grad_(), weights().requires_grad_()
    y = torch.einsum("si,soi->so", x, w[experts]).tanh()
    dx, dw = torch.autograd.grad(y.square().sum(), (x, w))
    return y.detach(), dx, dw


def _outcomes(routings: list[Routing]) -> list[tuple]:
    rank, calls = dist.get_rank(), []
    exchange = dist.all_to_all_single

    def counted(*args, **kwargs):
        calls.append(args)
        return exchange(*args, **kwargs)

    dist.all_to_all_single = counted
    axis, outcomes = ExpertAxis(dist.group.WORLD), []
    share = weights().chunk(RANKS)[rank]
    for routing in routings:
        calls.clear()
        x, w = rows_of(rank, len(routing[rank])).requires_grad_(), share.clone().requires_grad_()
        y = axis.compute(
            lambda rows, ends, w=w: grouped_linear(rows, w, ends).tanh(),
            x,
            ends_of(routing[rank], EXPERTS),
        )
        dx, dw = torch.autograd.grad(y.square().sum(), (x, w))
        outcomes.append((y.detach(), dx, dw, len(calls)))
    return outcomes


def grouped(rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    weight = torch.ones(EXPERTS, 16, 8, dtype=torch.bfloat16, requires_grad=True)
    return torch._grouped_mm(rows, weight.mT, offs=ends)


def test_no_rows_are_a_row_of_zeros():
    # torch's grouped product has no backward for none.
    rows = torch.zeros(0, 8, dtype=torch.bfloat16, requires_grad=True)
    ends = torch.zeros(EXPERTS, dtype=torch.int32)
    y = expert_axis._of_some_rows(grouped, rows, ends)
    assert y.shape == (0, 16)
    assert torch.autograd.grad(y.sum(), rows)[0].shape == rows.shape
    with pytest.raises(RuntimeError, match="strides"):
        torch.autograd.grad(grouped(rows, ends).sum(), rows)
