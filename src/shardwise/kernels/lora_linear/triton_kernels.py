"""The kernels of triton.py: everything except large products, each in one pass over a large matrix.

A matrix is (pointer, stride of rows, stride of columns), so that views need no copy. Offsets have
64 bits, since rows times features passes 2^31. Tiles are multiplied in dtype DOT and summed in
WIDE: float32, or float64 for float64. A sum over programs goes through memory, one part per
program, and the parts are added in order: the result does not depend on which program is first.

Without dropout, the adapters of all linears count as one of rank linears * R (`num_masks` is 1).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import triton
import triton.language as tl

from shardwise.kernels.dropout import MULTIPLIERS
from shardwise.kernels.triton_support import INTERPRETED

_FIRST, _SECOND = (tl.constexpr(number) for number in MULTIPLIERS)


class Tuned:
    """A kernel with the fastest of some (blocks, warps, stages).

    It chooses for every size of the matrices except the number of rows; CASE stands for what else
    the choice depends on, as the tuner does not look into tuples. Where a size is met first, each
    choice is compiled and run for some milliseconds. Triton keeps the result on disk. Later calls
    pass by the tuner, which takes the host as long as a launch does.
    """

    def __init__(self, tuner: Any) -> None:
        self.tuner = tuner
        self.chosen: dict[tuple[Any, ...], dict[str, Any]] = {}

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        """Return the kernel over a grid of programs."""
        return partial(self._run, grid)

    def _run(self, grid: Any, *args: Any, **options: Any) -> None:
        sizes = args[-3:]  # num_features, rank and num_masks
        key = (*sizes, options["CASE"])
        if key in self.chosen:
            self.tuner.fn[grid](*args, **options, **self.chosen[key])
        else:
            self.tuner[grid](*args, **options)
            self.chosen[key] = self.tuner.best_config.all_kwargs()


def _tuned(*configs: tuple[dict[str, int], int, int]) -> Callable[[Any], Tuned]:
    """Return a decorator for kernels whose last positional arguments are the sizes that count."""
    choices = []
    for blocks, warps, stages in configs:
        choices.append(triton.Config(blocks, num_warps=warps, num_stages=stages))
    if INTERPRETED:  # a tile takes seconds, and no choice is faster: small tiles, but several
        choices = [triton.Config(dict.fromkeys(configs[0][0], 16))]

    def seconds(call: Any, quantiles: Any) -> Any:
        return triton.testing.do_bench(call, warmup=5, rep=20, quantiles=quantiles)

    key = ["num_features", "rank", "num_masks", "CASE"]
    tune = triton.autotune(choices, key=key, do_bench=seconds, cache_results=True)
    return lambda kernel: Tuned(tune(kernel))


@triton.jit
def _tile(x, rows, row_inside, columns, column_inside):
    """Load a tile of a matrix, 0 outside."""
    offsets = rows.to(tl.int64)[:, None] * x[1] + columns.to(tl.int64)[None, :] * x[2]
    return tl.load(x[0] + offsets, mask=row_inside[:, None] & column_inside[None, :], other=0.0)


@triton.jit
def _put(x, tile, rows, row_inside, columns, column_inside):
    """Store a tile of a matrix."""
    offsets = rows.to(tl.int64)[:, None] * x[1] + columns.to(tl.int64)[None, :] * x[2]
    inside = row_inside[:, None] & column_inside[None, :]
    tl.store(x[0] + offsets, tile.to(x[0].dtype.element_ty), mask=inside)


@triton.jit
def _mix(x):
    """Return dropout.mix of x, uint32."""
    x = (x ^ (x >> 16)) * _FIRST
    x = (x ^ (x >> 15)) * _SECOND
    return x ^ (x >> 16)


@triton.jit
def _keep(drop, mask, rows, row_inside, columns, column_inside):
    """Return a tile of a dropout mask, as dropout.Dropout.keep does.

    `drop` is (seeds, their stride from mask to mask, features, threshold).
    """
    seeds = tl.load(drop[0] + mask * drop[1] + rows, mask=row_inside, other=0)
    features = tl.load(drop[2] + columns, mask=column_inside, other=0)
    mixed = _mix(features.to(tl.uint32, bitcast=True))
    hashed = _mix(seeds.to(tl.uint32, bitcast=True)[:, None] ^ mixed[None, :])
    return hashed.to(tl.int32, bitcast=True) >= drop[3]


@_tuned(
    ({"BLOCK_ROWS": 32, "BLOCK_FEATURES": 128}, 4, 3),
    ({"BLOCK_ROWS": 64, "BLOCK_FEATURES": 64}, 4, 4),
    ({"BLOCK_ROWS": 64, "BLOCK_FEATURES": 128}, 8, 3),
)
@triton.jit
def project_kernel(
    x, a, h, drop, num_rows, num_features, rank, num_masks,
    DOT: tl.constexpr, WIDE: tl.constexpr, KEPT: tl.constexpr, PRECISION: tl.constexpr,
    CASE: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    BLOCK_FEATURES: tl.constexpr,
):  # fmt: skip
    """Compute a tile of h = KEPT keep(x) a^T.

    Programs that read the same rows of x run side by side, so that all but the first read L2.
    """
    blocks = tl.cdiv(rank, BLOCK_R)
    mask = tl.program_id(0) % (blocks * num_masks) // blocks
    factors = tl.program_id(0) % blocks * BLOCK_R + tl.arange(0, BLOCK_R)
    rows = tl.program_id(0) // (blocks * num_masks) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    row_inside, factor_inside = rows < num_rows, factors < rank
    total = tl.zeros((BLOCK_ROWS, BLOCK_R), WIDE)
    for start in range(0, num_features, BLOCK_FEATURES):
        features = start + tl.arange(0, BLOCK_FEATURES)
        feature_inside = features < num_features
        x_tile = _tile(x, rows, row_inside, features, feature_inside)
        if drop is not None:
            keep = _keep(drop, mask, rows, row_inside, features, feature_inside)
            x_tile = tl.where(keep, x_tile, 0.0)
        a_tile = _tile(a, mask * rank + factors, factor_inside, features, feature_inside)
        total = tl.dot(
            x_tile.to(DOT), tl.trans(a_tile.to(DOT)), total,
            input_precision=PRECISION, out_dtype=WIDE,
        )  # fmt: skip
    _put(h, total * KEPT, rows, row_inside, mask * rank + factors, factor_inside)


@triton.jit
def _add_product(
    total, left, right, first, rank, rows, row_inside, columns, column_inside,
    DOT: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Return total + left right, for `rank` columns of left and rows of right from `first` on."""
    for start in range(0, rank, BLOCK_R):
        factors = start + tl.arange(0, BLOCK_R)
        left_tile = _tile(left, rows, row_inside, first + factors, factors < rank)
        right_tile = _tile(right, first + factors, factors < rank, columns, column_inside)
        total = tl.dot(
            left_tile.to(DOT), right_tile.to(DOT), total,
            input_precision=PRECISION, out_dtype=WIDE,
        )  # fmt: skip
    return total


