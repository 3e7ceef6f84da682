"""Experts' linears equal a loop that autograd differentiates, and keep their inputs alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.kernels.backward_half import BackwardHalf
from shardwise.kernels.grouped_linear import (
    StackedAdapter,
    fused,
    grouped,
    grouped_linear,
    loop,
    naive,
    takes,
)
from shardwise.kernels.grouped_linear.gradients import Needs
from tests.kernels.gates import error, kept_elements, run
from tests.kernels.lora_linear.cases import worst

IN, OUT, RANK, SCALE = 12, 8, 4, 0.5
UNEVEN = (0, 5, 0, 1, 7, 0)
"""Rows of each expert; the first, the last and one between have none."""
ALL_NEEDED = Needs(True, True, True)


def ends_of(counts: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor(counts).cumsum(0).int()


def inputs(
    counts: tuple[int, ...] = UNEVEN,
    sizes: tuple[int, int, int] = (IN, OUT, RANK),
    dtype: torch.dtype = torch.float64,
    transposed: bool = False,
) -> list[torch.Tensor]:
    """x, a stack of weights, and factors that are views as PEFT's are; all need a gradient."""
    num_in, num_out, rank = sizes
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    experts = len(counts)
    weight = draw(experts, num_in, num_out).mT if transposed else draw(experts, num_out, num_in)
    a = draw(experts * rank, num_in).unflatten(0, (experts, rank))
    b = draw(num_out, rank * experts).unflatten(1, (rank, experts)).permute(2, 0, 1)
    return [tensor.requires_grad_() for tensor in (draw(sum(counts), num_in), weight, a, b)]


def with_factors(kernel: Callable[..., torch.Tensor], counts: tuple[int, ...]) -> Any:
    """The kernel as a function of x, W, A and B, or of x and W."""

    def linear(x: torch.Tensor, weight: torch.Tensor, *factors: torch.Tensor) -> torch.Tensor:
        return kernel(
            x, weight, ends_of(counts), StackedAdapter(*factors, SCALE) if factors else None
        )

    return linear


def difference(counts: tuple[int, ...], tensors: list[torch.Tensor]) -> float:
    return error(
        with_factors(grouped_linear, counts), with_factors(naive.grouped_linear, counts), tensors
    )


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=6).filter(any).map(tuple),
    st.tuples(*[st.integers(1, 6)] * 3),
)
def test_any_counts_and_widths_equal_the_naive_ones(counts, sizes):
    assert difference(counts, inputs(counts, sizes)) < 1e-13


@pytest.mark.parametrize("counts", [UNEVEN, (13, 0, 0), (0, 0, 13), (0, 1, 0)])
@pytest.mark.parametrize("transposed", [False, True])
def test_stacks_alone_and_stacks_in_other_strides(counts, transposed):
    tensors = inputs(counts, transposed=transposed)
    assert difference(counts, tensors) < 1e-13
    assert difference(counts, tensors[:2]) < 1e-13


def test_no_rows_give_no_outputs_and_gradients_of_zero():
    out, grad_x, *others = run(with_factors(grouped_linear, (0, 0)), inputs((0, 0)))
    assert (out.shape, grad_x.shape) == ((0, OUT), (0, IN))
    assert all(not gradient.any() for gradient in others)


def test_ends_that_leave_rows_over_are_a_mistake_of_the_caller():
    with pytest.raises(AssertionError, match="13 rows, of which experts have 12"):
        grouped_linear(*inputs()[:2], ends_of((12, 0, 0, 0, 0, 0)))


@pytest.mark.parametrize("needed", [(0,), (1,), (2, 3), (0, 2, 3), (0, 1)])
def test_only_needed_gradients_are_computed(needed, monkeypatch):
    asked = []

    def noting(*args: Any) -> Any:
        asked.append(args[-1])
        return backward(*args)

    backward = loop.backward
    monkeypatch.setattr(loop, "backward", noting)
    tensors = [x.detach().requires_grad_(place in needed) for place, x in enumerate(inputs())]
    assert difference(UNEVEN, tensors) < 1e-13
    assert asked == [Needs(0 in needed, 1 in needed, 2 in needed)]


