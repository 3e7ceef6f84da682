"""The CUDA kernels, emulated on the CPU, against float64 in many orders of their threads."""

from __future__ import annotations

import re

import pytest
import torch

from shardwise.config import UserError
from shardwise.kernels.dropout import Dropout
from shardwise.kernels.lora_linear import (
    Linear,
    cuda,
    load_backend,
    lora_linear,
    naive,
    operators,
    torch_backend,
)
from shardwise.kernels.lora_linear.cuda import launch, library
from tests.kernels.without_gpu.cuda_emulator import emulated, stand_in

ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
"""Of one number, relative: half a unit in the last of 8 or 11 bits."""


@pytest.fixture(scope="session")
def kernels(tmp_path_factory):
    return emulated(tmp_path_factory.mktemp("kernels"))


@pytest.fixture(autouse=True)
def on_cpu(kernels, monkeypatch):
    stand_in(monkeypatch, kernels)
    monkeypatch.setattr(cuda, "multiplies_weights", lambda device: True)


class Problem:
    """Operands of all five functions, S linears of one input."""

    def __init__(self, m, k, n, rank, linears=1, p=0.0, dtype=torch.bfloat16, features=False):
        g = torch.Generator().manual_seed(m + k + n + rank)

        def randn(*shape):
            return torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype)

        self.x, self.dy, self.bias, self.scale = randn(m, k), randn(m, n), randn(n), 0.7
        self.weights = [randn(n, k) for _ in range(linears)]
        self.a, self.b, self.h = randn(linears * rank, k), randn(n, rank), randn(m, linears * rank)
        seeds = torch.randint(-(2**31), 2**31, (linears, m), generator=g, dtype=torch.int32)
        chosen = torch.randperm(10 * k, generator=g)[:k].int() if features else None
        self.drop = Dropout(p, seeds, chosen) if p else None

    def results(self, backend, wide=False):
        """What the five functions give; `wide`: of the same numbers in float64."""

        def to(tensor):
            return tensor.double() if wide else tensor

        own_h = to(self.h)[:, : self.b.shape[1]]
        g, db = backend.output_gradients(to(self.dy), to(self.b), own_h, self.scale)
        dys, weights = [to(self.dy)] * len(self.weights), [to(weight) for weight in self.weights]
        return {
            "h": backend.project(to(self.x), to(self.a), self.drop),
            "y": backend.product(
                to(self.x), weights[0], to(self.bias), own_h, to(self.b), self.scale
            ),
            "g": g,
            "db": db,
            "dx": backend.input_gradient(dys, weights, to(self.h), to(self.a), self.drop),
            "da": backend.factor_gradient(to(self.h), to(self.x), self.drop),
        }


def assert_close(found, expected, dtype, roundings=1):
    """Within what rounding the result `roundings` times to its dtype can do, and sums in float32
    beside it.
    """
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].shape == value.shape, name
        assert found[name].dtype == (torch.float32 if name in ("da", "db") else dtype), name
        largest = float(value.abs().max()) if value.numel() else 0.0
        # Sums of up to 500 products of numbers up to 5 in float32: 500 * 2^-24 of what is summed,
        # 2^-15 of the largest.
        small = 2.0**-15 * max(largest, 1.0)
        if name in ("da", "db"):
            torch.testing.assert_close(found[name].double(), value, rtol=0, atol=small)
        else:
            again = (roundings - 1) * ROUNDING[dtype] * 2 * largest
            torch.testing.assert_close(
                found[name].double(), value, rtol=ROUNDING[dtype], atol=small + again
            )


