"""Moments in 8 bits: levels, codes and steps against a plain reference in float64."""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass, field

import pytest
import torch

from shardwise.kernels import eight_bit
from shardwise.kernels.eight_bit import (
    BLOCK,
    LEAST,
    MOMENTS,
    dequantise,
    is_in_8_bits,
    levels,
    names_of,
    num_bytes,
    quantise_,
    update_,
)

CPU = torch.device("cpu")


def tree(is_signed: bool) -> list[float]:
    """The levels by their definition: a sign, n zeros and a one that say the decade, and a linear
    fraction of 0.1 to 1 in the bits that are left (arXiv 2110.02861, section 1.3)."""
    values = {0.0, 1.0}
    for zeros in range(7):
        bits = (6 if is_signed else 7) - zeros
        for fraction in range(2**bits):
            value = (0.1 + 0.9 * (fraction + 0.5) / 2**bits) / 10**zeros
            values |= {value, -value} if is_signed else {value}
    return sorted(values)


@dataclass
class Naive:
    """AdamW of one row in Python's numbers, one after the other."""

    weights: list[float]
    moments: dict[str, list[float]] = field(default_factory=dict)
    codes: dict[str, list[int]] = field(default_factory=dict)
    scales: dict[str, list[float]] = field(default_factory=dict)
    steps: int = 0

    def step(self, gradient, lr, betas, eps, decay, block):
        self.steps += 1
        first = self.moments.get("exp_avg", [0.0] * len(gradient))
        second = self.moments.get("exp_avg_sq", [0.0] * len(gradient))
        first = [betas[0] * m + (1 - betas[0]) * g for m, g in zip(first, gradient)]
        second = [betas[1] * v + (1 - betas[1]) * g * g for v, g in zip(second, gradient)]
        for place, (m, v) in enumerate(zip(first, second)):
            size = math.sqrt(v / (1 - betas[1] ** self.steps)) + eps
            update = m / (1 - betas[0] ** self.steps) / size
            self.weights[place] = (1 - lr * decay) * self.weights[place] - lr * update
        self.keep("exp_avg", first, tree(is_signed=True), block)
        self.keep("exp_avg_sq", second, tree(is_signed=False), block)

    def keep(self, name, values, places, block):
        self.codes[name], self.scales[name], self.moments[name] = [], [], []
        for start in range(0, len(values), block):
            part = values[start : start + block]
            scale = max(map(abs, part))
            self.scales[name].append(scale)
            for value in part:
                code = 0 if scale == 0 else nearest(value / scale, places)
                self.codes[name].append(code)
                self.moments[name].append(places[code] * scale)


def nearest(value: float, places: list[float]) -> int:
    above = min(bisect.bisect_left(places, value), 255)
    return min((max(above - 1, 0), above), key=lambda place: abs(places[place] - value))


