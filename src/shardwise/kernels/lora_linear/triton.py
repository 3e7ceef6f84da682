"""The backend in Triton; backend.Backend defines each function.

Large products are the vendor's. What an adapter adds to them costs at most one pass over memory:
the result starts out as bias and adapter's product, written once, and the vendor's product adds to
it as it stores its tiles. The gradient of the input is computed alike, one linear after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from shardwise.kernels.dropout import Dropout, as_arguments, threshold
from shardwise.kernels.lora_linear import triton_kernels as kernels
from shardwise.kernels.triton_support import INTERPRETED, why_not

STRIPE = 512
"""Rows over which a program sums a factor's gradient: 8192 rows give 16 programs per tile of it."""
COLUMN_BYTES = 512
"""Bytes of a row of dy that a program of `output_gradients` reads."""
FACTOR_BYTES = 128
"""Bytes of a row of h or g that a program takes at a time: more would not fit into registers."""

operator: Any = torch.library.custom_op


def missing(device: torch.device) -> str | None:
    """Return why Triton's kernels cannot run on a device; None if they can."""
    return why_not(device)


def refused(dtypes: Iterable[torch.dtype]) -> str | None:
    """Return None: it multiplies every dtype."""
    return None


def project(x: torch.Tensor, a: torch.Tensor, drop: Dropout | None) -> torch.Tensor:
    """Return h = drop(x) a^T [rows, linears * R]."""
    return _project(x, a, *as_arguments(drop))


