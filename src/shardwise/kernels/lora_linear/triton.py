"""The backend in Triton; backend.Backend defines each function.

Large products are the vendor's. What an adapter adds to them costs at most one pass over memory:
the result starts out as bias and adapter's product, written once, and the vendor's product adds to
it as it stores its tiles. The gradient of the input is computed alike, one linear after the other.
"""

from __future__ import annotations

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
    x: torch.Tensor, a: torch.Tensor, drop: Dropout | None, dtype: torch.dtype
) -> torch.Tensor:
    """Return h = drop(x) a^T [rows, linears * R] of x [rows, D]."""
    h = a.new_empty(len(x), len(a), dtype=dtype)
    num_masks, rank, block = _factors(h, len(a), drop)
    if len(x):
        grid = _grid(len(x), "BLOCK_ROWS", num_masks * _ceil_div(rank, block))
        kernels.project_kernel[grid](
            *(_matrix(x), _matrix(a), _matrix(h), _mask(drop, x.shape[1])),
            *(*x.shape, rank, num_masks),
            KEPT=_kept_scale(drop),
            BLOCK_R=block,
            **_dtypes(h, drop),
        )
    return h


def product(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    h: torch.Tensor,
    b: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Return y = x weight^T + bias + scale h b^T [rows, out]."""
    y = x.new_empty(len(x), len(weight))
    _expand(y, h, b.t(), bias, None, scale)
    return y.addmm_(x, weight.t())


def output_gradients(
    dy: torch.Tensor, b: torch.Tensor | None, h: torch.Tensor | None, scale: float
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return g = scale dy b [rows, R] and db = scale dy^T h [out, R], each None if not needed."""
    factor: Any = b if h is None else h
    (num_rows, num_columns), rank = dy.shape, factor.shape[1]
    wide = torch.promote_types(factor.dtype, torch.float32)
    block, columns = _factors(factor, rank, None)[2], COLUMN_BYTES // factor.itemsize
    num_stripes, num_blocks = _ceil_div(num_rows, STRIPE), _ceil_div(num_columns, columns)
    g_parts = None if b is None else dy.new_empty(num_blocks, num_rows, rank, dtype=wide)
    db_parts = None if h is None else dy.new_empty(num_stripes, num_columns, rank, dtype=wide)
    if num_rows:
        kernels.output_gradients_kernel[num_stripes, num_blocks, _ceil_div(rank, block)](
            _matrix(dy),
            None if b is None else _matrix(b),
            None if h is None else _matrix(h),
            *(g_parts, db_parts, num_rows, num_columns, rank, 1),
            BLOCK_R=block,
            STRIPE=STRIPE,
            BLOCK_COLUMNS=columns,
            **_dtypes(factor),
        )
    parts = ((g_parts, factor.dtype), (db_parts, wide))
    sums = iter(_sums([(x, dtype) for x, dtype in parts if x is not None], scale))
    return None if b is None else next(sums), None if h is None else next(sums)


def input_gradient(
    dys: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
    g: torch.Tensor,
    a: torch.Tensor,
    drop: Dropout | None,
) -> torch.Tensor:
    """Return dx = sum over i of dy_i weight_i + drop_i(g_i a_i) [rows, in]."""
    dx = dys[0].new_empty(len(g), a.shape[1])
    _expand(dx, g, a, None, drop, _kept_scale(drop))
    for dy, weight in zip(dys, weights):
        dx.addmm_(dy, weight)
    return dx


def factor_gradient(g: torch.Tensor, x: torch.Tensor, drop: Dropout | None) -> torch.Tensor:
    """Return da = g^T drop(x) [linears * R, in]."""
    (num_rows, num_features), num_factors = x.shape, g.shape[1]
    num_masks, rank, block = _factors(g, num_factors, drop)
    num_stripes = _ceil_div(num_rows, STRIPE)
    wide = torch.promote_types(g.dtype, torch.float32)
    parts = g.new_empty(num_stripes, num_factors, num_features, dtype=wide)
    if num_rows:
        num_tiles = num_masks * _ceil_div(rank, block)
        grid = _grid(num_features, "BLOCK_FEATURES", num_tiles, num_stripes)
        kernels.factor_gradient_kernel[grid](
            *(_matrix(g), _matrix(x), parts, _mask(drop, num_features)),
            *(num_rows, num_features, rank, num_masks),
            BLOCK_R=block,
            STRIPE=STRIPE,
            **_dtypes(g, drop),
        )
    return _sums([(parts, wide)], _kept_scale(drop))[0]


def _expand(
    out: torch.Tensor,
    left: torch.Tensor,
    right: torch.Tensor,
    bias: torch.Tensor | None,
    drop: Dropout | None,
    scale: float,
) -> None:
    """Write out = bias + scale drop(left right) [rows, features]."""
    num_rows, num_features = out.shape
    if num_rows == 0:
        return
    num_masks, rank, block = _factors(left, len(right), drop)

    def grid(blocks: dict[str, int]) -> tuple[int]:
        num_row_blocks = _ceil_div(num_rows, blocks["BLOCK_ROWS"])
        return (num_row_blocks * _ceil_div(num_features, blocks["BLOCK_FEATURES"]),)

    kernels.expand_kernel[grid](
        *(_matrix(out), _matrix(left), _matrix(right)),
        None if bias is None else bias.contiguous(),
        *(_mask(drop, num_features), num_rows, num_features, rank, num_masks),
        SCALE=scale,
        BLOCK_R=block,
        **_dtypes(left, drop),
    )


def _sums(terms: list[tuple[torch.Tensor, torch.dtype]], scale: float) -> list[torch.Tensor]:
    """Return scale times the sums over the first dim of one or two tensors, in dtypes."""
    totals = [parts.new_empty(parts.shape[1:], dtype=dtype) for parts, dtype in terms]
    given = [(parts, y, len(parts), y.numel()) for (parts, _), y in zip(terms, totals)]
    kernels.sum_kernel[(sum(_ceil_div(sizes[3], 1024) for sizes in given),)](
        *(given[0], given[-1]), SCALE=scale, WIDE=_triton_dtype(terms[0][0].dtype), BLOCK=1024
    )
    return totals


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


def _factors(factor: torch.Tensor, num_factors: int, drop: Dropout | None) -> tuple[int, int, int]:
    """Return the number of masks, the rank that each covers, and how much of it a program takes."""
    num_masks = 1 if drop is None else len(drop.seeds)
    rank = num_factors // num_masks
    block = max(1 << (rank - 1).bit_length(), 16)
    return num_masks, rank, min(block, FACTOR_BYTES // factor.itemsize)


def _grid(size: int, block: str, *others: int) -> Callable[[dict[str, int]], tuple[int, ...]]:
    """Return the grid of a kernel: the blocks of `size` times others[0], and an axis per other."""
    return lambda blocks: (_ceil_div(size, blocks[block]) * others[0], *others[1:])


def _ceil_div(size: int, block: int) -> int:
    """Return the number of blocks. `triton.cdiv` takes the host 5 us, a quarter of a launch."""
    return -(-size // block)


def _dtypes(factor: torch.Tensor, drop: object = None) -> dict[str, Any]:
    """Return the dtypes in which tiles are multiplied and summed, by the dtype of the adapter."""
    tf32 = torch.backends.cuda.matmul.fp32_precision == "tf32"
    return _constants(factor.dtype, tf32, drop is not None)


@cache
def _constants(dtype: torch.dtype, tf32: bool, drops: bool) -> dict[str, Any]:
    # The interpreter cannot multiply bfloat16.
    dot = torch.float32 if INTERPRETED and dtype == torch.bfloat16 else dtype
    return {
        "DOT": _triton_dtype(dot),
        "WIDE": _triton_dtype(torch.promote_types(dtype, torch.float32)),
        "PRECISION": "tf32" if tf32 else "ieee",
        "CASE": f"{dtype} {'dropped' if drops else 'whole'}",
    }


@cache
def _triton_dtype(dtype: torch.dtype) -> Any:
    return getattr(tl, str(dtype).removeprefix("torch."))
