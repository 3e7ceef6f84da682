"""The backend in Triton: large products are the vendor's, what an adapter adds to them is a pass or less over memory.

The product's result starts out as bias and adapter, written once, and the vendor's product adds to it as it stores its
tiles. So does the gradient of the input, each sibling's product to the last one's. See backend.Backend.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from shardwise.kernels.dropout import Dropout, flat, threshold
from shardwise.kernels.lora_linear import triton_kernels as kernels
from shardwise.kernels.triton_support import INTERPRETED, why_not

STRIPE = 512
"""Rows whose summands of a factor's gradient one program adds up: 8192 rows give 16 programs for each tile of it."""
COLUMN_BYTES = 512
"""Of a row of dy, that one program of `output_gradients` takes."""
FACTOR_BYTES = 128
"""Of an adapter's rank, that a program takes at once: more would not fit in registers."""

operator: Any = torch.library.custom_op


def missing(device: torch.device) -> str | None:
    """See Backend."""
    return why_not(device)


def refused(dtypes: Iterable[torch.dtype]) -> str | None:
    """See Backend."""
    return None


def project(x: torch.Tensor, a: torch.Tensor, drop: Dropout | None) -> torch.Tensor:
    """See Backend."""
    return _project(x, a, *flat(drop))


def product(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, h: torch.Tensor, b: torch.Tensor, scale: float
) -> torch.Tensor:
    """See Backend."""
    return _product(x, weight, bias, h, b, scale)


