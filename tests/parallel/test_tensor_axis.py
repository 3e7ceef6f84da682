"""Each move along the tensor axis and its backward, against autograd over all ranks' tensors in one
process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from shardwise.config import Data, Model, Parallel, RunConfig, Training
from shardwise.parallel.mesh import build_mesh
from shardwise.parallel.tensor_axis import TensorAxis
from tests.distributed import run_ranks

B, T, D = 2, 6, 3
Tensors = list[torch.Tensor]


@dataclass(frozen=True)
class Case:
    """A move, what it computes from all ranks' inputs, and what the ranks have in common."""

    move: str
    sequence_parallel: bool
    formula: Callable[[Tensors], Tensors]
    same_input: bool  # one tensor, which every rank has: so has each the whole gradient of it
    same_output: (
        bool  # all do the same with it: it is used once, and each rank has the whole gradient of it
    )
    input_tokens: str = "all"  # or "share"

    @property
    def id(self) -> str:
        return self.move + "-sp" * self.sequence_parallel


def copied(xs: Tensors) -> Tensors:
    return xs


def summed(xs: Tensors) -> Tensors:
    return [torch.stack(xs).sum(0)] * len(xs)


def shared_out(xs: Tensors) -> Tensors:
    return [x.chunk(len(xs), 1)[rank] for rank, x in enumerate(xs)]


def joined(xs: Tensors) -> Tensors:
    return [torch.cat(xs, 1)] * len(xs)


CASES = (
    Case("enter", False, copied, same_input=True, same_output=False),
    Case("leave", False, summed, same_input=False, same_output=True),
    Case("sum_up", False, summed, same_input=False, same_output=True),
    Case("sum_within", False, summed, same_input=False, same_output=False),
    Case("share_tokens", False, copied, same_input=True, same_output=True),
    Case("gather_tokens", False, copied, same_input=True, same_output=True),
    Case("enter", True, joined, same_input=False, same_output=False, input_tokens="share"),
    Case("leave", True, lambda xs: shared_out(summed(xs)), same_input=False, same_output=False),
    Case("sum_up", True, summed, same_input=False, same_output=True),
    Case("sum_within", True, summed, same_input=False, same_output=False),
    Case("share_tokens", True, shared_out, same_input=True, same_output=False),
    Case("gather_tokens", True, joined, same_input=False, same_output=True, input_tokens="share"),
)


def drawn(shape: torch.Size | tuple[int, ...], seed: int) -> torch.Tensor:
    """Whole numbers, of which sums are exact in any order; not contiguous."""
    turned = (shape[0], *reversed(shape[1:]))
    return (
        torch.randint(-99, 100, turned, generator=torch.Generator().manual_seed(seed))
        .double()
        .transpose(1, 2)
    )


