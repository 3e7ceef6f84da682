"""Matrices in few bits: how far values are from what was stored, and the linears that read them."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from shardwise.kernels import quantised
from shardwise.kernels.lora_linear import Linear, lora_linear
from shardwise.kernels.quantised import (
    Matrix,
    StoredLayout,
    dequantise,
    quantise,
    quantised_linear,
    read_bytes,
    shapes_of,
)
from shardwise.metrics.memory import PeakMemory

FORMATS = ("nf4", "int8", "fp8", "mxfp4", "nvfp4", "int4")
EVERY = (*FORMATS, "nf4_float32", "fp8_blocks", "int4_32", "int4_row", "int4_64_ordered")
LEVELS = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
"""The levels that bitsandbytes lists for nf4."""


def stored(matrix: torch.Tensor, fmt: str) -> Matrix:
    tensors = quantise(matrix, fmt)
    return Matrix(tuple(tensors.values()), StoredLayout(fmt, tuple(tensors), matrix.dtype))


@pytest.mark.parametrize("fmt", FORMATS)
def test_the_stored_tensors_have_the_sizes_that_are_said(fmt):
    for shape in ((6, 128), (3, 4, 192)):
        tensors = quantise(torch.randn(shape), fmt)
        said = shapes_of(fmt, torch.Size(shape))
        assert {n: (t.shape, t.dtype) for n, t in tensors.items()} == said
        assert dequantise(tensors, fmt, torch.float32).shape == shape


@pytest.mark.parametrize(
    ("fmt", "most"),
    [
        ("nf4", 0.154),
        ("int8", 0.005),
        ("fp8", 0.04),
        ("mxfp4", 0.3),
        ("nvfp4", 0.3),
        ("int4", 0.07),
    ],
)
def test_values_are_near(fmt, most):
    """Within half of what separates codes: of a row, a block of a row, or a value."""
    torch.manual_seed(0)
    matrix = torch.randn(64, 256)
    values = stored(matrix, fmt).to(torch.float32)
    largest = matrix.abs().unflatten(-1, (-1, 64 if fmt == "nf4" else 256)).amax(-1, keepdim=True)
    error = (values - matrix).abs().unflatten(-1, (*largest.shape[1:2], -1)) / largest
    assert error.max() < most
    assert error.max() > most / 4


def test_nf4_has_the_levels_of_qlora():
    row = torch.tensor([*LEVELS * 4]).unsqueeze(0)
    tensors = quantise(row, "nf4")
    assert torch.allclose(dequantise(tensors, "nf4", torch.float32), row, atol=1e-6)


@pytest.mark.parametrize("fmt", FORMATS)
def test_a_share_of_the_columns_has_the_same_codes(fmt):
    """Whole blocks of a row are read alone, with the scales of their row."""
    torch.manual_seed(1)
    matrix = torch.randn(8, 256)
    tensors = quantise(matrix, fmt)
    values = dequantise(tensors, fmt, torch.float32)
    share = {
        name: tensor if name == "steps" or tensor.shape[-1] == 1 else tensor.chunk(2, -1)[1]
        for name, tensor in tensors.items()
    }
    assert torch.equal(dequantise(share, fmt, torch.float32), values[:, 128:])
    rows = {name: tensor[2:5] for name, tensor in tensors.items()}
    assert torch.equal(dequantise(rows, fmt, torch.float32), values[2:5])


@pytest.mark.parametrize("fmt", FORMATS)
def test_zeros_and_equal_values_stay(fmt):
    matrix = torch.stack([torch.zeros(128), torch.full((128,), 0.25), torch.full((128,), -3.0)])
    values = stored(matrix, fmt).to(torch.float32)
    assert torch.allclose(values, matrix, rtol={"nvfp4": 0.07, "int4": 1e-3}.get(fmt, 1e-6))


@pytest.mark.parametrize("fmt", FORMATS)
def test_linears_read_what_is_stored(fmt):
    torch.manual_seed(2)
    weight = stored(torch.randn(48, 128), fmt)
    x = torch.randn(5, 128, requires_grad=True)
    bias, a, b = torch.randn(48), torch.randn(4, 128, requires_grad=True), torch.randn(48, 4)
    b.requires_grad_()
    dy = torch.randn(5, 48)
    values = weight.to(torch.float32)

    def gradients(y: torch.Tensor) -> list[torch.Tensor]:
        return [y.detach(), *torch.autograd.grad(y, inputs, dy)]

    inputs = [x]
    plain = gradients(F.linear(x, values, bias))
    for ours, theirs in zip(gradients(quantised_linear(x, weight, bias)), plain, strict=True):
        torch.testing.assert_close(ours, theirs)
    inputs = [x, a, b]
    plain = gradients(*lora_linear(x, [Linear(values, bias, a, b, 0.5)]))
    ours = gradients(*lora_linear(x, [Linear(weight, bias, a, b, 0.5)]))
    for one, other in zip(ours, plain, strict=True):
        torch.testing.assert_close(one, other)


def test_linears_that_share_an_input_may_be_stored_each_in_its_own_way():
    torch.manual_seed(3)
    x = torch.randn(5, 128, requires_grad=True)
    weights = [torch.randn(32, 128), stored(torch.randn(16, 128), "nf4")]
    weights.append(stored(torch.randn(128, 24), "int8").mT)
    factors = [(torch.randn(4, 128), torch.randn(w.shape[0], 4)) for w in weights]
    ys = lora_linear(x, [Linear(w, None, a, b, 1.0) for w, (a, b) in zip(weights, factors)])
    plain = [
        F.linear(x, w.to(torch.float32)) + x @ a.T @ b.T for w, (a, b) in zip(weights, factors)
    ]
    for ours, theirs, w, (a, b) in zip(ys, plain, weights, factors, strict=True):
        # What a sum may be off by grows with the sizes of its terms, and their order is free.
        terms = x.abs() @ w.to(torch.float32).abs().T + x.abs() @ a.abs().T @ b.abs().T
        assert ((ours - theirs).abs() <= 2**-21 * terms).all()
    (dx,) = torch.autograd.grad(sum(y.sum() for y in ys), x)
    (expected,) = torch.autograd.grad(sum(y.sum() for y in plain), x)
    torch.testing.assert_close(dx, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("fmt", EVERY)
def test_parts_of_a_large_matrix_have_the_bits_of_the_whole(fmt, monkeypatch):
    torch.manual_seed(4)
    matrix = torch.randn(3, 50, 192)
    expected = quantise(matrix, fmt)
    values = dequantise(expected, fmt, torch.bfloat16)
    with monkeypatch.context() as patch:
        patch.setattr(quantised, "CHUNK_ELEMENTS", 7 * 192 + 5)
        stored = quantise(matrix, fmt)
        assert torch.equal(dequantise(stored, fmt, torch.bfloat16), values)
    assert stored.keys() == expected.keys()
    assert all(torch.equal(stored[name], expected[name]) for name in expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunk", [2**20, 2**14])
@pytest.mark.parametrize("fmt", EVERY)
def test_reading_takes_the_memory_that_is_said(fmt, chunk, dtype, monkeypatch):
    monkeypatch.setattr(quantised, "CHUNK_ELEMENTS", chunk)
    matrix = torch.randn(4, 128, 512)
    with PeakMemory(torch.device("cpu")) as of_storing:
        tensors = quantise(matrix, fmt)
    stored_bytes = sum(tensor.nbytes for tensor in tensors.values())
    with PeakMemory(torch.device("cpu")) as of_reading:
        dequantise(tensors, fmt, dtype)
    said = read_bytes(fmt, matrix.shape, dtype.itemsize)
    assert of_reading.added_bytes() == pytest.approx(said, rel=0.02)
    if chunk < matrix.numel():
        assert of_storing.added_bytes() < stored_bytes + 32 * chunk


@pytest.mark.parametrize(
    ("fmt", "smaller"),
    [("nf4", 3.86), ("int8", 2.0), ("fp8", 2.0), ("mxfp4", 3.76), ("nvfp4", 3.55), ("int4", 3.66)],
)
def test_a_matrix_is_so_many_times_smaller_than_in_16_bits(fmt, smaller):
    """What docs/guides/quantised-bases.md says of 4,096 columns: it is what fsdp2 gathers, too."""
    shape = torch.Size([64, 4096])
    stored = sum(size.numel() * dtype.itemsize for size, dtype in shapes_of(fmt, shape).values())
    assert round(2 * shape.numel() / stored, 2) == smaller