def output_gradients(
    dy: torch.Tensor, b: torch.Tensor | None, h: torch.Tensor | None, scale: float
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """See Backend."""
    g, db = _output_gradients(dy, b, h, scale)
    return None if b is None else g, None if h is None else db


def input_gradient(
    dys: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
    g: torch.Tensor,
    a: torch.Tensor,
    drop: Dropout | None,
) -> torch.Tensor:
    """See Backend."""
    return _input_gradient(list(dys), list(weights), g, a, *flat(drop))


def factor_gradient(g: torch.Tensor, x: torch.Tensor, drop: Dropout | None) -> torch.Tensor:
    """See Backend."""
    return _factor_gradient(g, x, *flat(drop))


@operator("shardwise::lora_triton_project", mutates_args=())
def _project(
    x: torch.Tensor, a: torch.Tensor, seeds: torch.Tensor | None, features: torch.Tensor | None, p: float
) -> torch.Tensor:
    h = a.new_empty(len(x), len(a))
    modules, rank, block = _adapters(a, len(a), seeds)
    if len(x):
        kernels.project_kernel[_grid(len(x), "BLOCK_M", modules * triton.cdiv(rank, block))](
            _matrix(x), _matrix(a), _matrix(h), _mask(seeds, features, p, x.shape[1]), *x.shape, rank, modules,
            KEPT=1 / (1 - p), BLOCK_R=block, **_types(a, seeds),
        )  # fmt: skip
    return h


@_project.register_fake
def _(x: torch.Tensor, a: torch.Tensor, *_: Any) -> torch.Tensor:
    return a.new_empty(len(x), len(a))


@operator("shardwise::lora_triton_product", mutates_args=())
def _product(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, h: torch.Tensor, b: torch.Tensor, scale: float
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
    block, columns = _adapters(factor, rank, None)[2], COLUMN_BYTES // factor.itemsize
    stripes, blocks = triton.cdiv(num_rows, STRIPE), triton.cdiv(num_columns, columns)
    g_parts, db_parts = db.new_empty(blocks, *g.shape), db.new_empty(stripes, *db.shape)
    if num_rows:
        kernels.output_gradients_kernel[stripes, blocks, triton.cdiv(rank, block)](
            _matrix(dy), None if b is None else _matrix(b), None if h is None else _matrix(h), g_parts, db_parts,
            num_rows, num_columns, rank, 1, BLOCK_R=block, STRIPE=STRIPE, BLOCK_N=columns, **_types(factor),
        )  # fmt: skip
    return _sum(g_parts, g, scale), _sum(db_parts, db, scale)


@_output_gradients.register_fake
def _empty_output_gradients(
    dy: torch.Tensor, b: torch.Tensor | None, h: torch.Tensor | None, scale: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Without b or h, which is not computed has no element."""
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
    _multiply(dx, dys, weights, g, a, None, _adapters(a, len(a), seeds)[0], mask, 1 / (1 - p))
    return dx


@_input_gradient.register_fake
def _(dys: list[torch.Tensor], weights: list[torch.Tensor], g: torch.Tensor, a: torch.Tensor, *_: Any) -> torch.Tensor:
    return dys[0].new_empty(len(g), a.shape[1])


@operator("shardwise::lora_triton_factor_gradient", mutates_args=())
def _factor_gradient(
    g: torch.Tensor, x: torch.Tensor, seeds: torch.Tensor | None, features: torch.Tensor | None, p: float
) -> torch.Tensor:
    (num_rows, num_features), num_factors = x.shape, g.shape[1]
    modules, rank, block = _adapters(g, num_factors, seeds)
    stripes = triton.cdiv(num_rows, STRIPE)
    da = g.new_empty(num_factors, num_features, dtype=torch.promote_types(g.dtype, torch.float32))
    parts = da.new_empty(stripes, *da.shape)
    if num_rows:
        kernels.factor_gradient_kernel[_grid(num_features, "BLOCK_K", modules * triton.cdiv(rank, block), stripes)](
            _matrix(g), _matrix(x), parts, _mask(seeds, features, p, num_features), num_rows, num_features, rank,
            modules, BLOCK_R=block, STRIPE=STRIPE, **_types(g, seeds),
        )  # fmt: skip
    return _sum(parts, da, 1 / (1 - p))


@_factor_gradient.register_fake
def _(g: torch.Tensor, x: torch.Tensor, *_: Any) -> torch.Tensor:
    return g.new_empty(g.shape[1], x.shape[1], dtype=torch.promote_types(g.dtype, torch.float32))


def _multiply(
    out: torch.Tensor,
    lefts: list[torch.Tensor],
    rights: list[torch.Tensor],
    left: torch.Tensor,
    right: torch.Tensor,
    bias: torch.Tensor | None,
    modules: int,
    drop: tuple[Any, ...] | None,
    scale: float,
) -> None:
    """Let out be bias + scale drop(left right) + the sum of lefts_i rights_i."""
    num_rows, num_features = out.shape
    if num_rows == 0:
        return
    rank = len(right) // modules
    adapter = (_matrix(left), _matrix(right), None if bias is None else bias.contiguous(), drop)
    options = {"SCALE": scale, "BLOCK_R": _adapters(left, rank, None)[2], **_types(left, drop)}

    def programs(meta: dict[str, int]) -> tuple[int]:
        return (triton.cdiv(num_rows, meta["BLOCK_M"]) * triton.cdiv(num_features, meta["BLOCK_K"]),)

    kernels.expand_kernel[programs](_matrix(out), *adapter, num_rows, num_features, rank, modules, **options)
    for large_left, large_right in zip(lefts, rights):
        out.addmm_(large_left, large_right)


def _sum(parts: torch.Tensor, total: torch.Tensor, scale: float) -> torch.Tensor:
    """Let total be scale times the sum of its parts [P, *total.shape]."""
    kernels.sum_kernel[(triton.cdiv(total.numel(), 1024),)](
        parts, total, len(parts), total.numel(), SCALE=scale, WIDE=_named(parts.dtype), BLOCK=1024
    )
    return total


def _matrix(x: torch.Tensor) -> tuple[Any, ...]:
    return (x, *x.stride())


def _mask(
    seeds: torch.Tensor | None, features: torch.Tensor | None, p: float, num_features: int
) -> tuple[Any, ...] | None:
    if seeds is None:
        return None
    if features is None:  # written out: Triton 3.6 takes no None within a tuple
        features = torch.arange(num_features, dtype=torch.int32, device=seeds.device)
    return seeds.contiguous(), seeds.shape[1], features.contiguous(), threshold(p)


def _adapters(factor: torch.Tensor, num_factors: int, seeds: torch.Tensor | None) -> tuple[int, int, int]:
    """Modules whose masks differ, their rank, and how many factors a program takes at once."""
    modules = 1 if seeds is None else len(seeds)
    rank = num_factors // modules
    return modules, rank, min(max(triton.next_power_of_2(rank), 16), FACTOR_BYTES // factor.itemsize)


def _grid(size: int, block: str, *others: int) -> Callable[[dict[str, int]], tuple[int, ...]]:
    """Programs for each block of `size`, times the first of the others; the rest on axes of their own."""
    return lambda meta: (triton.cdiv(size, meta[block]) * others[0], *others[1:])


def _named(dtype: torch.dtype) -> Any:
    return getattr(tl, str(dtype).removeprefix("torch."))


def _types(factor: torch.Tensor, drop: object = None) -> dict[str, Any]:
    """What tiles are multiplied and added up in, by the adapter's dtype. The interpreter cannot multiply bfloat16."""
    dtype, tf32 = factor.dtype, torch.backends.cuda.matmul.fp32_precision == "tf32"
    dot = torch.float32 if INTERPRETED and dtype == torch.bfloat16 else dtype
    return {
        "DOT": _named(dot),
        "WIDE": _named(torch.promote_types(dtype, torch.float32)),
        "PRECISION": "tf32" if tf32 else "ieee",
        "CASE": f"{dtype} {'whole' if drop is None else 'dropped'}",
    }
