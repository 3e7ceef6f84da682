"""Softmax, loss and gradient of a chunk of logits in Triton, in the dtype of the products.

Logits are read twice and written once. One kernel keeps the largest logit and the sum of
exponentials of a row as it reads on (Milakov and Gimelshein, "Online normalizer calculation for
softmax", arXiv 1805.02867, algorithm 3). The other overwrites the logits with their gradient.
Between the two, a few numbers per row may be reduced over the ranks that hold other tokens.
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl

from shardwise.kernels.linear_cross_entropy.vocabulary import Vocabulary

BLOCK = 4096
"""Logits of a program at a time, 16 for each of 256 threads: two loads of 16 bytes in bfloat16."""
NUM_WARPS = 8


@triton.jit
def _logits(logits, bias, columns, num_tokens, SOFTCAP: tl.constexpr, WIDE: tl.constexpr):
    """Return logits after bias and soft cap, -inf beyond the last one, and the soft cap's slope."""
    inside = columns < num_tokens
    z = tl.load(logits + columns, mask=inside, other=0.0).to(WIDE)
    if bias is not None:
        z += tl.load(bias + columns, mask=inside, other=0.0).to(WIDE)
    slope = tl.full(z.shape, 1.0, WIDE)
    if SOFTCAP is not None:
        # Triton has no tanh of its own. Taken of |z|, so that the exponential cannot overflow.
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
    """Compute the largest logit of a row, the sum of exp(logit - largest), and the target's logit.

    The last one is `absent` where the target is none of this rank's tokens.
    """
    row = tl.program_id(0).to(tl.int64)
    logits += row * row_stride
    peak = tl.full((), -3.0e38, WIDE)  # finite: exp(-inf - -inf) would be NaN
    sums = tl.zeros((BLOCK,), WIDE)
    for start in range(0, num_tokens, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        z, _ = _logits(logits, bias, columns, num_tokens, SOFTCAP, WIDE)
        larger = tl.maximum(peak, tl.max(z, 0))
        sums = sums * tl.exp(peak - larger) + tl.exp(z - larger)
        peak = larger
    target = tl.load(targets + row) - first
    is_here = (target >= 0) & (target < num_tokens)
    # A block of one column; that of a target elsewhere lies beyond the last one.
    column = tl.where(is_here, target, num_tokens) + tl.arange(0, 1)
    z, _ = _logits(logits, bias, column, num_tokens, SOFTCAP, WIDE)
    tl.store(peaks + row, peak)
    tl.store(totals + row, tl.sum(sums, 0))
    tl.store(target_logits + row, tl.where(is_here, tl.sum(z, 0), absent))


@triton.jit
def gradient_kernel(
    logits, bias, targets, peaks, totals, row_stride, num_tokens, first,
    SOFTCAP: tl.constexpr, LIFT: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Overwrite a block of a row by LIFT (softmax - one-hot), times the slope of the soft cap."""
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
    """Return the losses [rows] of logits [rows, V] and overwrite them, as chunked.softmax does."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    (num_rows, num_tokens), first = logits.shape, vocabulary.first if vocabulary else 0
    peaks, totals, target_logits = (logits.new_empty(num_rows, dtype=wide) for _ in range(3))
    # Without other ranks a label that is no token makes the loss NaN, rather than pass for one.
    absent = 0.0 if vocabulary else math.nan
    options: dict[str, Any] = {
        "SOFTCAP": softcap,
        "WIDE": tl.float64 if wide == torch.float64 else tl.float32,
        "BLOCK": BLOCK,
        "num_warps": NUM_WARPS,
    }
    place = (logits.stride(0), num_tokens, first)
    statistics_kernel[(num_rows,)](
        *(logits, bias, targets, peaks, totals, target_logits, *place, absent), **options
    )
    if vocabulary:
        # [rows], the maximum over all ranks, then [2, rows], the sum: three numbers per row.
        local_peaks, peaks = peaks, vocabulary.max_over_ranks(peaks)
        totals = totals * (local_peaks - peaks).exp()
        totals, target_logits = vocabulary.sum_over_ranks(torch.stack([totals, target_logits]))
    if lift is not None:
        gradient_kernel[num_rows, triton.cdiv(num_tokens, BLOCK)](
            *(logits, bias, targets, peaks, totals, *place), LIFT=lift, **options
        )
    return totals.log() + (peaks - target_logits)
