"""The backend in CUDA C++ (see backend.Backend): bfloat16 and float16 on tensor cores, sums in float32.

What only reads x or dy, M x K numbers against a few columns, reads it once and sums in a fixed order. The product with
the frozen weight has the adapter in the same sum, as more columns of x and of the weight (product.cuh), or is cuBLAS's
with the adapter's product already in its output: see `fused`. x, weights and adapters have one dtype of those two;
others are refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from shardwise.config import UserError
from shardwise.kernels.dropout import Dropout, flat
from shardwise.kernels.lora_linear.cuda import launch


def missing(device: torch.device) -> str | None:
    """See Backend; the kernels are built here, if need be."""
    try:
        launch.library(device)
    except UserError as error:
        return str(error)
    return None


def refused(dtypes: Iterable[torch.dtype]) -> str | None:
    """See Backend: all bfloat16 or all float16."""
    given = sorted({str(dtype).removeprefix("torch.") for dtype in dtypes})
    if given in (["bfloat16"], ["float16"]):
        return None
    return f"the kernels in CUDA C++ multiply bfloat16 or float16 alone, and here is {' and '.join(given)}"


def project(x: torch.Tensor, a: torch.Tensor, drop: Dropout | None) -> torch.Tensor:
    """See Backend."""
    _check(x, a)
    return _project(x, a, *flat(drop))


def product(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, h: torch.Tensor, b: torch.Tensor, scale: float
) -> torch.Tensor:
    """See Backend."""
    _check(x, weight, h, b)
    return _product(x, weight, bias, h, b, scale)


def output_gradients(
    dy: torch.Tensor, b: torch.Tensor | None, h: torch.Tensor | None, scale: float
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """See Backend."""
    _check(dy, *(factor for factor in (b, h) if factor is not None))
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
    _check(*dys, *weights, g, a)
    return _input_gradient(list(dys), list(weights), g, a, *flat(drop))


def factor_gradient(g: torch.Tensor, x: torch.Tensor, drop: Dropout | None) -> torch.Tensor:
    """See Backend."""
    _check(g, x)
    return _factor_gradient(g, x, *flat(drop))


def _check(*tensors: torch.Tensor) -> None:
    """UserError for what only a forward knows, such as hidden states in another dtype than the weights."""
    if why := refused(tensor.dtype for tensor in tensors):
        raise UserError(f"{why}; give all matrices in one of the two")


def fused(device: torch.device) -> bool:
    """Return whether product.cuh multiplies by the weight: before sm_90. From sm_90 on, cuBLAS does, with wgmma."""
    return torch.cuda.get_device_capability(device)[0] < 9


# What is launched is an operator of its own, so that torch.compile traces through and need not look inside.
# `seeds` None: no dropout.


@torch.library.custom_op("shardwise::lora_cuda_project", mutates_args=())
def _project(
    x: torch.Tensor, a: torch.Tensor, seeds: torch.Tensor | None, features: torch.Tensor | None, p: float
) -> torch.Tensor:
    h = x.new_empty(len(x), len(a))
    if seeds is None:
        launch.rows(x, a, h)
    else:  # each linear has its own mask, whose hashes take as long as reading x again
        for own_a, own_h, own_seeds in zip(a.chunk(len(seeds)), h.chunk(len(seeds), 1), seeds):
            launch.rows(x, own_a, own_h, mask=Dropout(p, own_seeds, features))
    return h


@_project.register_fake
def _(x: torch.Tensor, a: torch.Tensor, *_: Any) -> torch.Tensor:
    return x.new_empty(x.shape[0], a.shape[0])


@torch.library.custom_op("shardwise::lora_cuda_product", mutates_args=())
def _product(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, h: torch.Tensor, b: torch.Tensor, scale: float
) -> torch.Tensor:
    own = fused(x.device)
    y = x.new_empty(len(x), len(weight))
    launch.product(y, [(h, b), *([(x, weight)] if own else [])], scale=scale, bias=bias)
    return y if own else torch.addmm(y, x, weight.t(), out=y)


@_product.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, *_: Any) -> torch.Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


@torch.library.custom_op("shardwise::lora_cuda_output_gradients", mutates_args=())
def _output_gradients(
    dy: torch.Tensor, b: torch.Tensor | None, h: torch.Tensor | None, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    if b is not None and h is not None and b.shape[1] <= launch.MOST_AT_ONCE:
        return launch.rows_and_columns(dy, b, h, scale)
    g, db = _empty_output_gradients(dy, b, h)
    if b is not None:
        launch.rows(dy, b.t(), g, scale=scale)
    return g, db if h is None else launch.columns(dy, h, scale=scale)


@_output_gradients.register_fake
def _empty_output_gradients(
    dy: torch.Tensor, b: torch.Tensor | None, h: torch.Tensor | None, *_: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Without b or h, what is not computed has no element."""
    g = dy.new_empty(0, 0) if b is None else dy.new_empty(len(dy), b.shape[1])
    db = (0, 0) if h is None else (dy.shape[1], h.shape[1])
    return g, dy.new_empty(db, dtype=torch.float32)


@torch.library.custom_op("shardwise::lora_cuda_input_gradient", mutates_args=())
def _input_gradient(
    dys: list[torch.Tensor],
    weights: list[torch.Tensor],
    g: torch.Tensor,
    a: torch.Tensor,
    seeds: torch.Tensor | None,
    features: torch.Tensor | None,
    p: float,
) -> torch.Tensor:
    own = fused(g.device) and len(dys) < launch.MOST_TERMS
    dx = dys[0].new_empty(len(g), a.shape[1])
    frozen = [(dy, weight.t()) for dy, weight in zip(dys, weights)]
    if seeds is None:
        launch.product(dx, [(g, a.t()), *(frozen if own else [])])
    else:  # a mask is of the whole sum of its adapter: all but the last have a pass over dx
        parts = list(zip(g.chunk(len(seeds), 1), a.chunk(len(seeds)), seeds))
        for s, (own_g, own_a, own_seeds) in enumerate(parts):
            terms = [(own_g, own_a.t()), *(frozen if own and s + 1 == len(parts) else [])]
            launch.product(dx, terms, mask=Dropout(p, own_seeds, features), accumulate=s > 0)
    if not own:
        for dy, weight in zip(dys, weights):
            torch.addmm(dx, dy, weight, out=dx)
    return dx


@_input_gradient.register_fake
def _(dys: list[torch.Tensor], weights: list[torch.Tensor], g: torch.Tensor, a: torch.Tensor, *_: Any) -> torch.Tensor:
    return dys[0].new_empty(g.shape[0], a.shape[1])


@torch.library.custom_op("shardwise::lora_cuda_factor_gradient", mutates_args=())
def _factor_gradient(
    g: torch.Tensor, x: torch.Tensor, seeds: torch.Tensor | None, features: torch.Tensor | None, p: float
) -> torch.Tensor:
    if seeds is None:
        return launch.columns(x, g, transposed=True)
    masks = [Dropout(p, own_seeds, features) for own_seeds in seeds]
    parts = zip(g.chunk(len(seeds), 1), masks)
    return torch.cat([launch.columns(x, own_g, transposed=True, mask=mask) for own_g, mask in parts])


@_factor_gradient.register_fake
def _(g: torch.Tensor, x: torch.Tensor, *_: Any) -> torch.Tensor:
    return x.new_empty(g.shape[1], x.shape[1], dtype=torch.float32)
