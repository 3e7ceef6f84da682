"""The kernels of triton.py: everything except large products, each in one pass over a large matrix.

A matrix is (pointer, stride of rows, stride of columns), so that views need no copy. Offsets have
64 bits, since rows times features passes 2^31. Tiles are multiplied in dtype DOT and summed in
WIDE: float32, or float64 for float64. A sum over programs goes through memory, one part per
program, and the parts are added in order: the result does not depend on which program is first.

Where an input is projected and in the gradient of a factor, the adapters of all linears count as
one of rank linears * R without dropout (`num_masks` is 1). What differs between linears (outputs,
their sizes, b's) comes as a tuple with an entry for each.
"""

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
        self.chosen: dict[Any, dict[str, Any]] = {}

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        """Return the kernel over a grid of programs."""
        return partial(self._run, grid)

    def _run(self, grid: Any, *args: Any, **options: Any) -> None:
        # num_features, rank and the number of masks or linears
        key = args[-3:], options["CASE"]
        chosen = self.chosen.get(key)
        if chosen is not None:
            self.tuner.fn[grid](*args, **options, **chosen)
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

    key = ["num_features", "rank", "num_masks", "num_linears", "CASE"]
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
    total, left, first, right, rank, rows, row_inside, columns, column_inside,
    DOT: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Return total + left right, for `rank` columns of left from `first` on."""
    for start in range(0, rank, BLOCK_R):
        factors = start + tl.arange(0, BLOCK_R)
        left_tile = _tile(left, rows, row_inside, first + factors, factors < rank)
        right_tile = _tile(right, factors, factors < rank, columns, column_inside)
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
    outs, sizes, left, rights, biases, num_rows, num_features, rank, num_linears,
    SCALES: tl.constexpr, NUM_LINEARS: tl.constexpr, DOT: tl.constexpr, WIDE: tl.constexpr,
    PRECISION: tl.constexpr, CASE: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    BLOCK_FEATURES: tl.constexpr,
):  # fmt: skip
    """Compute a tile of out = bias + SCALE left right of one of the linears.

    left [rows, linears * rank]; outs [rows, size] and rights [rank, size], one per linear. The
    tiles of one linear come after those of another. `biases`: None, or one per linear.
    """
    block = tl.program_id(0)
    for i in tl.static_range(NUM_LINEARS):
        blocks = tl.cdiv(sizes[i], BLOCK_FEATURES)
        num_blocks = blocks * tl.cdiv(num_rows, BLOCK_ROWS)
        if (block >= 0) & (block < num_blocks):
            rows = block // blocks * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
            features = block % blocks * BLOCK_FEATURES + tl.arange(0, BLOCK_FEATURES)
            row_inside, feature_inside = rows < num_rows, features < sizes[i]
            total = _add_product(
                tl.zeros((BLOCK_ROWS, BLOCK_FEATURES), WIDE),
                *(left, i * rank, rights[i], rank, rows, row_inside, features, feature_inside),
                *(DOT, WIDE, PRECISION, BLOCK_R),
            )
            total *= SCALES[i]
            if biases is not None:
                bias = tl.load(biases[i] + features, mask=feature_inside, other=0.0)
                total += bias.to(WIDE)[None, :]
            _put(outs[i], total, rows, row_inside, features, feature_inside)
        block -= num_blocks


@_tuned(
    ({"BLOCK_ROWS": 64, "BLOCK_FEATURES": 64}, 4, 1),
    ({"BLOCK_ROWS": 64, "BLOCK_FEATURES": 128}, 4, 1),
    ({"BLOCK_ROWS": 128, "BLOCK_FEATURES": 128}, 8, 1),
)
@triton.jit
def combine_kernel(
    out, left, rights, drop, num_rows, num_features, rank, num_linears,
    KEPT: tl.constexpr, NUM_LINEARS: tl.constexpr, DOT: tl.constexpr, WIDE: tl.constexpr,
    PRECISION: tl.constexpr, CASE: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    BLOCK_FEATURES: tl.constexpr,
):  # fmt: skip
    """Compute a tile of out = KEPT times the sum over linears of keep(left right).

    left [rows, linears * rank]; rights [rank, features], one per linear.
    """
    blocks = tl.cdiv(num_features, BLOCK_FEATURES)
    rows = tl.program_id(0) // blocks * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    features = tl.program_id(0) % blocks * BLOCK_FEATURES + tl.arange(0, BLOCK_FEATURES)
    row_inside, feature_inside = rows < num_rows, features < num_features
    total = tl.zeros((BLOCK_ROWS, BLOCK_FEATURES), WIDE)
    for i in tl.static_range(NUM_LINEARS):
        if drop is None:
            total = _add_product(
                total, left, i * rank, rights[i], rank, rows, row_inside, features, feature_inside,
                DOT, WIDE, PRECISION, BLOCK_R,
            )  # fmt: skip
        else:
            part = _add_product(
                tl.zeros((BLOCK_ROWS, BLOCK_FEATURES), WIDE),
                *(left, i * rank, rights[i], rank, rows, row_inside, features, feature_inside),
                *(DOT, WIDE, PRECISION, BLOCK_R),
            )
            keep = _keep(drop, i, rows, row_inside, features, feature_inside)
            total += tl.where(keep, part, 0.0)
    _put(out, total * KEPT, rows, row_inside, features, feature_inside)


@_tuned(({"BLOCK_ROWS": 32}, 8, 4), ({"BLOCK_ROWS": 64}, 4, 3), ({"BLOCK_ROWS": 64}, 8, 3))
@triton.jit
def output_gradients_kernel(
    dys, sizes, bs, h, g_parts, db_parts, num_rows, num_features, rank, num_linears,
    SCALES: tl.constexpr, NUM_LINEARS: tl.constexpr, DOT: tl.constexpr, WIDE: tl.constexpr,
    PRECISION: tl.constexpr, CASE: tl.constexpr, BLOCK_R: tl.constexpr, STRIPE: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr, BLOCK_ROWS: tl.constexpr,
):  # fmt: skip
    """Compute partial sums of SCALE dy b and SCALE dy^T h over STRIPE rows and BLOCK_COLUMNS of dy.

    dys [rows, size] and bs [size, rank], one per linear, h [rows, linears * rank]. Each dy is read
    once, and its blocks of columns come after those of another. g_parts [blocks, rows, rank],
    db_parts [rows / STRIPE, num_features, rank], both contiguous; num_features is the sum of the
    sizes. bs or h is None where its product is not needed.
    """
    block, first = tl.program_id(1), 0
    for i in tl.static_range(NUM_LINEARS):
        num_blocks = tl.cdiv(sizes[i], BLOCK_COLUMNS)
        if (block >= 0) & (block < num_blocks):
            features = block * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
            factors = tl.program_id(2) * BLOCK_R + tl.arange(0, BLOCK_R)
            feature_inside, factor_inside = features < sizes[i], factors < rank
            if bs is not None:
                b_tile = _tile(bs[i], features, feature_inside, factors, factor_inside).to(DOT)
                g = (g_parts + tl.program_id(1).to(tl.int64) * num_rows * rank, rank, 1)
            db = tl.zeros((BLOCK_COLUMNS, BLOCK_R), WIDE)
            for start in range(0, STRIPE, BLOCK_ROWS):
                rows = tl.program_id(0) * STRIPE + start + tl.arange(0, BLOCK_ROWS)
                row_inside = rows < num_rows
                tile = _tile(dys[i], rows, row_inside, features, feature_inside).to(DOT)
                if bs is not None:
                    part = tl.dot(tile, b_tile, input_precision=PRECISION, out_dtype=WIDE)
                    _put(g, part * SCALES[i], rows, row_inside, factors, factor_inside)
                if h is not None:
                    h_tile = _tile(h, rows, row_inside, i * rank + factors, factor_inside).to(DOT)
                    db = tl.dot(
                        tl.trans(tile), h_tile, db, input_precision=PRECISION, out_dtype=WIDE
                    )
            if h is not None:
                offset = (tl.program_id(0).to(tl.int64) * num_features + first) * rank
                _put(
                    (db_parts + offset, rank, 1), db * SCALES[i],
                    features, feature_inside, factors, factor_inside,
                )  # fmt: skip
        block -= num_blocks
        first += sizes[i]


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
def sum_kernel(
    terms, NUM_TERMS: tl.constexpr, SCALE: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr
):
    """Compute a block of one of several sums: total = SCALE times the sum of parts.

    A term is (parts, where they begin, their number, size, total, where it begins, width, stride):
    parts [number, size] are contiguous, and of the total each `width` numbers lie `stride` apart.
    The blocks of one term come after those of another.
    """
    block = tl.program_id(0)
    for i in tl.static_range(NUM_TERMS):
        parts, first, num_parts, size, total, begin, width, stride = terms[i]
        num_blocks = tl.cdiv(size, BLOCK)
        if (block >= 0) & (block < num_blocks):
            places = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
            block_sum = tl.zeros((BLOCK,), WIDE)
            part = parts + first
            for _ in range(num_parts):
                block_sum += tl.load(part + places, mask=places < size, other=0.0)
                part += size
            out = total + begin + places // width * stride + places % width
            tl.store(out, (block_sum * SCALE).to(total.dtype.element_ty), mask=places < size)
        block -= num_blocks
