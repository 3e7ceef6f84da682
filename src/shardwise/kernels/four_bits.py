"""Numbers of 4 bits, two in a byte: the levels of nf4 and of e2m1, and scales in 8 bits.

nf4's 16 levels are quantiles of a normal law, and a byte's first number is in its upper half. e2m1
(fp4) has a sign, two bits of exponent and one of mantissa, and the first number in the lower half:
OCP, "Microscaling Formats (MX) Specification", version 1.0, section 5.3.3. e8m0 is the exponent of
a power of two, 2^(code - 127), and 255 is no number (section 5.4.1).
"""

from functools import cache
from typing import Literal

import torch

Levels = Literal["nf4", "e2m1", "int4"]

NF4_LEVELS = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
"""Levels of nf4, as published: 8 above and 7 below zero."""
FP4_LEVELS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Levels of e2m1 by the lower three bits of a code; the highest bit is the sign."""
E8M0_BIAS = 127


@cache
def nf4_levels(device: torch.device) -> torch.Tensor:
    """Return the 16 values of nf4's codes at scale 1, ascending, float32; one tensor a device."""
    return torch.tensor(NF4_LEVELS, device=device)


@cache
def _pairs(levels: Levels, device: torch.device) -> torch.Tensor:
    """Return the two values of each byte, in their order, float32 [256, 2]."""
    if levels == "nf4":
        return torch.cartesian_prod(nf4_levels(device), nf4_levels(device))
    every = range(16) if levels == "int4" else (*FP4_LEVELS, *(-level for level in FP4_LEVELS))
    values = torch.tensor(every, device=device, dtype=torch.float32)
    return torch.cartesian_prod(values, values).flip(-1)


def values_of(codes: torch.Tensor, levels: Levels) -> torch.Tensor:
    """Return the values at scale 1, float32 [..., in], of bytes [..., in / 2]."""
    pairs = _pairs(levels, codes.device)
    values = pairs.index_select(0, codes.flatten().int())
    return values.view(*codes.shape[:-1], 2 * codes.shape[-1])


def packed(codes: torch.Tensor) -> torch.Tensor:
    """Return bytes [..., in / 2] of codes [..., in], the first of two in the lower half."""
    return (codes[..., ::2] | codes[..., 1::2] << 4).to(torch.uint8)


def unpacked(codes: torch.Tensor) -> torch.Tensor:
    """Return the codes [..., in] in bytes [..., in / 2] of `packed`."""
    return torch.stack([codes & 15, codes >> 4], -1).flatten(-2)


def codes_of(scaled: torch.Tensor, levels: Levels) -> torch.Tensor:
    """Return the bytes [..., in / 2] of the levels that are nearest to values [..., in].

    Between two levels of e2m1 the one with an even code is taken, as IEEE 754 rounds; what is
    beyond the last one has the last one.
    """
    if levels == "int4":
        return packed(scaled.round().clamp(0, 15).to(torch.uint8))
    if levels == "nf4":
        values = nf4_levels(scaled.device)
        # The nearest level: the number of midpoints that lie below.
        codes = torch.bucketize(scaled, (values[1:] + values[:-1]) / 2)
        return (codes[..., ::2] << 4 | codes[..., 1::2]).to(torch.uint8)
    values = torch.tensor(FP4_LEVELS, device=scaled.device)
    midpoints = (values[1:] + values[:-1]) / 2
    midpoints[1::2] = midpoints[1::2].nextafter(values[0])  # a midpoint itself goes up there
    return packed(torch.bucketize(scaled.abs(), midpoints) + 8 * scaled.signbit())


@cache
def _powers(device: torch.device) -> torch.Tensor:
    powers = [2.0 ** (code - E8M0_BIAS) for code in range(255)]
    return torch.tensor([*powers, float("nan")], device=device)


def power_of(codes: torch.Tensor) -> torch.Tensor:
    """Return the scales of e8m0's codes in float32."""
    return _powers(codes.device).index_select(0, codes.flatten().int()).view(codes.shape)


def e8m0_of(largest: torch.Tensor) -> torch.Tensor:
    """Return e8m0's code of the least power of two that e2m1 need not exceed, of blocks whose
    largest values are these.

    OCP's own rule takes the next lower one, and may cut off a fourth of the largest value; this
    one is of transformers' quantiser, of NVIDIA's recipe and of torchao's RCEIL.
    """
    mantissa, exponent = torch.frexp(largest / FP4_LEVELS[-1])
    codes = exponent - (mantissa == 0.5).int() + E8M0_BIAS  # mantissas are from 1/2 to 1
    return codes.where(largest > 0, 0).clamp(0, 254).to(torch.uint8)