def inputs_of(case: Case, num_ranks: int) -> Tensors:
    shape = (B, T if case.input_tokens == "all" else T // num_ranks, D)
    if case.same_input:
        return [drawn(shape, 0).requires_grad_()] * num_ranks
    return [drawn(shape, rank).requires_grad_() for rank in range(num_ranks)]


def weights_of(case: Case, outputs: Tensors) -> Tensors:
    """What each rank's output is multiplied by in the loss."""
    return [
        drawn(y.shape, 100 if case.same_output else 100 + rank) for rank, y in enumerate(outputs)
    ]


def in_one_process(case: Case, num_ranks: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """By rank, the output and the gradient of the input."""
    xs = inputs_of(case, num_ranks)
    ys = case.formula(xs)
    uses = list(zip(ys, weights_of(case, ys)))[: 1 if case.same_output else None]
    grads = torch.autograd.grad(
        torch.stack([(y * w).sum() for y, w in uses]).sum(), xs[:1] if case.same_input else xs
    )
    return list(
        zip((y.detach() for y in ys), grads * (num_ranks if case.same_input else 1), strict=True)
    )


def axis_of_this_rank(num_ranks: int, sequence_parallel: bool) -> TensorAxis:
    cfg = RunConfig(
        Model("unused"), Data("unused"), Training("unused"), parallel=Parallel(tp=num_ranks)
    )
    return TensorAxis.of(build_mesh(cfg, torch.device("cpu")), sequence_parallel)


def on_one_rank(num_ranks: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    found = []
    for case in CASES:
        axis = axis_of_this_rank(num_ranks, case.sequence_parallel)
        xs = inputs_of(case, num_ranks)
        x, before = xs[axis.rank], xs[axis.rank].detach().clone()
        y = getattr(axis, case.move)(x)
        weight = weights_of(case, [y] * num_ranks)[axis.rank]
        (grad,) = torch.autograd.grad((y * weight).sum(), x)
        assert torch.equal(x, before), "the input was changed"
        found.append((y.detach(), grad))
    return found


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_moves_and_their_backwards(num_ranks):
    ranks = run_ranks(num_ranks, on_one_rank, num_ranks)
    for place, case in enumerate(CASES):
        for rank, (y, grad) in enumerate(in_one_process(case, num_ranks)):
            found_y, found_grad = ranks[rank][place]
            assert torch.equal(found_y, y), (case.id, rank)
            assert torch.equal(found_grad, grad), (case.id, rank)


def one_token_of_each(num_ranks: int) -> tuple[torch.Tensor, bool, bool]:
    axis = axis_of_this_rank(num_ranks, sequence_parallel=True)
    joined = axis.gather_tokens(drawn((B, 1, D), axis.rank).requires_grad_())
    return joined.detach(), joined.is_contiguous(), joined._is_view()


def test_a_token_of_each_rank_is_joined_in_memory_of_its_own():
    """A pipeline sends it, which a tensor with gaps cannot be, and fsdp2 does not like a layer to
    return a view."""
    expected = torch.cat([drawn((B, 1, D), rank) for rank in range(2)], 1)
    for joined, is_contiguous, is_view in run_ranks(2, one_token_of_each, 2):
        assert torch.equal(joined, expected)
        assert (is_contiguous, is_view) == (True, False)


def through_a_block(
    num_ranks: int, sequence_parallel: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x + up down of an MLP whose hidden features are sharded: output, and the gradients of x and
    of up's share."""
    axis = axis_of_this_rank(num_ranks, sequence_parallel)
    x, up, down = (t.requires_grad_() for t in mlp_tensors())
    rows = slice(axis.rank * 2, axis.rank * 2 + 2)
    residual = axis.share_tokens(x)
    y = residual + axis.leave((axis.enter(residual) @ up[rows].T).relu() @ down[:, rows].T)
    y = axis.gather_tokens(y)
    grads = torch.autograd.grad(y.square().sum(), (x, up))
    return y.detach(), grads[0], grads[1][rows]


def mlp_tensors() -> Tensors:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(s, generator=generator, dtype=torch.float64)
        for s in ((B, T, D), (6, D), (D, 6))
    ]


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_block_between_enter_and_leave_equals_the_whole_block(sequence_parallel):
    x, up, down = (t.requires_grad_() for t in mlp_tensors())
    y = x + (x @ up.T).relu() @ down.T
    dx, dup = torch.autograd.grad(y.square().sum(), (x, up))
    for rank, (found_y, found_dx, found_dup) in enumerate(
        run_ranks(3, through_a_block, 3, sequence_parallel)
    ):
        torch.testing.assert_close(found_y, y)
        torch.testing.assert_close(found_dx, dx)
        torch.testing.assert_close(found_dup, dup[2 * rank : 2 * rank + 2])


def without_gradients(num_ranks: int) -> list[torch.Tensor]:
    axis = axis_of_this_rank(num_ranks, sequence_parallel=True)
    x = drawn((B, T, D), axis.rank)
    with torch.no_grad():
        moved = [
            getattr(axis, move)(x) for move in ("enter", "leave", "share_tokens", "gather_tokens")
        ]
    return [*moved, axis.largest(x)]


def test_an_evaluation_does_not_share_tokens():
    """So a row of any length can be evaluated or continued. And the largest of all ranks, which has
    no backward."""
    xs = [drawn((B, T, D), rank) for rank in range(3)]
    for x, (entered, left, shared, gathered, largest) in zip(
        xs, run_ranks(3, without_gradients, 3), strict=True
    ):
        assert all(torch.equal(same, x) for same in (entered, shared, gathered))
        assert torch.equal(left, xs[0] + xs[1] + xs[2])
        assert torch.equal(largest, torch.stack(xs).amax(0))