def product(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    h: torch.Tensor,
    b: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Return y = x weight^T + bias + scale h b^T [rows, out]."""
    return _product(x, weight, bias, h, b, scale)


def output_gradients(
    dy: torch.Tensor, b: torch.Tensor | None, h: torch.Tensor | None, scale: float
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return g = scale dy b [rows, R] and db = scale dy^T h [out, R], each None if not needed."""
    g, db = _output_gradients(dy, b, h, scale)
    return None if b is None else g, None if h is None else db


def input_gradient(
    dys: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
    g: torch.Tensor,
    a: torch.Tensor,
    drop: Dropout | None,
) -> torch.Tensor:
    """Return dx = sum over i of dy_i weight_i + drop_i(g_i a_i) [rows, in]."""
    return _input_gradient(list(dys), list(weights), g, a, *as_arguments(drop))


def factor_gradient(g: torch.Tensor, x: torch.Tensor, drop: Dropout | None) -> torch.Tensor:
    """Return da = g^T drop(x) [linears * R, in]."""
    return _factor_gradient(g, x, *as_arguments(drop))


# The operators that the functions above call; without dropout, `seeds` is None.


@operator("shardwise::lora_triton_project", mutates_args=())
def _project(
    x: torch.Tensor,
    a: torch.Tensor,
    seeds: torch.Tensor | None,
    features: torch.Tensor | None,
    p: float,
) -> torch.Tensor:
    h = a.new_empty(len(x), len(a))
    num_masks, rank, block = _factors(a, len(a), seeds)
    if len(x):
        grid = _grid(len(x), "BLOCK_ROWS", num_masks * triton.cdiv(rank, block))
        kernels.project_kernel[grid](
            *(_matrix(x), _matrix(a), _matrix(h), _mask(seeds, features, p, x.shape[1])),
            *(*x.shape, rank, num_masks),
            KEPT=1 / (1 - p),
            BLOCK_R=block,
            **_dtypes(a, seeds),
        )
    return h


@_project.register_fake
def _(x: torch.Tensor, a: torch.Tensor, *_: Any) -> torch.Tensor:
    return a.new_empty(len(x), len(a))


@operator("shardwise::lora_triton_product", mutates_args=())
def _product(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    h: torch.Tensor,
    b: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    y = x.new_empty(len(x), len(weight))
    _multiply(y, [x], [weight.t()], h, b.t(), bias, 1, None, scale)
    return y


@_product.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, *_: Any) -> torch.Tensor:
    return x.new_empty(len(x), len(weight))


@operator("shardwise::lora_triton_output_gradients", mutates_args=())
def _output_gradients(
    dy: torch.Tensor, b: torch.Tensor | None, h: torch.Tensor | None, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    g, db = _empty_output_gradients(dy, b, h)
    (num_rows, num_columns), rank = dy.shape, max(g.shape[1], db.shape[1])
    factor: Any = b if h is None else h
    block, columns = _factors(factor, rank, None)[2], COLUMN_BYTES // factor.itemsize
    num_stripes, num_blocks = triton.cdiv(num_rows, STRIPE), triton.cdiv(num_columns, columns)
    g_parts, db_parts = db.new_empty(num_blocks, *g.shape), db.new_empty(num_stripes, *db.shape)
    if num_rows:
        kernels.output_gradients_kernel[num_stripes, num_blocks, triton.cdiv(rank, block)](
            _matrix(dy),
            None if b is None else _matrix(b),
            None if h is None else _matrix(h),
            *(g_parts, db_parts, num_rows, num_columns, rank, 1),
            BLOCK_R=block,
            STRIPE=STRIPE,
            BLOCK_COLUMNS=columns,
            **_dtypes(factor),
        )
    return _sum(g_parts, g, scale), _sum(db_parts, db, scale)


@_output_gradients.register_fake
def _empty_output_gradients(
    dy: torch.Tensor, b: torch.Tensor | None, h: torch.Tensor | None, scale: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return uninitialised g and db; without b or h, the one that is not computed is empty."""
    g = dy.new_empty(0, 0) if b is None else b.new_empty(len(dy), b.shape[1])
    db = dy.new_empty(0, 0) if h is None else h.new_empty(dy.shape[1], h.shape[1])
    return g, db.to(torch.promote_types(db.dtype, torch.float32))


@operator("shardwise::lora_triton_input_gradient", mutates_args=())
def _input_gradient(
    dys: list[torch.Tensor],
    weights: list[torch.Tensor],
    g: torch.Tensor,
    a: torch.Tensor,
    seeds: torch.Tensor | None,
    features: torch.Tensor | None,
    p: float,
) -> torch.Tensor:
    dx = dys[0].new_empty(len(g), a.shape[1])
    mask = _mask(seeds, features, p, a.shape[1])
    num_masks = _factors(a, len(a), seeds)[0]
    _multiply(dx, dys, weights, g, a, None, num_masks, mask, 1 / (1 - p))
    return dx


@_input_gradient.register_fake
def _(
    dys: list[torch.Tensor], weights: list[torch.Tensor], g: torch.Tensor, a: torch.Tensor, *_: Any
) -> torch.Tensor:
    return dys[0].new_empty(len(g), a.shape[1])


@operator("shardwise::lora_triton_factor_gradient", mutates_args=())
def _factor_gradient(
    g: torch.Tensor,
    x: torch.Tensor,
    seeds: torch.Tensor | None,
    features: torch.Tensor | None,
    p: float,
) -> torch.Tensor:
    (num_rows, num_features), num_factors = x.shape, g.shape[1]
    num_masks, rank, block = _factors(g, num_factors, seeds)
    num_stripes = triton.cdiv(num_rows, STRIPE)
    wide = torch.promote_types(g.dtype, torch.float32)
    da = g.new_empty(num_factors, num_features, dtype=wide)
    parts = da.new_empty(num_stripes, *da.shape)
    if num_rows:
        num_tiles = num_masks * triton.cdiv(rank, block)
        grid = _grid(num_features, "BLOCK_FEATURES", num_tiles, num_stripes)
        kernels.factor_gradient_kernel[grid](
            *(_matrix(g), _matrix(x), parts, _mask(seeds, features, p, num_features)),
            *(num_rows, num_features, rank, num_masks),
            BLOCK_R=block,
            STRIPE=STRIPE,
            **_dtypes(g, seeds),
        )
    return _sum(parts, da, 1 / (1 - p))


@_factor_gradient.register_fake
def _(g: torch.Tensor, x: torch.Tensor, *_: Any) -> torch.Tensor:
    wide = torch.promote_types(g.dtype, torch.float32)
    return g.new_empty(g.shape[1], x.shape[1], dtype=wide)


def _multiply(
    out: torch.Tensor,
    lefts: list[torch.Tensor],
    rights: list[torch.Tensor],
    left: torch.Tensor,
    right: torch.Tensor,
    bias: torch.Tensor | None,
    num_masks: int,
    drop: tuple[Any, ...] | None,
    scale: float,
) -> None:
    """Write out = bias + scale drop(left right) + the sum of lefts_i rights_i [rows, features]."""
    num_rows, num_features = out.shape
    if num_rows == 0:
        return
    rank = len(right) // num_masks

    def grid(blocks: dict[str, int]) -> tuple[int]:
        num_row_blocks = triton.cdiv(num_rows, blocks["BLOCK_ROWS"])
        return (num_row_blocks * triton.cdiv(num_features, blocks["BLOCK_FEATURES"]),)

    kernels.expand_kernel[grid](
        *(_matrix(out), _matrix(left), _matrix(right)),
        None if bias is None else bias.contiguous(),
        *(drop, num_rows, num_features, rank, num_masks),
        SCALE=scale,
        BLOCK_R=_factors(left, rank, None)[2],
        **_dtypes(left, drop),
    )
    for large_left, large_right in zip(lefts, rights):
        out.addmm_(large_left, large_right)


def _sum(parts: torch.Tensor, total: torch.Tensor, scale: float) -> torch.Tensor:
    """Write and return total = scale times the sum over the first dim of parts."""
    kernels.sum_kernel[(triton.cdiv(total.numel(), 1024),)](
        *(parts, total, len(parts), total.numel()),
        SCALE=scale,
        WIDE=_triton_dtype(parts.dtype),
        BLOCK=1024,
    )
    return total


def _matrix(x: torch.Tensor) -> tuple[Any, ...]:
    return (x, *x.stride())


def _mask(
    seeds: torch.Tensor | None, features: torch.Tensor | None, p: float, num_features: int
) -> tuple[Any, ...] | None:
    """Return the masks as the kernels take them, see `_keep` there; None without dropout."""
    if seeds is None:
        return None
    if features is None:  # written out: Triton 3.6 takes no None within a tuple
        features = torch.arange(num_features, dtype=torch.int32, device=seeds.device)
    return seeds.contiguous(), seeds.shape[1], features.contiguous(), threshold(p)


def _factors(
    factor: torch.Tensor, num_factors: int, seeds: torch.Tensor | None
) -> tuple[int, int, int]:
    """Return the number of masks, the rank that each covers, and how much of it a program takes."""
    num_masks = 1 if seeds is None else len(seeds)
    rank = num_factors // num_masks
    block = max(triton.next_power_of_2(rank), 16)
    return num_masks, rank, min(block, FACTOR_BYTES // factor.itemsize)


def _grid(size: int, block: str, *others: int) -> Callable[[dict[str, int]], tuple[int, ...]]:
    """Return the grid of a kernel: the blocks of `size` times others[0], and an axis per other."""
    return lambda blocks: (triton.cdiv(size, blocks[block]) * others[0], *others[1:])


def _triton_dtype(dtype: torch.dtype) -> Any:
    return getattr(tl, str(dtype).removeprefix("torch."))


def _dtypes(factor: torch.Tensor, drop: object = None) -> dict[str, Any]:
    """Return the dtypes in which tiles are multiplied and summed, by the dtype of the adapter."""
    dtype, tf32 = factor.dtype, torch.backends.cuda.matmul.fp32_precision == "tf32"
    # The interpreter cannot multiply bfloat16.
    dot = torch.float32 if INTERPRETED and dtype == torch.bfloat16 else dtype
    return {
        "DOT": _triton_dtype(dot),
        "WIDE": _triton_dtype(torch.promote_types(dtype, torch.float32)),
        "PRECISION": "tf32" if tf32 else "ieee",
        "CASE": f"{dtype} {'whole' if drop is None else 'dropped'}",
    }