@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16])
def test_products_have_the_dtype_of_the_stack_under_autocast_too(x_dtype):
    x, weight, a, b = (tensor.detach() for tensor in inputs(dtype=torch.bfloat16))
    expected = grouped_linear(x, weight, ends_of(UNEVEN), StackedAdapter(a, b, SCALE))
    with torch.autocast("cpu", torch.float16):
        y = grouped_linear(
            x.to(x_dtype), weight, ends_of(UNEVEN), StackedAdapter(a.float(), b.float(), SCALE)
        )
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, expected)


def test_the_backward_keeps_the_inputs_alone():
    tensors = [tensor.detach().clone().requires_grad_() for tensor in inputs()]
    kept = kept_elements(with_factors(grouped_linear, UNEVEN), tensors)
    assert kept == sum(tensor.numel() for tensor in tensors) + len(UNEVEN)  # and where rows end


def test_two_halves_of_a_backward_have_all_gradients():
    half = BackwardHalf()
    tensors = inputs()
    expected = run(with_factors(grouped_linear, UNEVEN), tensors)[1:]
    y = with_factors(partial(grouped_linear, half=half), UNEVEN)(*tensors)
    dy = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view(y.shape)  # as in `run`
    with half.running("input"):
        found = torch.autograd.grad(y, tensors[:1], dy, retain_graph=True)
    with half.running("weight"):
        found += torch.autograd.grad(y, tensors[1:], dy)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_factors", [False, True])
def test_grouped_products_equal_the_loop(dtype, has_factors):
    """On a CPU torch's grouped product is a loop of its own, and this package's is used there."""
    x, weight, a, b = (tensor.detach() for tensor in inputs(sizes=(16, 24, 8), dtype=dtype))
    arguments = (x, weight, *((a, b) if has_factors else (None, None)), SCALE, ends_of(UNEVEN))
    tolerance = 2 * torch.finfo(dtype).eps
    y = loop.forward(*arguments)
    assert worst([grouped.forward(*arguments)], [y]) < tolerance
    for needs in (ALL_NEEDED, Needs(True, False, False), Needs(False, False, True)):
        theirs = grouped.backward(y, *arguments, needs)
        mine = loop.backward(y, *arguments, needs)
        for one, other in zip(theirs, mine, strict=True):
            assert (one is None) == (other is None)
            assert one is None or worst([one], [other]) < 4 * tolerance


def test_a_grouped_product_is_for_bfloat16_on_a_gpu_in_rows_of_16_bytes():
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    assert takes(gpu, torch.bfloat16, (64, 32, 8))
    assert not takes(gpu, torch.bfloat16, (64, 32, 4))
    assert not takes(gpu, torch.float32, (64, 32))
    assert not takes(cpu, torch.bfloat16, (64, 32))


_counts = loop._counts


def _of_the_next_expert(ends: torch.Tensor, num_rows: int) -> list[int]:
    *counts, last = _counts(ends, num_rows)
    return [last, *counts]


def _last_row_given_away(ends: torch.Tensor, num_rows: int) -> list[int]:
    first, second, third, *counts = _counts(ends, num_rows)
    return [first, second - 1, third + 1, *counts]


@pytest.mark.parametrize("mistake", [_of_the_next_expert, _last_row_given_away])
def test_a_planted_mistake_shows(mistake, monkeypatch):
    monkeypatch.setattr(loop, "_counts", mistake)
    assert not difference(UNEVEN, inputs()) < 1e-2


@pytest.mark.parametrize("transposed", [False, True])
def test_results_lie_as_torch_compile_expects(transposed):
    """Generated code asserts the strides that an operator's fake has said."""
    x, weight, a, b = (t.detach() for t in inputs(transposed=transposed))
    ends, utilities = ends_of(UNEVEN), ("test_schema", "test_faketensor")
    arguments = (x, weight, a, b, SCALE, ends)
    torch.library.opcheck(fused.output, arguments, test_utils=utilities)
    dy = torch.randn(len(x), weight.shape[1], dtype=x.dtype)
    for needs in ([True, True, True], [True, False, True], [True, False, False]):
        torch.library.opcheck(fused.gradients, (dy, *arguments, needs), test_utils=utilities)
