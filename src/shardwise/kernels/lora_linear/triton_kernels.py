"""The kernels of triton.py: what is not a large matrix product, each with one pass over the large matrix that it needs.

A matrix comes as (pointer, stride of rows, stride of columns), so that no view is ever copied. Offsets are of 64 bits:
M N passes 2^31. DOT is the dtype that tiles are multiplied in; sums are in float32, of float64 in float64. Sums over
programs go through memory, one part for each, and are added up in their order: results do not depend on who was first.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from shardwise.kernels.dropout import MULTIPLIERS
from shardwise.kernels.triton_support import INTERPRETED

_FIRST, _SECOND = (tl.constexpr(number) for number in MULTIPLIERS)


def _tuned(*configs: tuple[dict[str, int], int, int]) -> Any:
    """Let the fastest of some (tile, warps, stages) run, for each size of the matrices but the number of rows.

    CASE names what else it depends on: the tuner does not look into tuples. Each is compiled, and run for milliseconds,
    where such a size is met first; the choice is kept on disk.
    """
    choices = [triton.Config(tile, num_warps=warps, num_stages=stages) for tile, warps, stages in configs]
    if INTERPRETED:  # nothing to choose, and seconds for a tile: small ones, but more than one
        choices = [triton.Config(dict.fromkeys(configs[0][0], 16))]
    return triton.autotune(
        choices,
        key=["num_features", "rank", "modules", "CASE"],
        do_bench=lambda call, quantiles: triton.testing.do_bench(call, warmup=5, rep=20, quantiles=quantiles),
        cache_results=True,
    )


@triton.jit
def _tile(x, rows, row_inside, columns, column_inside):
    offsets = rows.to(tl.int64)[:, None] * x[1] + columns.to(tl.int64)[None, :] * x[2]
    return tl.load(x[0] + offsets, mask=row_inside[:, None] & column_inside[None, :], other=0.0)


@triton.jit
def _put(x, tile, rows, row_inside, columns, column_inside):
    offsets = rows.to(tl.int64)[:, None] * x[1] + columns.to(tl.int64)[None, :] * x[2]
    tl.store(x[0] + offsets, tile.to(x[0].dtype.element_ty), mask=row_inside[:, None] & column_inside[None, :])


@triton.jit
def _mix(x):
    """See dropout.mix; uint32."""
    x = (x ^ (x >> 16)) * _FIRST
    x = (x ^ (x >> 15)) * _SECOND
    return x ^ (x >> 16)


@triton.jit
def _keep(drop, module, rows, row_inside, columns, column_inside):
    """See dropout.Dropout.keep; drop is (seeds, from one module's to the next one's, features, threshold)."""
    seeds = tl.load(drop[0] + module * drop[1] + rows, mask=row_inside, other=0)
    features = tl.load(drop[2] + columns, mask=column_inside, other=0)
    mixed = _mix(features.to(tl.uint32, bitcast=True))
    hashed = _mix(seeds.to(tl.uint32, bitcast=True)[:, None] ^ mixed[None, :])
    return hashed.to(tl.int32, bitcast=True) >= drop[3]


@_tuned(
    ({"BLOCK_M": 32, "BLOCK_K": 128}, 4, 3),
    ({"BLOCK_M": 64, "BLOCK_K": 64}, 4, 4),
    ({"BLOCK_M": 64, "BLOCK_K": 128}, 8, 3),
)
@triton.jit
def project_kernel(
    x, a, h, drop, num_rows, num_features, rank, modules,
    DOT: tl.constexpr, WIDE: tl.constexpr, KEPT: tl.constexpr, PRECISION: tl.constexpr, CASE: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Tile of h = KEPT keep(x) a^T. Programs that read the same rows of x run side by side: it comes from L2 then."""
    blocks = tl.cdiv(rank, BLOCK_R)
    module = tl.program_id(0) % (blocks * modules) // blocks
    factors = tl.program_id(0) % blocks * BLOCK_R + tl.arange(0, BLOCK_R)
    rows = tl.program_id(0) // (blocks * modules) * BLOCK_M + tl.arange(0, BLOCK_M)
    row_inside, factor_inside = rows < num_rows, factors < rank
    total = tl.zeros((BLOCK_M, BLOCK_R), WIDE)
    for start in range(0, num_features, BLOCK_K):
        features = start + tl.arange(0, BLOCK_K)
        feature_inside = features < num_features
        x_tile = _tile(x, rows, row_inside, features, feature_inside)
        if drop is not None:
            x_tile = tl.where(_keep(drop, module, rows, row_inside, features, feature_inside), x_tile, 0.0)
        a_tile = _tile(a, module * rank + factors, factor_inside, features, feature_inside)
        total = tl.dot(x_tile.to(DOT), tl.trans(a_tile.to(DOT)), total, input_precision=PRECISION, out_dtype=WIDE)
    _put(h, total * KEPT, rows, row_inside, module * rank + factors, factor_inside)


