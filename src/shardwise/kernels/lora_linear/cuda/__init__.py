"""The backend in CUDA C++; backend.Backend defines each function.

It multiplies bfloat16 or float16 on tensor cores, sums in float32, and refuses other dtypes; x,
weights and adapters all have one of the two. A product of a large matrix by a factor of few columns
reads the matrix once and sums in a fixed order. The product with a frozen weight is either this
backend's own (product.cuh), which sums the adapter's part too, as if it were more columns of x and
of the weight; or it is cuBLAS's, which adds to an output that holds the adapter's part.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from shardwise.config import UserError
from shardwise.kernels.dropout import Dropout
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
    h = x.new_empty(len(x), len(a))
    if drop is None:
        launch.rows(x, a, h)
        return h
    # One launch per mask: its hashes take as long as reading x again.
    num_masks = len(drop.seeds)
    for a_i, h_i, mask in zip(a.chunk(num_masks), h.chunk(num_masks, 1), _masks(drop)):
        launch.rows(x, a_i, h_i, mask=mask)
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
    _check(x, weight, h, b)
    y = x.new_empty(len(x), len(weight))
    if multiplies_weights(x.device):
        launch.product(y, [(h, b), (x, weight)], scale=scale, bias=bias)
        return y
    launch.product(y, [(h, b)], scale=scale, bias=bias)
    return y.addmm_(x, weight.t())


def output_gradients(
    dy: torch.Tensor, b: torch.Tensor | None, h: torch.Tensor | None, scale: float
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return g = scale dy b [rows, R] and db = scale dy^T h [out, R], each None if not needed."""
    _check(dy, *(factor for factor in (b, h) if factor is not None))
    if b is not None and h is not None and b.shape[1] <= launch.MOST_AT_ONCE:
        return launch.rows_and_columns(dy, b, h, scale)
    g = None
    if b is not None:
        g = dy.new_empty(len(dy), b.shape[1])
        launch.rows(dy, b.t(), g, scale=scale)
    return g, None if h is None else launch.columns(dy, h, scale=scale)


def input_gradient(
    dys: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
    g: torch.Tensor,
    a: torch.Tensor,
    drop: Dropout | None,
) -> torch.Tensor:
    """Return dx = sum over i of dy_i weight_i + drop_i(g_i a_i) [rows, in]."""
    _check(*dys, *weights, g, a)
    in_our_product = multiplies_weights(g.device) and len(dys) < launch.MOST_TERMS
    dx = dys[0].new_empty(len(g), a.shape[1])
    frozen = []
    if in_our_product:
        frozen = [(dy, weight.t()) for dy, weight in zip(dys, weights)]
    if drop is None:
        launch.product(dx, [(g, a.t()), *frozen])
    else:
        # A mask covers the whole sum of its adapter, so that every mask has a pass over dx.
        num_masks = len(drop.seeds)
        parts = zip(g.chunk(num_masks, 1), a.chunk(num_masks), _masks(drop))
        for i, (g_i, a_i, mask) in enumerate(parts):
            is_last = i + 1 == num_masks
            terms = [(g_i, a_i.t()), *(frozen if is_last else [])]
            launch.product(dx, terms, mask=mask, accumulate=i > 0)
    if not in_our_product:
        for dy, weight in zip(dys, weights):
            dx.addmm_(dy, weight)
    return dx


def factor_gradient(g: torch.Tensor, x: torch.Tensor, drop: Dropout | None) -> torch.Tensor:
    """Return da = g^T drop(x) [linears * R, in]."""
    _check(g, x)
    if drop is None:
        return launch.columns(x, g, transposed=True)
    parts = zip(g.chunk(len(drop.seeds), 1), _masks(drop))
    return torch.cat([launch.columns(x, g_i, transposed=True, mask=mask) for g_i, mask in parts])


def multiplies_weights(device: torch.device) -> bool:
    """Return whether product.cuh multiplies by the weight, as it does before sm_90.

    Later GPUs have wgmma, which cuBLAS uses.
    """
    return torch.cuda.get_device_capability(device)[0] < 9


def _masks(drop: Dropout) -> list[Dropout]:
    """Return the mask of each linear, as `launch` takes them: with seeds [rows]."""
    return [Dropout(drop.p, seeds, drop.features) for seeds in drop.seeds]


def _check(*tensors: torch.Tensor) -> None:
    """Raise UserError for dtypes that only a forward knows, such as that of hidden states."""
    if reason := refused(tensor.dtype for tensor in tensors):
        raise UserError(f"{reason}; give all matrices in one of the two")