def zeros(shape: tuple[int, ...]) -> dict[str, torch.Tensor]:
    states = {"step": torch.zeros(())}
    for moment in MOMENTS:
        codes, scales = names_of(moment)
        states[codes] = torch.zeros(shape, dtype=torch.uint8)
        states[scales] = torch.zeros(*shape[:-1], shape[-1] // BLOCK)
    return states


@pytest.mark.parametrize("is_signed", [True, False])
def test_levels_are_those_of_the_dynamic_tree(is_signed):
    expected = tree(is_signed)
    assert len(expected) == 256
    torch.testing.assert_close(
        levels(is_signed, CPU).double(), torch.tensor(expected).double(), rtol=1e-6, atol=0
    )


@pytest.mark.parametrize("is_signed", [True, False])
def test_a_code_is_that_of_the_nearest_level_at_the_scale_of_its_block(is_signed):
    values = torch.randn(3, 2 * BLOCK, generator=torch.Generator().manual_seed(0)) ** 3
    values = values if is_signed else values.abs()
    codes, scales = quantise_(values.clone(), is_signed)
    assert codes.dtype == torch.uint8
    assert torch.equal(scales, values.unflatten(-1, (2, BLOCK)).abs().amax(-1))
    read = dequantise(codes, scales, is_signed)
    places = tree(is_signed)
    for row in range(3):
        for column in range(2 * BLOCK):
            scale = scales[row, column // BLOCK].item()
            best = min(abs(place * scale - values[row, column].item()) for place in places)
            error = abs(read[row, column] - values[row, column]).item()
            assert error <= best + 1e-6 * scale


def test_blocks_of_zeros_stay_zeros():
    codes, scales = quantise_(torch.zeros(2, BLOCK), is_signed=True)
    assert not scales.any()
    assert not dequantise(codes, scales, is_signed=True).any()


@pytest.mark.parametrize(("dtype", "within"), [(torch.float32, 1e-6), (torch.bfloat16, 8e-3)])
def test_steps_are_those_of_a_naive_reference(dtype, within):
    generator = torch.Generator().manual_seed(1)
    rows, columns = 2, 2 * BLOCK
    weights = torch.randn(rows, columns, generator=generator).to(dtype)
    ours, state = weights.clone(), zeros((rows, columns))
    naive = [Naive(row.double().tolist()) for row in weights]
    for _ in range(3):
        gradient = (torch.randn(rows, columns, generator=generator) ** 3 * 1e-3).to(dtype)
        state["step"] += 1
        update_(ours, gradient, state, 1e-2, (0.9, 0.999), 1e-8, 0.1)
        for row, values in zip(naive, gradient):
            row.step(values.double().tolist(), 1e-2, (0.9, 0.999), 1e-8, 0.1, BLOCK)
            row.weights = torch.tensor(row.weights).to(dtype).double().tolist()
    expected = torch.tensor([row.weights for row in naive], dtype=torch.float64)
    # What differs by 1e-7 may have the level beside it: of one number in some thousands.
    off = (ours.double() - expected).abs() > within * expected.abs().clamp(min=0.01)
    assert off.float().mean() <= 0.002
    for moment in MOMENTS:
        codes, scales = names_of(moment)
        theirs = torch.tensor([row.codes[moment] for row in naive])
        assert (state[codes].long() - theirs).abs().max() <= 1
        assert (state[codes].long() != theirs).float().mean() <= 0.002
        read = torch.tensor([row.scales[moment] for row in naive]).float()
        torch.testing.assert_close(state[scales], read, rtol=2e-2, atol=0)


def test_the_first_step_is_that_of_torch_and_later_ones_are_near():
    generator = torch.Generator().manual_seed(2)
    weights = torch.randn(16, BLOCK, generator=generator)
    ours, theirs, state = weights.clone(), torch.nn.Parameter(weights.clone()), zeros((16, BLOCK))
    adamw = torch.optim.AdamW([theirs], lr=1e-2, weight_decay=0.1)
    for step in range(5):
        theirs.grad = torch.randn(16, BLOCK, generator=generator)
        state["step"] += 1
        update_(ours, theirs.grad, state, 1e-2, (0.9, 0.999), 1e-8, 0.1)
        adamw.step()
        apart, moved = (ours - theirs).abs().max(), (weights - theirs).abs().max()
        assert torch.equal(ours, theirs.data) if step == 0 else 0 < apart < 0.1 * moved


def test_any_part_of_rows_and_any_columns_of_whole_blocks_are_updated_as_in_the_whole(monkeypatch):
    generator = torch.Generator().manual_seed(3)
    shape = 4, 6, 2 * BLOCK
    whole = torch.randn(shape, generator=generator)
    parts, states = whole.clone(), [zeros((4, 6, BLOCK)), zeros((4, 6, BLOCK))]
    state = zeros(shape)
    for _ in range(3):
        gradient = torch.randn(shape, generator=generator)
        monkeypatch.setattr(eight_bit, "CHUNK", 2**22)
        state["step"] += 1
        update_(whole, gradient, state, 1e-2, (0.9, 0.999), 1e-8, 0.0)
        monkeypatch.setattr(eight_bit, "CHUNK", 7 * BLOCK)  # a part of the rows at a time
        for half, own in enumerate(states):
            own["step"] += 1
            columns = slice(half * BLOCK, (half + 1) * BLOCK)
            args = 1e-2, (0.9, 0.999), 1e-8, 0.0
            update_(parts[..., columns], gradient[..., columns], own, *args)
    assert torch.equal(whole, parts)
    for name in state.keys() - {"step"}:
        assert torch.equal(state[name], torch.cat([own[name] for own in states], -1))


def test_what_has_no_rows_of_blocks_or_is_small_is_not_in_8_bits():
    assert is_in_8_bits((LEAST // BLOCK, BLOCK))
    assert is_in_8_bits((3, 8, 2 * BLOCK))
    for shape in ((), (LEAST,), (LEAST // BLOCK - 1, BLOCK), (64, BLOCK + 8), (BLOCK, 8)):
        assert not is_in_8_bits(shape)
    assert num_bytes(2 * BLOCK) == 2 * (2 * BLOCK + 2 * 4)


def test_an_empty_shard_is_left_as_it_is():
    update_(torch.empty(0, BLOCK), torch.empty(0, BLOCK), {}, 1.0, (0.9, 0.999), 1e-8, 0.0)
