"""The backend in CUDA C++; backend.Backend defines each function.

It multiplies bfloat16 or float16 on tensor cores, sums in float32, and refuses other dtypes; x,
weights and adapters all have one of the two. A product of a large matrix by a factor of few columns
reads the matrix once and sums in a fixed order. The product with a frozen weight is either this
backend's own (product.cuh), which sums the adapter's part too, as if it were more columns of x and
of the weight; or it is cuBLAS's, which adds to an output that holds the adapter's part.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from shardwise.config import UserError
from shardwise.kernels.dropout import Dropout, as_arguments
from shardwise.kernels.lora_linear.cuda import launch


def missing(device: torch.device) -> str | None:
    """Build the kernels if need be; return why they cannot run on a device, None if they can."""
    try:
        launch.library(device)
    except UserError as error:
        return str(error)
    return None


def refused(dtypes: Iterable[torch.dtype]) -> str | None:
    """Return why it cannot multiply matrices of these dtypes; None if all have one 16-bit dtype."""
    names = sorted({str(dtype).removeprefix("torch.") for dtype in dtypes})
    if names in (["bfloat16"], ["float16"]):
        return None
    here = " and ".join(names)
    return f"the kernels in CUDA C++ multiply bfloat16 or float16 alone, and here is {here}"


def project(x: torch.Tensor, a: torch.Tensor, drop: Dropout | None) -> torch.Tensor:
    """Return h = drop(x) a^T [rows, linears * R]."""
    _check(x, a)
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
    _check(x, weight, h, b)
    return _product(x, weight, bias, h, b, scale)


def output_gradients(
    dy: torch.Tensor, b: torch.Tensor | None, h: torch.Tensor | None, scale: float
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return g = scale dy b [rows, R] and db = scale dy^T h [out, R], each None if not needed."""
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
    """Return dx = sum over i of dy_i weight_i + drop_i(g_i a_i) [rows, in]."""
    _check(*dys, *weights, g, a)
    return _input_gradient(list(dys), list(weights), g, a, *as_arguments(drop))


def factor_gradient(g: torch.Tensor, x: torch.Tensor, drop: Dropout | None) -> torch.Tensor:
    """Return da = g^T drop(x) [linears * R, in]."""
    _check(g, x)
    return _factor_gradient(g, x, *as_arguments(drop))


def multiplies_weights(device: torch.device) -> bool:
    """Return whether product.cuh multiplies by the weight, as it does before sm_90.

    Later GPUs have wgmma, which cuBLAS uses.
    """
    return torch.cuda.get_device_capability(device)[0] < 9


def _check(*tensors: torch.Tensor) -> None:
    """Raise UserError for dtypes that only a forward knows, such as that of hidden states."""
    if reason := refused(tensor.dtype for tensor in tensors):
        raise UserError(f"{reason}; give all matrices in one of the two")


# The operators that the functions above call: torch.compile traces through them and need not look
# inside. Without dropout, `seeds` is None.


@torch.library.custom_op("shardwise::lora_cuda_project", mutates_args=())
def _project(
    x: torch.Tensor,
    a: torch.Tensor,
    seeds: torch.Tensor | None,
    features: torch.Tensor | None,
    p: float,
) -> torch.Tensor:
    h = x.new_empty(len(x), len(a))
    if seeds is None:
        launch.rows(x, a, h)
        return h
    # One launch per mask: its hashes take as long as reading x again.
    for a_i, h_i, seeds_i in zip(a.chunk(len(seeds)), h.chunk(len(seeds), 1), seeds):
        launch.rows(x, a_i, h_i, mask=Dropout(p, seeds_i, features))
    return h


@_project.register_fake
def _(x: torch.Tensor, a: torch.Tensor, *_: Any) -> torch.Tensor:
    return x.new_empty(x.shape[0], a.shape[0])


@torch.library.custom_op("shardwise::lora_cuda_product", mutates_args=())
def _product(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    h: torch.Tensor,
    b: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    y = x.new_empty(len(x), len(weight))
    if multiplies_weights(x.device):
        launch.product(y, [(h, b), (x, weight)], scale=scale, bias=bias)
        return y
    launch.product(y, [(h, b)], scale=scale, bias=bias)
    return torch.addmm(y, x, weight.t(), out=y)


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
    """Return uninitialised g and db; without b or h, the one that is not computed is empty."""
    g = dy.new_empty(0, 0) if b is None else dy.new_empty(len(dy), b.shape[1])
    db_shape = (0, 0) if h is None else (dy.shape[1], h.shape[1])
    return g, dy.new_empty(db_shape, dtype=torch.float32)


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
    in_our_product = multiplies_weights(g.device) and len(dys) < launch.MOST_TERMS
    dx = dys[0].new_empty(len(g), a.shape[1])
    frozen = []
    if in_our_product:
        frozen = [(dy, weight.t()) for dy, weight in zip(dys, weights)]
    if seeds is None:
        launch.product(dx, [(g, a.t()), *frozen])
    else:
        # A mask covers the whole sum of its adapter, so that every mask has a pass over dx.
        parts = list(zip(g.chunk(len(seeds), 1), a.chunk(len(seeds)), seeds))
        for i, (g_i, a_i, seeds_i) in enumerate(parts):
            terms = [(g_i, a_i.t())]
            if i + 1 == len(parts):
                terms += frozen
            launch.product(dx, terms, mask=Dropout(p, seeds_i, features), accumulate=i > 0)
    if not in_our_product:
        for dy, weight in zip(dys, weights):
            torch.addmm(dx, dy, weight, out=dx)
    return dx


@_input_gradient.register_fake
def _(
    dys: list[torch.Tensor], weights: list[torch.Tensor], g: torch.Tensor, a: torch.Tensor, *_: Any
) -> torch.Tensor:
    return dys[0].new_empty(g.shape[0], a.shape[1])


@torch.library.custom_op("shardwise::lora_cuda_factor_gradient", mutates_args=())
def _factor_gradient(
    g: torch.Tensor,
    x: torch.Tensor,
    seeds: torch.Tensor | None,
    features: torch.Tensor | None,
    p: float,
) -> torch.Tensor:
    if seeds is None:
        return launch.columns(x, g, transposed=True)
    das = []
    for g_i, seeds_i in zip(g.chunk(len(seeds), 1), seeds):
        mask = Dropout(p, seeds_i, features)
        das.append(launch.columns(x, g_i, transposed=True, mask=mask))
    return torch.cat(das)


@_factor_gradient.register_fake
def _(g: torch.Tensor, x: torch.Tensor, *_: Any) -> torch.Tensor:
    return x.new_empty(g.shape[1], x.shape[1], dtype=torch.float32)
