"""A LoRA linear in one node, against one product after the other."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from shardwise.kernels.backward_half import BackwardHalf
from shardwise.kernels.lora_linear import Linear, lora_linear, naive, torch_backend
from tests.kernels.lora_linear.cases import Problem, draw, run, to, worst

SHAPES = [
    (7, 5, (3,), 1),
    (33, 17, (9, 4, 5), 2),
    (1, 1, (1,), 1),
    (40, 64, (31, 31), 256),
    (65, 130, (33,), 24),
]


@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_the_reference(shape, p):
    problem = draw(*shape, p=p)
    assert worst(run(lora_linear, problem), run(naive.lora_linear, problem)) < 1e-13


def test_there_are_no_second_derivatives():
    problem = draw(7, 5, (3,), 1)
    x = problem.x.clone().requires_grad_()
    (y,) = lora_linear(x, problem.linears)
    (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()


@settings(max_examples=30, deadline=None)
@given(
    st.integers(0, 40),
    st.integers(1, 40),
    st.lists(st.integers(1, 40), min_size=1, max_size=4),
    st.integers(1, 9),
)
def test_equals_the_reference_at_any_size(num_rows, num_in, sizes, rank):
    problem = draw(num_rows, num_in, sizes, rank, p=0.2)
    assert worst(run(lora_linear, problem), run(naive.lora_linear, problem)) < 1e-12


@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_dtype_against_float64(dtype, p):
    problem = draw(48, 33, (20, 7), 8, dtype, p=p)
    expected = run(naive.lora_linear, to(problem, torch.float64))
    actual = run(lora_linear, problem)
    assert {t.dtype for t in actual} == {dtype}
    # Each number is rounded at most three times on its way (h or g, a product, a sum), by half an
    # eps each; a sum's own rounding in float32 is nothing beside it, but for float32: 48 terms.
    assert worst(actual, expected) < (
        3 * torch.finfo(dtype).eps if dtype != torch.float32 else 1e-5
    )


def test_nothing_is_lost_beside_the_reference_in_bfloat16():
    problem = draw(64, 96, (40, 24), 16, torch.bfloat16)
    expected = run(naive.lora_linear, to(problem, torch.float64))
    assert worst(run(lora_linear, problem), expected) < 1.5 * worst(
        run(naive.lora_linear, problem), expected
    )


@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_float32_adapters_on_a_narrow_model_compute_in_float32(dtype, p):
    problem = draw(48, 33, (20, 7), 8, dtype, torch.float32, p=p)
    expected = run(naive.lora_linear, to(problem, torch.float64))
    ys_and_dx, factors = slice(0, 3), slice(3, None)
    actual = run(lora_linear, problem)
    assert [t.dtype for t in actual] == [dtype] * 3 + [torch.float32] * 4
    assert worst(actual[factors], expected[factors]) < 1e-5
    assert (
        worst(actual[ys_and_dx], expected[ys_and_dx]) < 2 * torch.finfo(dtype).eps
    )  # the product's rounding, the sum's


@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("model", [torch.float32, torch.bfloat16])
def test_under_autocast(model, p):
    problem = draw(48, 33, (20, 7), 8, model, torch.float32, p=p)
    expected = run(naive.lora_linear, to(problem, torch.float64))
    with torch.autocast("cpu", torch.bfloat16):
        actual, plain = (run(forward, problem) for forward in (lora_linear, naive.lora_linear))
    assert (
        [t.dtype for t in actual]
        == [t.dtype for t in plain]
        == [torch.bfloat16] * 2 + [model] + [torch.float32] * 4
    )
    # Inputs are rounded too; the worst of naive's is as large.
    assert worst(actual, expected) < 5 * torch.finfo(torch.bfloat16).eps
    assert worst(actual, expected) < 1.5 * worst(plain, expected)


def test_autocast_leaves_float64_alone():
    problem = draw(9, 5, (4,), 2)
    with torch.autocast("cpu", torch.bfloat16):
        assert worst(run(lora_linear, problem), run(naive.lora_linear, problem)) < 1e-13


@pytest.mark.parametrize("p", [0.0, 0.3])
def test_gradcheck(p):
    problem = draw(5, 4, (3, 6), 2, p=p)

    def forward(x, a0, a1, b0, b1):
        linears = [one._replace(a=a, b=b) for one, a, b in zip(problem.linears, (a0, a1), (b0, b1))]
        return lora_linear(x, linears, problem.drop)

    assert torch.autograd.gradcheck(forward, problem.inputs())


def test_any_layout_in_memory():
    problem = draw(12, 10, (6, 8), 2)
    expected = run(lora_linear, problem)
    linears = [
        Linear(w.t().contiguous().t(), torch.stack([c, c], 1)[:, 0], a, b, s)
        for w, c, a, b, s in problem.linears
    ]
    apart = torch.stack([problem.x.detach()] * 3, 1)[:, 1].requires_grad_()
    assert not any(t.is_contiguous() for t in (apart, linears[0].weight, linears[0].bias))
    assert worst(run(lora_linear, Problem(apart, linears, None)), expected) < 1e-13
    # Gradients that are expanded, as those of a sum are.
    problem.x.grad = None
    sum(y.sum() for y in lora_linear(*problem)).backward()
    plain = sum(y.sum() for y in naive.lora_linear(*problem))
    torch.testing.assert_close(problem.x.grad, torch.autograd.grad(plain, problem.x)[0])


@pytest.mark.parametrize("sizes", [(9,), (9, 4)])
def test_gradients_of_rank_1_have_the_usual_strides(sizes):
    """DDP compares the strides of gradients with those of its buckets, also of dims of size 1."""
    problem = draw(12, 10, sizes, 1)
    sum(y.sum() for y in lora_linear(*problem)).backward()
    for _, _, a, b, _ in problem.linears:
        assert (a.grad.stride(), b.grad.stride()) == (a.stride(), b.stride())


def test_more_dims():
    problem = draw(12, 10, (6, 8), 2, p=0.3)
    ys = lora_linear(problem.x.view(2, 1, 6, 10), problem.linears, problem.drop)
    for y, expected in zip(ys, lora_linear(*problem), strict=True):
        assert y.shape[:-1] == (2, 1, 6)
        assert torch.equal(y.reshape(expected.shape), expected)


def test_what_is_given_may_be_changed_in_place():
    problem = draw(12, 10, (6,), 2)
    (y,) = lora_linear(problem.x.view(2, 6, 10), *problem[1:])
    (y.mul_(2.0)).sum().backward()
    (plain,) = naive.lora_linear(*problem)
    torch.testing.assert_close(problem.x.grad, torch.autograd.grad(2 * plain.sum(), problem.x)[0])


def recording() -> tuple[SimpleNamespace, list[str]]:
    """Return torch's backend, and a list of its calls."""
    calls: list[str] = []

    def noting(name):
        function = getattr(torch_backend, name)

        def noted(*args):
            given = function(*args)
            parts = given if isinstance(given, tuple) else ()
            calls.append(" ".join([name, *("-" if part is None else "+" for part in parts)]))
            return given

        return noted

    names = ("project", "products", "output_gradients", "input_gradient", "factor_gradient")
    return SimpleNamespace(**{name: noting(name) for name in names}), calls