SHAPES = [
    # m, k, n, rank, linears, p, dtype
    (64, 64, 64, 16, 1, 0.0, torch.bfloat16),  # whole tiles
    (130, 72, 140, 8, 1, 0.3, torch.bfloat16),  # several blocks, the last of them not full
    (135, 40, 77, 5, 2, 0.3, torch.float16),  # rows that are not aligned, two masks
    (1, 1, 1, 1, 1, 0.5, torch.bfloat16),
    (
        70,
        36,
        30,
        40,
        3,
        0.0,
        torch.float16,
    ),  # more than what is taken from both sides at once; 120 side by side
    (33, 65, 17, 100, 2, 0.1, torch.bfloat16),  # two launches for 200 columns
    (9, 24, 8, 256, 1, 0.0, torch.bfloat16),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_float64(kernels, shape):
    kernels.seed(1)
    problem = Problem(*shape)
    found = problem.results(cuda)
    # With several masks dx has a pass for each.
    assert_close(
        found,
        problem.results(torch_backend, wide=True),
        shape[-1],
        roundings=shape[4] if shape[5] else 1,
    )
    assert kernels.bank_conflicts() == 0


def test_with_the_product_of_the_library(monkeypatch):
    monkeypatch.setattr(cuda, "multiplies_weights", lambda device: False)
    problem = Problem(70, 72, 40, 8, linears=2, p=0.3)
    # The adapter's products, then those of two linears.
    assert_close(
        problem.results(cuda),
        problem.results(torch_backend, wide=True),
        torch.bfloat16,
        roundings=4,
    )


@pytest.mark.parametrize(
    "shape", [(200, 136, 150, 24, 1, 0.2), (135, 40, 77, 5, 2, 0.3), (70, 200, 40, 60)], ids=str
)
def test_every_order_of_the_threads_gives_the_same_bits(kernels, shape):
    problem = Problem(*shape)
    first = None
    for seed in range(4):
        kernels.seed(seed)
        found = problem.results(cuda)
        first = first or found
        assert all(torch.equal(found[name], value) for name, value in first.items())


def test_matrices_lie_as_they_like():
    problem = Problem(70, 72, 40, 8, linears=2)
    expected = problem.results(cuda)
    problem.weights = [weight.t().contiguous().t() for weight in problem.weights]  # GPT-2's
    problem.x = torch.cat([problem.x, problem.x], 1)[:, : problem.x.shape[1]]
    problem.dy = problem.dy.t().contiguous().t()
    problem.h = torch.cat([problem.h[:, :1], problem.h], 1)[:, 1:]  # rows begin at odd places
    for name, value in problem.results(cuda).items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=0)


def test_no_rows():
    found = Problem(0, 24, 40, 8, linears=2, p=0.1).results(cuda)
    assert [tuple(value.shape) for value in found.values()] == [
        (0, 16),
        (0, 40),
        (0, 8),
        (40, 8),
        (0, 24),
        (16, 24),
    ]
    assert not found["da"].any()
    assert not found["db"].any()


@pytest.mark.parametrize("features", [False, True])
def test_masks_are_those_of_torch_bit_by_bit(features):
    problem = Problem(70, 40, 24, 40, p=0.3, features=features)
    keep = problem.drop.keep(0, 40)
    eye, ones = torch.eye(40, dtype=torch.bfloat16), torch.ones(70, 40, dtype=torch.bfloat16)
    assert torch.equal(cuda.project(ones, eye, problem.drop) != 0, keep)
    zero = torch.zeros(24, 40, dtype=torch.bfloat16)
    assert torch.equal(
        cuda.input_gradient([problem.dy], [zero], ones, eye, problem.drop) != 0, keep
    )
    rows = torch.eye(70, dtype=torch.bfloat16)
    assert torch.equal(cuda.factor_gradient(rows, ones, problem.drop) != 0, keep)


def test_a_trained_factor_alone():
    problem = Problem(70, 40, 24, 8)
    g, db = cuda.output_gradients(problem.dy, problem.b, problem.h, problem.scale)
    only_g, no_db = cuda.output_gradients(problem.dy, problem.b, None, problem.scale)
    no_g, only_db = cuda.output_gradients(problem.dy, None, problem.h, problem.scale)
    assert no_db is None
    assert no_g is None
    torch.testing.assert_close(only_g, g, rtol=ROUNDING[torch.bfloat16], atol=1e-4)
    torch.testing.assert_close(only_db, db, rtol=0, atol=1e-4)


