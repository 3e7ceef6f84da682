"""AdamW of a matrix or stack whose two moments are kept in 8 bits.

A moment [..., n] becomes codes, uint8 [..., n], and scales, float32 [..., n / BLOCK]: consecutive
values of a row share a scale, their largest absolute value. A code is a place in an ascending list
of 256 levels. Blocks lie within rows, so that rows, stacks, and columns wherever no block is cut,
may be on several ranks: each computes what one process would. Arithmetic is in float32; a step
updates with moments that are not rounded yet, and rounds what it keeps.
Source: Dettmers et al., "8-bit Optimizers via Block-wise Quantization", arXiv 2110.02861.
"""

import math
from collections.abc import Mapping, Sequence
from functools import cache

import torch

BLOCK = 256
"""Consecutive values of a row that share a scale."""
LEAST = 4096
"""The elements of the smallest tensor whose moments are kept in 8 bits."""
CHUNK = 2**22
"""Elements that a step computes at a time, or those of one row or matrix of a stack."""
CODES = torch.uint8
"""The dtype of codes."""
MOMENTS = {"exp_avg": True, "exp_avg_sq": False}
"""The two moments by AdamW's names, and whether they have a sign."""
_DECADES = 7


def is_in_8_bits(shape: Sequence[int]) -> bool:
    """Return whether the moments of a complete tensor of this shape are kept in 8 bits.

    It has rows of whole blocks, and LEAST elements. Vectors, such as norms and biases, have none.
    """
    return len(shape) > 1 and math.prod(shape) >= LEAST and shape[-1] % BLOCK == 0


def num_bytes(numel: int) -> int:
    """Return the bytes of codes and scales of both moments, of so many elements in whole blocks."""
    return len(MOMENTS) * (numel + numel // BLOCK * 4)


def chunk_rows(shape: Sequence[int]) -> int:
    """Return how far along its first dim a step goes at a time, in a tensor of this shape."""
    return max(1, CHUNK // max(1, math.prod(shape[1:])))


def names_of(moment: str) -> tuple[str, str]:
    """Return the names of the states with the codes and the scales of a moment."""
    return f"{moment}_codes", f"{moment}_scales"


@cache
def levels(is_signed: bool, device: torch.device) -> torch.Tensor:
    """Return the 256 values of the codes at scale 1, ascending, float32; one tensor a device.

    They are dense near 1 and, relative to their size, sparser by half in each decade below: decade
    k of 7, from 10^(k-7) to 10^(k-6), is cut into 2^k equal parts, of which the levels are the
    middles, on either side of 0. Without a sign there are twice as many parts. 0 and 1 are levels
    too, so that there are 256.
    """
    values = [0.0, 1.0]
    for decade in range(_DECADES):
        number = 2**decade * (1 if is_signed else 2)
        top = 10.0 ** (decade + 1 - _DECADES)
        middles = [top * (0.1 + 0.9 * (part + 0.5) / number) for part in range(number)]
        values += middles
        if is_signed:
            values += [-middle for middle in middles]
    return torch.tensor(sorted(values), dtype=torch.float64).to(device, torch.float32)


def nearest(scaled: torch.Tensor, is_signed: bool) -> torch.Tensor:
    """Return the codes of the levels that are nearest to values of [-1, 1]."""
    places = levels(is_signed, scaled.device)
    middles = (places[1:] + places[:-1]) / 2
    # The number of middles that are not above the value.
    return torch.bucketize(scaled, middles, out_int32=True, right=True).to(CODES)


def values_of(codes: torch.Tensor, is_signed: bool) -> torch.Tensor:
    """Return the levels of codes, float32."""
    flat = levels(is_signed, codes.device).index_select(0, codes.flatten().int())
    return flat.view(codes.shape)


def dequantise(codes: torch.Tensor, scales: torch.Tensor, is_signed: bool) -> torch.Tensor:
    """Return the moment [..., n] of codes [..., n] and scales [..., n / BLOCK]: new memory."""
    values = values_of(codes, is_signed)
    values.unflatten(-1, (scales.shape[-1], -1)).mul_(scales.unsqueeze(-1))
    return values


def quantise_(moment: torch.Tensor, is_signed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the codes [..., n] and the scales [..., n / BLOCK] of a moment, which is overwritten.

    A block of zeros has the scale 0.
    """
    blocks = moment.unflatten(-1, (-1, BLOCK))
    scales = blocks.abs().amax(-1)
    blocks.div_(scales.where(scales > 0, 1.0).unsqueeze(-1))
    return nearest(moment, is_signed), scales


@torch.no_grad()
def update_(
    parameter: torch.Tensor,
    gradient: torch.Tensor,
    state: Mapping[str, torch.Tensor],
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> None:
    """Do a step of AdamW on this rank's part of a parameter, and on its states, in place.

    `state`: codes and scales by `names_of`, and `step`, the number of this step.
    """
    if not parameter.numel():
        return
    step = state["step"].item()
    biases = 1 - betas[0] ** step, 1 - betas[1] ** step
    names = [name for moment in MOMENTS for name in names_of(moment)]
    tensors = [parameter, gradient, *(state[name] for name in names)]
    rows = chunk_rows(parameter.shape)
    # Of parts along the first dim, as one of a weight that is cut along others is no view.
    for part, grad, *stored in zip(*(tensor.split(rows) for tensor in tensors), strict=True):
        _update_chunk(part, grad, stored, lr, betas, biases, eps, weight_decay)


def _update_chunk(
    part: torch.Tensor,
    gradient: torch.Tensor,
    stored: Sequence[torch.Tensor],
    lr: float,
    betas: tuple[float, float],
    biases: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> None:
    """Update some rows; `stored`: the codes and scales of both moments.

    Whatever it makes in float32 is freed before the next rows are read.
    """
    gradient = gradient.float()
    first, second = (
        dequantise(codes, scales, is_signed)
        for codes, scales, is_signed in zip(stored[::2], stored[1::2], MOMENTS.values())
    )
    first.lerp_(gradient, 1 - betas[0])
    second.mul_(betas[1]).addcmul_(gradient, gradient, value=1 - betas[1])
    wide = part.float()
    wide.mul_(1 - lr * weight_decay)
    denominator = second.sqrt().div_(math.sqrt(biases[1])).add_(eps)
    wide.addcdiv_(first, denominator, value=-lr / biases[0])
    if wide is not part:
        part.copy_(wide)
    del denominator, wide
    for moment, is_signed, target in zip(
        (first, second), MOMENTS.values(), (stored[:2], stored[2:])
    ):
        for kept, new in zip(target, quantise_(moment, is_signed)):
            kept.copy_(new)