@_tuned(
    ({"BLOCK_ROWS": 64, "BLOCK_FEATURES": 64}, 4, 1),
    ({"BLOCK_ROWS": 64, "BLOCK_FEATURES": 128}, 4, 1),
    ({"BLOCK_ROWS": 128, "BLOCK_FEATURES": 128}, 8, 1),
)
@triton.jit
def expand_kernel(
    out, left, right, bias, drop, num_rows, num_features, rank, num_masks,
    DOT: tl.constexpr, WIDE: tl.constexpr, SCALE: tl.constexpr, PRECISION: tl.constexpr,
    CASE: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    BLOCK_FEATURES: tl.constexpr,
):  # fmt: skip
    """Compute a tile of out = bias + SCALE times the sum over masks of keep(left right).

    left [rows, num_masks * rank], right [num_masks * rank, features].
    """
    blocks = tl.cdiv(num_features, BLOCK_FEATURES)
    rows = tl.program_id(0) // blocks * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    features = tl.program_id(0) % blocks * BLOCK_FEATURES + tl.arange(0, BLOCK_FEATURES)
    row_inside, feature_inside = rows < num_rows, features < num_features
    total = tl.zeros((BLOCK_ROWS, BLOCK_FEATURES), WIDE)
    if drop is None:
        total = _add_product(
            total, left, right, 0, rank, rows, row_inside, features, feature_inside,
            DOT, WIDE, PRECISION, BLOCK_R,
        )  # fmt: skip
    else:
        for mask in range(num_masks):
            part = _add_product(
                tl.zeros((BLOCK_ROWS, BLOCK_FEATURES), WIDE),
                *(left, right, mask * rank, rank, rows, row_inside, features, feature_inside),
                *(DOT, WIDE, PRECISION, BLOCK_R),
            )
            keep = _keep(drop, mask, rows, row_inside, features, feature_inside)
            total += tl.where(keep, part, 0.0)
    total *= SCALE
    if bias is not None:
        total += tl.load(bias + features, mask=feature_inside, other=0.0).to(WIDE)[None, :]
    _put(out, total, rows, row_inside, features, feature_inside)