def test_other_dtypes_are_refused_and_never_left_to_torch():
    assert cuda.refused([torch.float16, torch.float16]) is None
    with pytest.raises(
        UserError, match="float16 alone, and here is float32; give all matrices in one of the two"
    ):
        Problem(20, 12, 8, 4, dtype=torch.float32).results(cuda)
    p = Problem(20, 12, 8, 4, p=0.1)
    own_h, wide = p.h[:, :4], p.a.float()
    for call in (
        lambda: cuda.project(p.x, wide, p.drop),
        lambda: cuda.product(p.x, p.weights[0].half(), None, own_h, p.b, 0.7),
        lambda: cuda.output_gradients(p.dy, None, own_h.float(), 0.7),
        lambda: cuda.input_gradient([p.dy], p.weights, own_h, wide, p.drop),
        lambda: cuda.factor_gradient(own_h.float(), p.x, p.drop),
    ):
        with pytest.raises(UserError, match=r"here is bfloat16 and float(16|32);"):
            call()


def draw():
    g = torch.Generator().manual_seed(0)

    def randn(*shape):
        return torch.randn(*shape, generator=g).bfloat16()

    def linear(n, scale):
        a, b = randn(8, 40) / 8, randn(n, 8) / 4
        return Linear(randn(n, 40) / 8, randn(n), a.requires_grad_(), b.requires_grad_(), scale)

    seeds = torch.randint(-(2**31), 2**31, (2, 70), generator=g, dtype=torch.int32)
    return (
        randn(2, 35, 40).requires_grad_(),
        [linear(24, 0.5), linear(56, 2.0)],
        Dropout(0.1, seeds),
    )


def gradients(forward, x, linears, drop):
    ys = forward(x, linears, drop)
    inputs = [x, *(linear.a for linear in linears), *(linear.b for linear in linears)]
    dys = [
        torch.cos(torch.arange(y.numel(), dtype=torch.float64)).view(y.shape).to(y.dtype)
        for y in ys
    ]
    return [*ys, *torch.autograd.grad(ys, inputs, dys)]


def wide(x, linears, drop):
    """The same numbers in float64."""

    def to(tensor):
        return tensor.detach().double().requires_grad_(tensor.requires_grad)

    return to(x), [Linear(*(to(t) for t in linear[:4]), linear.scale) for linear in linears], drop


def test_forward_and_backward_of_linears_that_share_an_input():
    x, linears, drop = draw()
    ours = gradients(
        lambda *args: lora_linear(*args, backend=load_backend("cuda")), x, linears, drop
    )
    torchs = gradients(lora_linear, x, linears, drop)
    exact = gradients(naive.lora_linear, *wide(x, linears, drop))

    def error(found):
        return [
            float((f.detach().double() - e.detach()).abs().max() / e.detach().abs().max())
            for f, e in zip(found, exact)
        ]

    # Both round h and g to bfloat16; torch's products round more often beside that.
    assert all(mine <= max(2 * theirs, 2.0**-8) for mine, theirs in zip(error(ours), error(torchs)))


@pytest.mark.filterwarnings(
    "ignore:.*should not be instantiated:DeprecationWarning"
)  # torch's own way to trace it
def test_compiles_without_a_graph_break():
    torch._dynamo.reset()
    x, linears, drop = draw()

    backend = load_backend("cuda")

    def forward(*args):
        return lora_linear(*args, backend=backend)

    plain = gradients(forward, x, linears, drop)
    compiled = gradients(
        torch.compile(forward, fullgraph=True, backend="aot_eager"), x, linears, drop
    )
    assert all(torch.equal(a, b) for a, b in zip(plain, compiled))


def test_fakes_say_what_the_operators_give():
    p = Problem(70, 40, 24, 8, linears=2, p=0.1)
    checks = ("test_schema", "test_faketensor")
    seeds, own_h = p.drop.seeds, p.h[:, :8]
    for operator, args in (
        (operators.project, (p.x, p.a, seeds, None, 0.1)),
        (operators.product, (p.x, p.weights[0], p.bias, own_h, p.b, 0.7)),
        (operators.product, (p.x, p.weights[0], None, own_h, p.b, 0.7)),
        (operators.output_gradients, (p.dy, p.b, own_h, 0.7)),
        (operators.output_gradients, (p.dy, p.b, None, 0.7)),
        (operators.output_gradients, (p.dy, None, own_h, 0.7)),
        (operators.input_gradient, ([p.dy, p.dy], p.weights, p.h, p.a, None, None, 0.0)),
        (operators.factor_gradient, (p.h, p.x, seeds, None, 0.1)),
    ):
        torch.library.opcheck(operator, ("cuda", *args), test_utils=checks)


