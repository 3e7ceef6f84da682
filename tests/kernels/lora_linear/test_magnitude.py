"""The lengths of rows, and what is multiplied by them, against plain formulas."""

from __future__ import annotations

import pytest
import torch

from shardwise.kernels.backward_half import BackwardHalf
from shardwise.kernels.lora_linear import magnitude
from shardwise.kernels.lora_linear.magnitude import row_norms, with_magnitude
from shardwise.kernels.quantised import Matrix, StoredLayout, dequantise, quantise

OUT, IN, RANK, SCALE = 7, 64, 3, 0.7


def factors(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = ((OUT, IN), (RANK, IN), (OUT, RANK))
    weight, a, b = (torch.randn(size, generator=generator).to(dtype) for size in sizes)
    return weight, a, b


def lengths(weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (weight + SCALE * b @ a).norm(dim=1)


@pytest.mark.parametrize("elements", [1, 2 * IN, 10**6])
def test_lengths_do_not_depend_on_how_many_rows_are_made_at_once(elements, monkeypatch):
    monkeypatch.setattr(magnitude, "CHUNK_ELEMENTS", elements)
    weight, a, b = factors()
    torch.testing.assert_close(row_norms(weight, a, b, SCALE), lengths(weight, a, b))
    transposed = weight.t().contiguous().mT
    torch.testing.assert_close(row_norms(transposed, a, b, SCALE), lengths(weight, a, b))


def test_parts_of_rows_add_up():
    weight, a, b = factors()
    squares: list[torch.Tensor] = []

    def note(part: torch.Tensor) -> torch.Tensor:
        squares.append(part)
        return part

    for columns in (slice(0, 40), slice(40, None)):
        row_norms(weight[:, columns], a[:, columns], b, SCALE, note)
    torch.testing.assert_close(sum(squares).sqrt(), lengths(weight, a, b))


def test_lengths_in_16_bits_and_of_stored_weights_are_those_of_float32():
    weight, a, b = factors(torch.float32)
    rounded = weight.bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        found = row_norms(rounded, a, b, SCALE)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, lengths(rounded.float(), a, b))
    tensors = quantise(weight, "nf4")
    layout = StoredLayout("nf4", tuple(tensors), torch.float32)
    expected = lengths(dequantise(tensors, "nf4", torch.float32), a, b)
    torch.testing.assert_close(
        row_norms(Matrix((*tensors.values(),), layout), a, b, SCALE), expected
    )


@pytest.mark.parametrize("has_bias", [True, False])
def test_gradients_take_the_lengths_for_constants(has_bias):
    generator = torch.Generator().manual_seed(1)
    y, m, norms, bias, dy = (
        torch.rand(size, generator=generator, dtype=torch.float64) + 0.5
        for size in ((2, 5, OUT), (OUT,), (OUT,), (OUT,), (2, 5, OUT))
    )
    given = bias if has_bias else None
    y.requires_grad_()
    m.requires_grad_()
    expected = m / norms * y + (bias if has_bias else 0.0)
    found = with_magnitude(y, m, norms, given)
    torch.testing.assert_close(found, expected)
    both = torch.autograd.grad(expected, (y, m), dy)
    torch.testing.assert_close(torch.autograd.grad(found, (y, m), dy), both)
    half = BackwardHalf()
    found = with_magnitude(y, m, norms, given, half)
    with half.running("input"):
        first = torch.autograd.grad(found, (y, m), dy, retain_graph=True, allow_unused=True)
    with half.running("weight"):
        second = torch.autograd.grad(found, (y, m), dy, allow_unused=True)
    assert first[1] is second[0] is None
    torch.testing.assert_close((first[0], second[1]), both)