@pytest.mark.parametrize(
    ("trained", "expected"),
    [
        ("x", ["output_gradients + -", "input_gradient"]),
        ("a", ["output_gradients + -", "factor_gradient"]),
        ("b", ["output_gradients - +"]),
        ("ab", ["output_gradients + +", "factor_gradient"]),
        ("xab", ["output_gradients + +", "input_gradient", "factor_gradient"]),
    ],
)
def test_what_nobody_needs_is_not_computed(trained, expected):
    problem = draw(12, 10, (6,), 2)
    tensors = dict(zip("xab", problem.inputs()))
    for name, tensor in tensors.items():
        tensor.requires_grad_(name in trained)
    backend, calls = recording()
    actual = torch.autograd.grad(
        lora_linear(*problem, backend)[0].sum(), [tensors[name] for name in trained]
    )
    assert calls == ["project", "products", *expected]
    plain = torch.autograd.grad(
        naive.lora_linear(*problem)[0].sum(), [tensors[name] for name in trained]
    )
    assert worst(actual, plain) < 1e-13


@pytest.mark.parametrize("p", [0.0, 0.3])
def test_the_adapter_of_an_output_that_nobody_uses_has_no_gradient(p):
    problem, plain = draw(12, 10, (6, 8), 2, p=p), draw(12, 10, (6, 8), 2, p=p)
    _, y = lora_linear(*problem)
    y.sum().backward()
    naive.lora_linear(*plain)[1].sum().backward()
    (x, a0, a1, b0, b1), expected = problem.inputs(), plain.inputs()
    assert (
        [t.grad is None for t in (a0, b0)]
        == [t.grad is None for t in (expected[1], expected[3])]
        == [True, True]
    )
    assert worst([t.grad for t in (x, a1, b1)], [expected[i].grad for i in (0, 2, 4)]) < 1e-13
    # With a gradient of zeros this optimizer would shrink them.
    before = a0.detach().clone()
    torch.optim.AdamW(problem.inputs(), lr=0.1, weight_decay=0.1).step()
    assert torch.equal(a0, before)