def without(kernel, text):
    """Leave out the first `text` of a kernel's loop."""

    def change(source):
        head, name, body = source.partition(f" {kernel}(")
        start, loop, rest = body.partition("    for (int step = 0; step < steps; step++) {\n")
        assert not name or text in rest
        return head + name + start + loop + rest.replace(text, "", 1)

    return change


@pytest.mark.parametrize(
    ("kernel", "text"),
    [
        ("rows_kernel", "        __syncthreads();\n"),
        ("rows_kernel", "        wait_copies<STAGES - 2>();\n"),
        ("columns_kernel", "        __syncthreads();\n"),
        ("product_kernel", "        __syncthreads();\n"),
    ],
)
def test_the_emulator_sees_what_is_not_waited_for(kernels, tmp_path, monkeypatch, kernel, text):
    problem = Problem(70, 136, 72, 8)
    expected = problem.results(cuda)
    broken = emulated(tmp_path, without(kernel, text))
    stand_in(monkeypatch, broken)
    wrong = set()
    for seed in range(4):
        broken.seed(seed)
        found = problem.results(cuda)
        wrong |= {name for name in found if not torch.equal(found[name], expected[name])}
    # g and db are one launch here.
    assert (
        wrong
        == {
            "rows_kernel": {"h"},
            "columns_kernel": {"g", "db", "da"},
            "product_kernel": {"y", "dx"},
        }[kernel]
    )


def test_nvcc_assembles_them_for_both_architectures(tmp_path, monkeypatch):
    said = library.compile_to(tmp_path / "kernels.so", (80, 90), "-Xptxas", "-v", "--threads", "2")
    for architecture in (80, 90):
        parts = re.findall(
            rf"Compiling entry function '(\w+)' for 'sm_{architecture}'(.*?)Used (\d+) registers",
            said,
            re.DOTALL,
        )
        # 2 dtypes of 8 rows_kernels (4 sizes, 2 ways round), 5 columns_kernels and 2
        # product_kernels.
        assert len({name for name, _, _ in parts}) == 2 * (8 + 5 + 2)
        for name, spills, registers in parts:
            assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in spills, name
            # 65,536 of a multiprocessor: two blocks of 128 threads, or one of 256.
            assert int(registers) <= 255, name
    loaded = library.Library(tmp_path / "kernels.so")  # there need be no driver for that
    with pytest.raises(RuntimeError, match="CUDA kernel lora_rows: "):
        loaded.launch("rows", library.Rows(), torch.empty(1), False)
    why = "CUDA driver version is insufficient for CUDA runtime version"
    assert loaded.why_not(0) == (None if torch.cuda.is_available() else why)
    monkeypatch.setattr(
        library.Library, "why_not", lambda self, index: why
    )  # as one that is too old has it
    monkeypatch.setattr(library, "build", lambda architecture: tmp_path / "kernels.so")
    monkeypatch.setattr(library.torch.cuda, "get_device_capability", lambda device: (9, 0))
    with pytest.raises(
        UserError, match=r"cannot run \(CUDA driver version is insufficient.*delete .*kernels.so$"
    ):
        library.library(torch.device("cuda", 0))


def test_without_nvcc_one_line_says_what_to_do(monkeypatch, tmp_path):
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setattr(library.shutil, "which", lambda name: None)
    monkeypatch.setattr(library.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(library.Path, "is_file", lambda path: False)
    with pytest.raises(
        UserError, match=r"need nvcc.* set CUDA_HOME, or `pip install nvidia-cuda-nvcc"
    ) as error:
        library.nvcc()
    assert "\n" not in str(error.value)


def test_they_are_built_once(monkeypatch, tmp_path):
    built = []
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(
        library,
        "compile_to",
        lambda path, architectures: built.append(path.write_bytes(b"library")),
    )
    assert library.build(90) == library.build(90)
    assert library.build(90).read_bytes() == b"library"
    library.build(80)
    assert len(built) == 2
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(UserError, match="set XDG_CACHE_HOME"):
        library.build(90)


def test_what_is_missing_is_said(monkeypatch):
    monkeypatch.setattr(launch, "library", library.library)
    assert (
        cuda.missing(torch.device("cpu")) == "the kernels in CUDA C++ need a CUDA device, not cpu"
    )