@_tuned(({"BLOCK_ROWS": 32}, 8, 4), ({"BLOCK_ROWS": 64}, 4, 3), ({"BLOCK_ROWS": 64}, 8, 3))
@triton.jit
def output_gradients_kernel(
    dy, b, h, g_parts, db_parts, num_rows, num_features, rank, num_masks,
    DOT: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr, CASE: tl.constexpr,
    BLOCK_R: tl.constexpr, STRIPE: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):  # fmt: skip
    """Compute the partial sums of dy b and dy^T h over STRIPE rows and BLOCK_COLUMNS columns of dy.

    dy is read once. g_parts [out / BLOCK_COLUMNS, rows, R], db_parts [rows / STRIPE, out, R], both
    contiguous. b or h is None where its product is not needed.
    """
    features = tl.program_id(1) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    factors = tl.program_id(2) * BLOCK_R + tl.arange(0, BLOCK_R)
    feature_inside, factor_inside = features < num_features, factors < rank
    if b is not None:
        b_tile = _tile(b, features, feature_inside, factors, factor_inside).to(DOT)
        g = (g_parts + tl.program_id(1).to(tl.int64) * num_rows * rank, rank, 1)
    db = tl.zeros((BLOCK_COLUMNS, BLOCK_R), WIDE)
    for start in range(0, STRIPE, BLOCK_ROWS):
        rows = tl.program_id(0) * STRIPE + start + tl.arange(0, BLOCK_ROWS)
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
    ({"BLOCK_FEATURES": 64, "BLOCK_ROWS": 64}, 4, 3),
    ({"BLOCK_FEATURES": 128, "BLOCK_ROWS": 32}, 4, 4),
    ({"BLOCK_FEATURES": 128, "BLOCK_ROWS": 64}, 8, 3),
)
@triton.jit
def factor_gradient_kernel(
    g, x, da_parts, drop, num_rows, num_features, rank, num_masks,
    DOT: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr, CASE: tl.constexpr,
    BLOCK_R: tl.constexpr, STRIPE: tl.constexpr, BLOCK_FEATURES: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):  # fmt: skip
    """Compute the partial sum over STRIPE rows of a tile of g^T keep(x).

    da_parts [rows / STRIPE, num_masks * rank, in], contiguous.
    """
    blocks = tl.cdiv(rank, BLOCK_R)
    mask = tl.program_id(0) % (blocks * num_masks) // blocks
    factors = tl.program_id(0) % blocks * BLOCK_R + tl.arange(0, BLOCK_R)
    first = tl.program_id(0) // (blocks * num_masks) * BLOCK_FEATURES
    features = first + tl.arange(0, BLOCK_FEATURES)
    feature_inside, factor_inside = features < num_features, factors < rank
    da = tl.zeros((BLOCK_R, BLOCK_FEATURES), WIDE)
    for start in range(0, STRIPE, BLOCK_ROWS):
        rows = tl.program_id(1) * STRIPE + start + tl.arange(0, BLOCK_ROWS)
        row_inside = rows < num_rows
        x_tile = _tile(x, rows, row_inside, features, feature_inside)
        if drop is not None:
            keep = _keep(drop, mask, rows, row_inside, features, feature_inside)
            x_tile = tl.where(keep, x_tile, 0.0)
        g_tile = _tile(g, rows, row_inside, mask * rank + factors, factor_inside)
        da = tl.dot(
            tl.trans(g_tile.to(DOT)), x_tile.to(DOT), da,
            input_precision=PRECISION, out_dtype=WIDE,
        )  # fmt: skip
    offset = tl.program_id(1).to(tl.int64) * num_masks * rank * num_features
    part = (da_parts + offset, num_features, 1)
    _put(part, da, mask * rank + factors, factor_inside, features, feature_inside)


@triton.jit
def sum_kernel(one, other, SCALE: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    """Compute a block of one of two sums, as `_sum_block` takes them; those of `one` come first."""
    block, num_blocks = tl.program_id(0), tl.cdiv(one[3], BLOCK)
    if block < num_blocks:
        _sum_block(*one, block, SCALE, WIDE, BLOCK)
    else:
        _sum_block(*other, block - num_blocks, SCALE, WIDE, BLOCK)


@triton.jit
def _sum_block(parts, total, num_parts, size, block, SCALE, WIDE, BLOCK: tl.constexpr):
    """Compute a block of total = SCALE times the sum of parts [num_parts, size], contiguous."""
    places = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    block_sum = tl.zeros((BLOCK,), WIDE)
    for _ in range(num_parts):
        block_sum += tl.load(parts + places, mask=places < size, other=0.0)
        parts += size
    tl.store(total + places, (block_sum * SCALE).to(total.dtype.element_ty), mask=places < size)
