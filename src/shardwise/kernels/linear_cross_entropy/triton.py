"""A chunk's softmax, loss and gradient in Triton: logits are read twice and written once, in the products' own dtype.

One kernel takes the largest logit and the sum of exponentials of each row as it goes along (Milakov and Gimelshein,
"Online normalizer calculation for softmax", arXiv 1805.02867, algorithm 3); the other writes the gradient over the
logits. Between them a few numbers a row may be reduced over the ranks that have the other tokens.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl

from shardwise.kernels.linear_cross_entropy.vocabulary import Vocabulary

BLOCK = 4096
"""Logits that a program takes at a time, 16 on each of 256 threads: two loads of 16 bytes in 16-bit formats."""
NUM_WARPS = 8


@triton.jit
def _logits(logits, bias, columns, num_tokens, SOFTCAP: tl.constexpr, WIDE: tl.constexpr):
    """Logits after bias and soft cap, -inf beyond the last one, and the soft cap's slope."""
    inside = columns < num_tokens
    z = tl.load(logits + columns, mask=inside, other=0.0).to(WIDE)
    if bias is not None:
        z += tl.load(bias + columns, mask=inside, other=0.0).to(WIDE)
    slope = tl.full(z.shape, 1.0, WIDE)
    if SOFTCAP is not None:
        # Triton has no tanh of its own; of |z|, as its exponential cannot overflow then.
        decay = tl.exp(tl.abs(z) * (-2.0 / SOFTCAP))
        capped = (1.0 - decay) / (1.0 + decay)
        slope = 1.0 - capped * capped
        z = tl.where(z < 0, -capped, capped) * SOFTCAP
    return tl.where(inside, z, float("-inf")), slope


@triton.jit
def statistics_kernel(
    logits, bias, targets, peaks, totals, target_logits, row_stride, num_tokens, first, absent,
    SOFTCAP: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row: its largest logit, the sum of exp(logit - largest), and the target's logit (`absent`: not here)."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * row_stride
    peak = tl.full((), -3.0e38, WIDE)  # finite: exp(-inf - -inf) would be no number
    sums = tl.zeros((BLOCK,), WIDE)
    for start in range(0, num_tokens, BLOCK):
        z, _ = _logits(logits, bias, start + tl.arange(0, BLOCK), num_tokens, SOFTCAP, WIDE)
        larger = tl.maximum(peak, tl.max(z, 0))
        sums = sums * tl.exp(peak - larger) + tl.exp(z - larger)
        peak = larger
    target = tl.load(targets + row) - first
    own = (target >= 0) & (target < num_tokens)
    # As a block of one: a target that is not here is "beyond the last one".
    z, _ = _logits(logits, bias, tl.where(own, target, num_tokens) + tl.arange(0, 1), num_tokens, SOFTCAP, WIDE)
    tl.store(peaks + row, peak)
    tl.store(totals + row, tl.sum(sums, 0))
    tl.store(target_logits + row, tl.where(own, tl.sum(z, 0), absent))


@triton.jit
def gradient_kernel(
    logits, bias, targets, peaks, totals, row_stride, num_tokens, first,
    SOFTCAP: tl.constexpr, LIFT: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One block of a row: LIFT (softmax - one-hot), times the soft cap's slope, over its logits."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    logits += row * row_stride
    z, slope = _logits(logits, bias, columns, num_tokens, SOFTCAP, WIDE)
    gradient = tl.exp(z - tl.load(peaks + row)) * (LIFT / tl.load(totals + row))
    gradient -= tl.where(columns == tl.load(targets + row) - first, LIFT, 0.0)
    gradient *= slope
    tl.store(logits + columns, gradient.to(logits.dtype.element_ty), mask=columns < num_tokens)


def softmax(
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    softcap: float | None,
    lift: float | None,
    vocabulary: Vocabulary | None,
) -> torch.Tensor:
    """See chunked.softmax, which computes the same."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    (num_rows, num_tokens), first = logits.shape, vocabulary.first if vocabulary else 0
    peaks, totals, target_logits = (logits.new_empty(num_rows, dtype=wide) for _ in range(3))
    absent = 0.0 if vocabulary else math.nan  # a target that no rank has must not pass for one
    options: dict[str, Any] = {
        "SOFTCAP": softcap,
        "WIDE": tl.float64 if wide == torch.float64 else tl.float32,
        "BLOCK": BLOCK,
        "num_warps": NUM_WARPS,
    }
    statistics_kernel[(num_rows,)](
        logits, bias, targets, peaks, totals, target_logits, logits.stride(0), num_tokens, first, absent, **options
    )
    if vocabulary:
        # Three numbers a row, from every rank to all.
        own, peaks = peaks, vocabulary.largest(peaks)
        totals, target_logits = vocabulary.add_up(torch.stack([totals * (own - peaks).exp(), target_logits]))
    if lift is not None:
        gradient_kernel[num_rows, triton.cdiv(num_tokens, BLOCK)](
            logits, bias, targets, peaks, totals, logits.stride(0), num_tokens, first, LIFT=lift, **options
        )
    return (totals.log() + (peaks - target_logits)).sum()
