"""The Triton backend of LoRA linears, interpreted, against torch's in float64."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch

from shardwise.kernels.dropout import Dropout, as_arguments
from shardwise.kernels.lora_linear import (
    Linear,
    load_backend,
    lora_linear,
    naive,
    operators,
    torch_backend,
    triton,
)

N = 21  # of the outputs


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Two stripes or more of 40 rows, and two blocks or more of 21 columns; 16 factors at once in
    float32.
    """
    monkeypatch.setattr(triton, "STRIPE", 32)
    monkeypatch.setattr(triton, "COLUMN_BYTES", 64)
    monkeypatch.setattr(triton, "FACTOR_BYTES", 64)


class Case(NamedTuple):
    num_rows: int
    num_in: int
    rank: int
    modules: int = 1
    p: float = 0.0
    dtype: torch.dtype = torch.float64
    factors: torch.dtype | None = None
    products: torch.dtype | None = None  # with the factors
    features: bool = False  # whether dropout is told which they are


CASES = [
    Case(40, 35, 3),
    Case(5, 7, 256, p=0.3),
    Case(1, 1, 1, modules=2, p=0.5),
    Case(40, 35, 17, modules=2, dtype=torch.float32),
    Case(33, 19, 20, modules=3, p=0.3, dtype=torch.float32),
    Case(17, 48, 4, modules=2, p=0.1, features=True),
    Case(40, 35, 3, modules=2, p=0.3, dtype=torch.bfloat16),
    Case(40, 35, 3, dtype=torch.float16),
    Case(40, 35, 3, modules=2, dtype=torch.bfloat16, factors=torch.float32),
    Case(40, 35, 3, 2, 0.3, torch.bfloat16, factors=torch.float32, products=torch.bfloat16),
    Case(0, 35, 3),
    Case(0, 35, 3, modules=2, p=0.3),
]


def spread(x: torch.Tensor) -> torch.Tensor:
    """The same matrix with gaps in it."""
    return torch.stack([x, torch.full_like(x, float("nan"))], 2).flatten(1)[:, ::2]


def turned(x: torch.Tensor) -> torch.Tensor:
    """The same matrix, column after column."""
    return x.t().contiguous().t()


def calls(
    case: Case, backend, inputs: dict[str, torch.Tensor], drop: Dropout | None
) -> Iterator[torch.Tensor]:
    """What the five functions give, each for inputs that do not depend on what another gave."""
    x, weight, bias, a, b, h, g, dy = (
        inputs[name] for name in ("x", "weight", "bias", "a", "b", "h", "g", "dy")
    )
    own, factors = slice(0, case.rank), a.split(case.rank)
    # Of two linears or more, the second one has fewer outputs and another scale.
    outs = [N, 13, *[N] * case.modules][: case.modules]
    scales = [1.7 + i for i in range(case.modules)]
    weights, biases, bs, dys = (
        [t[:, :n] if t is dy else t[:n] for n in outs] for t in (weight, bias, b, dy)
    )
    yield backend.project(x, factors, drop, h.dtype)
    yield from backend.products(x, weights, biases, h, bs, scales)
    turned_ones = [turned(w) for w in weights]
    some = [None if i else bias for i, bias in enumerate(biases)]
    yield from backend.products(x, turned_ones, some, h, bs, scales)
    yield from backend.products(x, [weight], [None], h[:, own], [turned(b)], [1.7])
    given = [turned(part) for part in dys]
    yield from backend.output_gradients(given, bs, h, scales, h.dtype, True)
    yield backend.output_gradients(dys, bs, None, scales, h.dtype, True)[0]
    yield backend.output_gradients(dys, bs, h, scales, h.dtype, False)[1]
    yield backend.input_gradient(given, turned_ones, g, factors, drop)
    yield backend.factor_gradient(g, x, drop)


def drawn(case: Case) -> tuple[dict[str, torch.Tensor], Dropout | None]:
    m, k, factors = case.num_rows, case.num_in, case.rank * case.modules
    generator = torch.Generator().manual_seed(0)
    shapes = {"x": (m, k), "weight": (N, k), "bias": (N,), "dy": (m, N)}
    shapes |= {"a": (factors, k), "b": (N, case.rank), "h": (m, factors), "g": (m, factors)}
    inputs = {}
    for name, shape in shapes.items():
        dtype = (case.factors or case.dtype) if name in "abhg" else case.dtype
        dtype = (case.products or dtype) if name in "hg" else dtype
        inputs[name] = (torch.randn(shape, generator=generator, dtype=torch.float64) * k**-0.25).to(
            dtype
        )
    if not case.p:
        return inputs, None
    seeds = torch.randint(
        -(2**31), 2**31, (case.modules, m), generator=generator, dtype=torch.int32
    )
    return inputs, Dropout(
        case.p, seeds, torch.randperm(k, generator=generator).int() if case.features else None
    )