@triton.jit
def _add_product(
    total, left, right, first, rank, rows, row_inside, columns, column_inside,
    DOT: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Add to a tile the product of `rank` columns of left and rows of right, from the first on."""
    for start in range(0, rank, BLOCK_R):
        factors = start + tl.arange(0, BLOCK_R)
        left_tile = _tile(left, rows, row_inside, first + factors, factors < rank)
        right_tile = _tile(right, first + factors, factors < rank, columns, column_inside)
        total = tl.dot(left_tile.to(DOT), right_tile.to(DOT), total, input_precision=PRECISION, out_dtype=WIDE)
    return total


@_tuned(
    ({"BLOCK_M": 64, "BLOCK_K": 64}, 4, 1),
    ({"BLOCK_M": 64, "BLOCK_K": 128}, 4, 1),
    ({"BLOCK_M": 128, "BLOCK_K": 128}, 8, 1),
)
@triton.jit
def expand_kernel(
    out, left, right, bias, drop, num_rows, num_features, rank, modules,
    DOT: tl.constexpr, WIDE: tl.constexpr, SCALE: tl.constexpr, PRECISION: tl.constexpr, CASE: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Tile of out = bias + SCALE sum over modules of keep(left right)."""
    blocks = tl.cdiv(num_features, BLOCK_K)
    rows = tl.program_id(0) // blocks * BLOCK_M + tl.arange(0, BLOCK_M)
    features = tl.program_id(0) % blocks * BLOCK_K + tl.arange(0, BLOCK_K)
    row_inside, feature_inside = rows < num_rows, features < num_features
    total = tl.zeros((BLOCK_M, BLOCK_K), WIDE)
    if drop is None:
        total = _add_product(
            total, left, right, 0, rank, rows, row_inside, features, feature_inside, DOT, WIDE, PRECISION, BLOCK_R
        )
    else:
        for module in range(modules):
            part = _add_product(
                tl.zeros((BLOCK_M, BLOCK_K), WIDE),
                *(left, right, module * rank, rank, rows, row_inside, features, feature_inside),
                *(DOT, WIDE, PRECISION, BLOCK_R),
            )
            total += tl.where(_keep(drop, module, rows, row_inside, features, feature_inside), part, 0.0)
    total *= SCALE
    if bias is not None:
        total += tl.load(bias + features, mask=feature_inside, other=0.0).to(WIDE)[None, :]
    _put(out, total, rows, row_inside, features, feature_inside)


@_tuned(
    ({"BLOCK_M": 32}, 8, 4),
    ({"BLOCK_M": 64}, 4, 3),
    ({"BLOCK_M": 64}, 8, 3),
)
@triton.jit
def output_gradients_kernel(
    dy, b, h, g_parts, db_parts, num_rows, num_features, rank, modules,
    DOT: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr, CASE: tl.constexpr, BLOCK_R: tl.constexpr,
    STRIPE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Of STRIPE rows and BLOCK_N columns of dy, read once: their summands of dy b and of dy^T h.

    g_parts [N / BLOCK_N, M, R] and db_parts [M / STRIPE, N, R], contiguous; without b or h, None.
    """
    features = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    factors = tl.program_id(2) * BLOCK_R + tl.arange(0, BLOCK_R)
    feature_inside, factor_inside = features < num_features, factors < rank
    if b is not None:
        b_tile = _tile(b, features, feature_inside, factors, factor_inside).to(DOT)
        g = (g_parts + tl.program_id(1).to(tl.int64) * num_rows * rank, rank, 1)
    db = tl.zeros((BLOCK_N, BLOCK_R), WIDE)
    for start in range(0, STRIPE, BLOCK_M):
        rows = tl.program_id(0) * STRIPE + start + tl.arange(0, BLOCK_M)
        row_inside = rows < num_rows
        tile = _tile(dy, rows, row_inside, features, feature_inside).to(DOT)
        if b is not None:
            part = tl.dot(tile, b_tile, input_precision=PRECISION, out_dtype=WIDE)
            _put(g, part, rows, row_inside, factors, factor_inside)
        if h is not None:
            h_tile = _tile(h, rows, row_inside, factors, factor_inside).to(DOT)
            db = tl.dot(tl.trans(tile), h_tile, db, input_precision=PRECISION, out_dtype=WIDE)
    if h is not None:
        part = (db_parts + tl.program_id(0).to(tl.int64) * num_features * rank, rank, 1)
        _put(part, db, features, feature_inside, factors, factor_inside)


@_tuned(
    ({"BLOCK_K": 64, "BLOCK_M": 64}, 4, 3),
    ({"BLOCK_K": 128, "BLOCK_M": 32}, 4, 4),
    ({"BLOCK_K": 128, "BLOCK_M": 64}, 8, 3),
)
@triton.jit
def factor_gradient_kernel(
    g, x, da_parts, drop, num_rows, num_features, rank, modules,
    DOT: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr, CASE: tl.constexpr, BLOCK_R: tl.constexpr,
    STRIPE: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Of STRIPE rows, their summand of a tile of g^T keep(x); da_parts [M / STRIPE, S*R, K], contiguous."""
    blocks = tl.cdiv(rank, BLOCK_R)
    module = tl.program_id(0) % (blocks * modules) // blocks
    factors = tl.program_id(0) % blocks * BLOCK_R + tl.arange(0, BLOCK_R)
    features = tl.program_id(0) // (blocks * modules) * BLOCK_K + tl.arange(0, BLOCK_K)
    feature_inside, factor_inside = features < num_features, factors < rank
    da = tl.zeros((BLOCK_R, BLOCK_K), WIDE)
    for start in range(0, STRIPE, BLOCK_M):
        rows = tl.program_id(1) * STRIPE + start + tl.arange(0, BLOCK_M)
        row_inside = rows < num_rows
        x_tile = _tile(x, rows, row_inside, features, feature_inside)
        if drop is not None:
            x_tile = tl.where(_keep(drop, module, rows, row_inside, features, feature_inside), x_tile, 0.0)
        g_tile = _tile(g, rows, row_inside, module * rank + factors, factor_inside)
        da = tl.dot(tl.trans(g_tile.to(DOT)), x_tile.to(DOT), da, input_precision=PRECISION, out_dtype=WIDE)
    part = (da_parts + tl.program_id(1).to(tl.int64) * modules * rank * num_features, num_features, 1)
    _put(part, da, module * rank + factors, factor_inside, features, feature_inside)


@triton.jit
def sum_kernel(parts, total, num_parts, size, SCALE: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    """A block of total = SCALE times the sum of its parts, which lie `size` numbers apart."""
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    found = tl.zeros((BLOCK,), WIDE)
    for _ in range(num_parts):
        found += tl.load(parts + places, mask=places < size, other=0.0)
        parts += size
    tl.store(total + places, (found * SCALE).to(total.dtype.element_ty), mask=places < size)