def test_an_undefined_gradient_is_handed_on():
    class Undefined(torch.autograd.Function):
        @staticmethod
        def forward(ctx, y):
            return y.clone()

        @staticmethod
        def backward(ctx, dy):
            return None

    problem = draw(12, 10, (6, 8), 2)
    sum(Undefined.apply(y).sum() for y in lora_linear(*problem)).backward()
    assert all(tensor.grad is None for tensor in problem.inputs())


def test_a_trained_weight_is_refused():
    problem = draw(12, 10, (6,), 2)
    problem.linears[0].weight.requires_grad_()
    with pytest.raises(AssertionError):
        lora_linear(*problem)


@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("autocast", [False, True])
def test_x_and_h_are_all_that_is_saved(autocast, p):
    problem = draw(512, 64, (48, 48, 16), 4, torch.float32, p=p)
    weights = {t.data_ptr() for linear in problem.linears for t in linear[:4]}
    saved: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.data_ptr() not in weights:
            saved[tensor.data_ptr()] = tensor.numel() * tensor.itemsize
        return tensor

    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t),
        torch.autocast("cpu", enabled=autocast),
    ):
        lora_linear(*problem)
    size = 2 if autocast else 4
    # x, h of three adapters and, with dropout, four bytes a token for each of them.
    assert sum(saved.values()) == 512 * 64 * size + 512 * 3 * 4 * size + (512 * 3 * 4 if p else 0)


def test_halves_of_a_backward_share_its_work_out():
    """As a pipeline with a zero-bubble schedule does it: torch runs every node twice."""
    (one, other), expected = (draw(12, 10, (10, 10), 2, p=0.3) for _ in range(2)), None
    parameters = [*one.inputs()[1:], *other.inputs()[1:]]

    half = BackwardHalf()

    def forward(backend):
        middle = sum(lora_linear(*one, backend, half)).tanh()
        return sum(y.sum() for y in lora_linear(middle, *other[1:], backend, half))

    expected = torch.autograd.grad(forward(torch_backend), [one.x, *parameters])
    backend, calls = recording()
    loss = forward(backend)
    del calls[:]
    with half.running("input"):
        (dx,), groups = stage_backward_input([loss], None, [one.x], iter(parameters))
    assert calls == ["output_gradients + +", "input_gradient"] * 2
    assert all(p.grad is None for p in parameters)
    del calls[:]
    with half.running("weight"):
        stage_backward_weight(iter(parameters), groups)
    assert calls == ["factor_gradient"] * 2
    assert worst([dx, *(p.grad for p in parameters)], expected) < 1e-13
    assert half.current == "full"


def test_a_graph_may_be_used_twice():
    problem = draw(12, 10, (6, 8), 2)
    total = sum(y.sum() for y in lora_linear(*problem))
    first, second = (
        torch.autograd.grad(total, problem.inputs(), retain_graph=True) for _ in range(2)
    )
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


@pytest.mark.parametrize("p", [0.0, 0.3])
def test_compiles_without_a_break(p):
    problem = draw(12, 10, (6, 8), 2, torch.float32, p=p)
    torch._dynamo.reset()
    compiled = torch.compile(lora_linear, backend="aot_eager", fullgraph=True)
    assert worst(run(compiled, problem), run(lora_linear, problem)) < 1e-6