@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_torchs_backend(case):
    inputs, drop = drawn(case)
    exact = calls(case, torch_backend, {name: x.double() for name, x in inputs.items()}, drop)
    types = [t.dtype for t in calls(case, torch_backend, inputs, drop)]
    narrow = case.dtype in (torch.bfloat16, torch.float16)
    for found, expected, dtype in zip(calls(case, triton, inputs, drop), exact, types, strict=True):
        assert (found.shape, found.dtype) == (expected.shape, dtype)
        # Cut off by the interpreter, or rounded to nearest by half an eps: once; but the product
        # twice, when it starts out as the adapter's part and when it is done, and the gradient of
        # the input with siblings once more for each, earlier ones on smaller numbers. Else sums of
        # at most 60 numbers, in another order.
        eps = (
            1.5 * torch.finfo(dtype).eps
            if narrow and dtype == case.dtype
            else 60 * torch.finfo(dtype).eps
        )
        assert found.numel() == 0 or (found - expected).abs().max() <= eps * expected.abs().max()


def test_views_are_taken_as_they_lie():
    inputs, _ = drawn(CASES[0])
    gaps = {name: spread(x) if x.dim() == 2 else x for name, x in inputs.items()}
    assert not any(x.is_contiguous() for x in gaps.values() if x.dim() == 2)
    whole = calls(CASES[0], triton, inputs, None)
    for found, expected in zip(calls(CASES[0], triton, gaps, None), whole, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-13)


def gradients(forward, x, linears, drop, **options):
    ys = forward(x, linears, drop, **options)
    leaves = [x, *(factor for linear in linears for factor in (linear.a, linear.b))]
    return [*ys, *torch.autograd.grad([(y * y).sum() for y in ys], leaves)]


def problem(p: float, dtype: torch.dtype = torch.float64):
    inputs, drop = drawn(Case(11, 7, 3, modules=2, p=p, dtype=dtype))
    a = [part.clone().requires_grad_() for part in inputs["a"].chunk(2)]
    b = [(inputs["b"] * sign).requires_grad_() for sign in (1, -1)]
    linears = [
        Linear(inputs["weight"] + i, inputs["bias"] + i, a[i], b[i], 0.5 + i) for i in range(2)
    ]
    return inputs["x"].requires_grad_(), linears, drop


@pytest.mark.parametrize("p", [0.0, 0.4])
def test_in_the_autograd_node(p):
    x, linears, drop = problem(p)
    expected = gradients(naive.lora_linear, x, linears, drop)
    for found, other in zip(
        gradients(lora_linear, x, linears, drop, backend=load_backend("triton")),
        expected,
        strict=True,
    ):
        torch.testing.assert_close(found, other, rtol=1e-12, atol=1e-12)


def test_compiled_in_one_graph():
    x, linears, drop = problem(0.4, torch.float32)

    def compiled(*args, **options):
        torch._dynamo.reset()
        return torch.compile(lora_linear, backend="aot_eager", fullgraph=True)(*args, **options)

    expected = gradients(lora_linear, x, linears, drop, backend=load_backend("triton"))
    for found, other in zip(
        gradients(compiled, x, linears, drop, backend=load_backend("triton")), expected, strict=True
    ):
        assert torch.equal(found, other)


@pytest.mark.parametrize("p", [0.0, 0.4])
def test_operators_are_what_they_say(p):
    """Schema, fake implementation, and no tensor that is changed or handed through."""
    inputs, drop = drawn(
        Case(18, 7, 3, modules=2, p=p, dtype=torch.bfloat16, factors=torch.float32)
    )
    x, weight, bias, a, b, h, g, dy = (
        inputs[k] for k in ("x", "weight", "bias", "a", "b", "h", "g", "dy")
    )
    mask, factors, scales = as_arguments(drop), [*a.split(3)], [2.0, 1.0]
    arguments = [
        (operators.project, (x, factors, *mask, h.dtype)),
        (operators.products, (x, [weight, weight], [bias, None], h, [b, b], scales)),
        *(
            (operators.output_gradients, ([dy, dy], [b, b], one, scales, h.dtype, needs_g))
            for one, needs_g in ((h, True), (h, False), (None, True))
        ),
        (operators.input_gradient, ([dy, dy], [weight, weight], g, factors, *mask)),
        (operators.factor_gradient, (g, x, *mask)),
    ]
    for operator, tensors in arguments:
        args = ("triton", *tensors)
        torch.library.opcheck(operator, args, test_utils=("test_schema", "test_faketensor"))
        outputs, fakes = operator(*args), fake(operator, args)
        for one, other in zip(
            *([t] if isinstance(t, torch.Tensor) else t for t in (outputs, fakes))
        ):
            assert (one.shape, one.dtype, one.stride()) == (
                other.shape,
                other.dtype,
                other.stride(),
            )


def fake(operator, args):
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        return operator(*args)
