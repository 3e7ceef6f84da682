"""The backend in Triton; backend.Backend defines each function.

Large products are the vendor's. What an adapter adds to them costs at most one pass over memory:
the result starts out as bias and adapter's product, written once, and the vendor's product adds to
it as it stores its tiles. The gradient of the input is computed alike, one linear after the other.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
import triton.language as tl

from shardwise.kernels.dropout import Dropout, threshold
from shardwise.kernels.lora_linear import triton_kernels as kernels
from shardwise.kernels.triton_support import INTERPRETED, why_not

STRIPE = 512
"""Rows over which a program sums a factor's gradient: 8192 rows give 16 programs per tile of it."""
COLUMN_BYTES = 512
"""Bytes of a row of dy that a program of `output_gradients` reads."""
FACTOR_BYTES = 128
"""Bytes of a row of h or g that a program takes at a time: more would not fit into registers."""


def missing(device: torch.device) -> str | None:
    """Return why Triton's kernels cannot run on a device; None if they can."""
    return why_not(device)


def project(
    x: torch.Tensor, a: Sequence[torch.Tensor], drop: Dropout | None, dtype: torch.dtype
) -> torch.Tensor:
    """Return h = drop(x) a^T [rows, linears * R] of x [rows, D]."""
    stacked = a[0] if len(a) == 1 else torch.cat([*a])
    num_rows, num_features = x.shape
    num_factors = stacked.shape[0]
    h = stacked.new_empty(num_rows, num_factors, dtype=dtype)
    num_masks = 1 if drop is None else len(a)
    rank = num_factors // num_masks
    if num_rows:
        block = _block(rank, dtype)
        kernels.project_kernel[_grid(num_rows, "BLOCK_ROWS", num_masks * -(-rank // block))](
            *(_matrix(x), _matrix(stacked), _matrix(h), _mask(drop, num_features)),
            *(num_rows, num_features, rank, num_masks),
            KEPT=_kept_scale(drop),
            BLOCK_R=block,
            **_dtypes(dtype, drop),
        )
    return h


def products(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    h: torch.Tensor,
    b: Sequence[torch.Tensor],
    scales: Sequence[float],
) -> list[torch.Tensor]:
    """Return y_i = x weight_i^T + bias_i + scale_i h_i b_i^T [rows, out] of each linear."""
    num_rows, num_linears = x.shape[0], len(weights)
    sizes = tuple([weight.shape[0] for weight in weights])
    ys = [x.new_empty(num_rows, size) for size in sizes]
    if num_rows == 0:
        return ys
    given: Any = biases if biases[0] is not None or any(c is not None for c in biases) else None
    if given is not None:  # Triton 3.6 takes no None within a tuple
        given = tuple(
            x.new_zeros(size) if c is None else c.contiguous() for size, c in zip(sizes, given)
        )
    rank = b[0].shape[1]

    def grid(blocks: dict[str, int]) -> tuple[int]:
        width = blocks["BLOCK_FEATURES"]
        return (-(-num_rows // blocks["BLOCK_ROWS"]) * sum([-(-size // width) for size in sizes]),)

    kernels.expand_kernel[grid](
        tuple([(y, size, 1) for y, size in zip(ys, sizes)]),
        sizes,
        _matrix(h),
        tuple([(b_i, *b_i.stride()[::-1]) for b_i in b]),
        *(given, num_rows, sum(sizes), rank, num_linears),
        SCALES=tuple(scales),
        NUM_LINEARS=num_linears,
        BLOCK_R=_block(rank, h.dtype),
        **_dtypes(h.dtype),
    )
    for y, weight in zip(ys, weights):
        y.addmm_(x, weight.t())
    return ys


def output_gradients(
    dys: Sequence[torch.Tensor],
    b: Sequence[torch.Tensor],
    h: torch.Tensor | None,
    scales: Sequence[float],
    dtype: torch.dtype,
    needs_g: bool,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return g [rows, linears * R] of all linears and db [sum of outs, R], None if not needed."""
    first, num_linears, rank = dys[0], len(dys), b[0].shape[1]
    num_rows, wide = first.shape[0], _wide(dtype)
    sizes = tuple([dy.shape[1] for dy in dys])
    total, columns = sum(sizes), COLUMN_BYTES // dtype.itemsize
    blocks, num_stripes = [-(-size // columns) for size in sizes], -(-num_rows // STRIPE)
    block = _block(rank, dtype)
    g = g_parts = db = db_parts = None
    terms: list[tuple[Any, ...]] = []
    if needs_g:
        g = first.new_empty(num_rows, num_linears * rank, dtype=dtype)
        g_parts = first.new_empty(sum(blocks), num_rows, rank, dtype=wide)
        begin, part = 0, num_rows * rank
        for i, number in enumerate(blocks):
            places = (g, i * rank, rank, num_linears * rank)
            terms.append((g_parts, begin * part, number, part, *places))
            begin += number
    if h is not None:
        db = first.new_empty(total, rank, dtype=wide)
        db_parts = first.new_empty(num_stripes, total, rank, dtype=wide)
        terms.append((db_parts, 0, num_stripes, total * rank, db, 0, rank, rank))
    if num_rows:
        kernels.output_gradients_kernel[num_stripes, sum(blocks), -(-rank // block)](
            tuple([_matrix(dy) for dy in dys]),
            sizes,
            tuple([_matrix(b_i) for b_i in b]) if needs_g else None,
            None if h is None else _matrix(h),
            *(g_parts, db_parts, num_rows, total, rank, num_linears),
            SCALES=tuple(scales),
            NUM_LINEARS=num_linears,
            BLOCK_R=block,
            STRIPE=STRIPE,
            BLOCK_COLUMNS=columns,
            **_dtypes(dtype),
        )
    _sum(terms, wide)
    return g, db


def input_gradient(
    dys: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
    g: torch.Tensor,
    a: Sequence[torch.Tensor],
    drop: Dropout | None,
) -> torch.Tensor:
    """Return dx = sum over i of dy_i weight_i + drop_i(g_i a_i) [rows, in]."""
    (rank, num_features), num_rows, num_linears = a[0].shape, g.shape[0], len(a)
    dx = dys[0].new_empty(num_rows, num_features)
    if num_rows == 0:
        return dx

    def grid(blocks: dict[str, int]) -> tuple[int]:
        row_blocks = -(-num_rows // blocks["BLOCK_ROWS"])
        return (row_blocks * -(-num_features // blocks["BLOCK_FEATURES"]),)

    kernels.combine_kernel[grid](
        *((dx, num_features, 1), _matrix(g), tuple([_matrix(a_i) for a_i in a])),
        *(_mask(drop, num_features), num_rows, num_features, rank, num_linears),
        KEPT=_kept_scale(drop),
        NUM_LINEARS=num_linears,
        BLOCK_R=_block(rank, g.dtype),
        **_dtypes(g.dtype, drop),
    )
    for dy, weight in zip(dys, weights):
        dx.addmm_(dy, weight)
    return dx


def factor_gradient(g: torch.Tensor, x: torch.Tensor, drop: Dropout | None) -> torch.Tensor:
    """Return da = g^T drop(x) [linears * R, in]."""
    (num_rows, num_features), num_factors = x.shape, g.shape[1]
    num_masks = 1 if drop is None else len(drop.seeds)
    rank, num_stripes, wide = num_factors // num_masks, -(-num_rows // STRIPE), _wide(g.dtype)
    da = g.new_empty(num_factors, num_features, dtype=wide)
    parts = g.new_empty(num_stripes, num_factors, num_features, dtype=wide)
    if num_rows:
        block = _block(rank, g.dtype)
        num_tiles = num_masks * -(-rank // block)
        kernels.factor_gradient_kernel[
            _grid(num_features, "BLOCK_FEATURES", num_tiles, num_stripes)
        ](
            *(_matrix(g), _matrix(x), parts, _mask(drop, num_features)),
            *(num_rows, num_features, rank, num_masks),
            BLOCK_R=block,
            STRIPE=STRIPE,
            **_dtypes(g.dtype, drop),
        )
    size = num_factors * num_features
    _sum([(parts, 0, num_stripes, size, da, 0, size, size)], wide, _kept_scale(drop))
    return da


def _sum(terms: list[tuple[Any, ...]], wide: torch.dtype, scale: float = 1.0) -> None:
    """Compute totals, as `sum_kernel` takes them; one without numbers is left as it is."""
    num_blocks = sum([-(-term[3] // 1024) for term in terms])
    if num_blocks:
        kernels.sum_kernel[(num_blocks,)](
            tuple(terms), NUM_TERMS=len(terms), SCALE=scale, WIDE=_triton_dtype(wide), BLOCK=1024
        )


def _matrix(x: torch.Tensor) -> tuple[Any, ...]:
    return (x, *x.stride())


def _mask(drop: Dropout | None, num_features: int) -> tuple[Any, ...] | None:
    """Return the masks as the kernels take them, see `_keep` there; None without dropout."""
    if drop is None:
        return None
    seeds, features = drop.seeds.contiguous(), drop.features
    if features is None:  # written out: Triton 3.6 takes no None within a tuple
        features = torch.arange(num_features, dtype=torch.int32, device=seeds.device)
    return seeds, seeds.shape[1], features.contiguous(), threshold(drop.p)


def _kept_scale(drop: Dropout | None) -> float:
    """Return 1 / (1 - p), the factor of what is kept."""
    return 1.0 if drop is None else 1 / (1 - drop.p)


def _block(rank: int, dtype: torch.dtype) -> int:
    """Return how many of an adapter's factors a program takes at a time."""
    return min(max(1 << (rank - 1).bit_length(), 16), FACTOR_BYTES // dtype.itemsize)


def _grid(size: int, block: str, *others: int) -> Callable[[dict[str, int]], tuple[int, ...]]:
    """Return the grid of a kernel: the blocks of `size` times others[0], and an axis per other.

    `triton.cdiv` takes the host 5 us, a quarter of a launch.
    """
    return lambda blocks: (-(-size // blocks[block]) * others[0], *others[1:])


def _dtypes(dtype: torch.dtype, drop: object = None) -> dict[str, Any]:
    """Return the dtypes in which tiles are multiplied and summed, by the dtype of the products."""
    tf32 = dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32"
    return _constants(dtype, tf32, drop is not None)


@cache
def _constants(dtype: torch.dtype, tf32: bool, drops: bool) -> dict[str, Any]:
    # The interpreter cannot multiply bfloat16.
    dot = torch.float32 if INTERPRETED and dtype == torch.bfloat16 else dtype
    return {
        "DOT": _triton_dtype(dot),
        "WIDE": _triton_dtype(_wide(dtype)),
        "PRECISION": "tf32" if tf32 else "ieee",
        "CASE": f"{dtype} {'dropped' if drops else 'whole'}",
    }


@cache
def _wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of sums."""
    return torch.promote_types(dtype, torch.float32)


@cache
def _triton_dtype(dtype: torch.dtype) -> Any:
    return getattr(tl, str(dtype).removeprefix("torch."))
