"""Linears with LoRA adapters, frozen but for these, in one autograd node for all that share an input.

y = x W^T + bias + s (drop(x) A^T) B^T. Saved for the backward are x and h = drop(x) A^T, of a few columns, beside the
weights; no gradient of W is ever computed, and masks are drawn again (kernels/dropout.py).
Source: Hu et al., "LoRA", arXiv 2106.09685, section 4.1; the gradients follow by the chain rule.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from shardwise.kernels.dropout import Dropout, flat
from shardwise.kernels.lora_linear import torch_backend
from shardwise.kernels.lora_linear.backend import Backend


class Linear(NamedTuple):
    """A linear and its adapter."""

    weight: torch.Tensor  # [N, K], frozen
    bias: torch.Tensor | None  # [N], frozen
    a: torch.Tensor  # [R, K]
    b: torch.Tensor  # [N, R]
    scale: float


Half = Literal["full", "input", "weight"]


class BackwardHalf:
    """Which gradients the running backward computes: those of the input, those of the weights, or both ("full").

    A pipeline may compute the gradient of a stage's input first and those of its weights later. autograd runs a node
    in both halves and does not tell it which one is running: the second half would compute the first again. So a
    stage and its linears share this object, which the stage sets. It is an attribute and no context variable, because
    on a GPU a backward runs in a thread of autograd's.
    """

    def __init__(self) -> None:
        self.current: Half = "full"

    @contextmanager
    def running(self, half: Half) -> Generator[None]:
        """Set the half for the backwards within the context."""
        before, self.current = self.current, half
        try:
            yield
        finally:
            self.current = before


def lora_linear(
    x: torch.Tensor,
    linears: Sequence[Linear],
    drop: Dropout | None = None,
    backend: Backend = torch_backend,
    half: BackwardHalf | None = None,
) -> tuple[torch.Tensor, ...]:
    """What each of some linears of one input gives: [..., N] of x [..., K], whose tokens `drop` counts in their order.

    All adapters have one rank and dtype, which may be another one than x and the weights have: then the adapters'
    products are in theirs. Under autocast all are in its dtype. A gradient that nobody needs is not computed, and the
    adapter of an output that nobody uses has none (compiled: zeros); there are no second derivatives.
    """
    for tensor in (tensor for linear in linears for tensor in (linear.weight, linear.bias)):
        # A view is let pass: that into a flat parameter of frozen and trained weights requires a gradient as they do.
        assert tensor is None or not (torch.is_grad_enabled() and tensor.is_leaf and tensor.requires_grad)
    device = x.device.type
    rows, dtype = computing_dtype(x, linears)
    seeds, features, p = flat(drop)
    how = _How(backend, tuple(linear.scale for linear in linears), dtype, p, half)
    weights, biases, a, b = ([getattr(linear, name) for linear in linears] for name in ("weight", "bias", "a", "b"))
    with torch.autocast(device, enabled=False):
        ys = _LoraLinears.apply(how, seeds, features, rows, *weights, *biases, *a, *b)
    return tuple(y.view(*x.shape[:-1], y.shape[-1]) for y in ys)


def computing_dtype(x: torch.Tensor, linears: Sequence[Linear]) -> tuple[torch.Tensor, torch.dtype]:
    """The rows of x in the dtype of their products with the weights, and the dtype of those with the adapters."""
    rows, device = x.reshape(-1, x.shape[-1]), x.device.type
    if torch.is_autocast_enabled(device) and x.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(device)
        return rows.to(dtype), dtype
    return rows, linears[0].a.dtype


def stacked(factors: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """The A's of some linears, one below the other."""
    return factors[0].to(dtype) if len(factors) == 1 else torch.cat([factor.to(dtype) for factor in factors])


def filled(
    given: Sequence[torch.Tensor | None], weights: Sequence[torch.Tensor]
) -> tuple[list[torch.Tensor], list[bool]]:
    """Gradients of the outputs of some linears, zeros for an output that nobody used (None), and which were used."""
    used = [dy for dy in given if dy is not None]
    dys = [used[0].new_zeros(len(used[0]), len(w)) if dy is None else dy for dy, w in zip(given, weights) if used]
    return dys, [dy is not None for dy in given]


class _How(NamedTuple):
    backend: Backend
    scales: tuple[float, ...]  # S of them
    dtype: torch.dtype  # of the adapters' products
    p: float  # of the dropout
    half: BackwardHalf | None  # None: every backward is a full one


class _LoraLinears(torch.autograd.Function):
    """Of x, then S weights, S biases, S a and S b."""

    @staticmethod
    def forward(
        ctx: Any,
        how: _How,
        seeds: torch.Tensor | None,
        features: torch.Tensor | None,
        x: torch.Tensor,
        *tensors: Any,
    ) -> tuple[torch.Tensor, ...]:
        weights, biases, a, b = _four(tensors)
        _, _, needs_da, needs_db = _four(ctx.needs_input_grad[4:])
        h = how.backend.project(x, stacked(a, how.dtype), _dropout(how, seeds, features))
        ctx.how, ctx.kept = how, None
        ctx.set_materialize_grads(False)  # what nobody used has no gradient rather than one of zeros
        # The weights as they are: what autocast makes of them is made again.
        kept_x, kept_h = x if any(needs_da) else None, h if any(needs_db) else None
        ctx.save_for_backward(seeds, features, kept_x, kept_h, *weights, *a, *b)
        return tuple(
            how.backend.product(x, w.to(x.dtype), None if c is None else c.to(x.dtype), own_h, b_s.to(how.dtype), scale)
            for w, c, own_h, b_s, scale in zip(weights, biases, h.chunk(len(a), 1), b, how.scales)
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *given: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        how = ctx.how
        half = "full" if how.half is None else how.half.current
        seeds, features, x, h, *tensors = ctx.saved_tensors
        weights, a, b = (tensors[i * len(given) : (i + 1) * len(given)] for i in range(3))
        dys, used = filled(given, weights)
        if not any(used):
            return (None,) * len(ctx.needs_input_grad)
        needs_da, needs_db = ([n and u for n, u in zip(needs, used)] for needs in _four(ctx.needs_input_grad[4:])[2:])
        needs_dx = ctx.needs_input_grad[3] and half != "weight"
        drop = _dropout(how, seeds, features)
        if half == "weight" and ctx.kept is not None:
            (g, dbs), ctx.kept = ctx.kept, None
        else:
            g, dbs = _output_gradients(how, dys, b, h, needs_dx or any(needs_da), needs_db)
        dx, das = None, [None] * len(dys)
        if needs_dx:
            dtype = dys[0].dtype
            dx = how.backend.input_gradient(dys, [w.to(dtype) for w in weights], g, stacked(a, how.dtype), drop)
        if half == "input":  # dy is read once in both
            ctx.kept = g, dbs
            return None, None, None, dx, *[None] * (4 * len(dys))
        if any(needs_da):
            parts = how.backend.factor_gradient(g, x, drop).chunk(len(dys))
            das = [part.to(a_s.dtype) if needed else None for part, a_s, needed in zip(parts, a, needs_da)]
        dbs = [None if db is None else db.to(b_s.dtype) for db, b_s in zip(dbs, b)]
        return None, None, None, dx, *[None] * (2 * len(dys)), *das, *dbs


def _output_gradients(
    how: _How,
    dys: Sequence[torch.Tensor],
    b: Sequence[torch.Tensor],
    h: torch.Tensor | None,
    needs_g: bool,
    needs_db: Sequence[bool],
) -> tuple[torch.Tensor | None, list[torch.Tensor | None]]:
    """Give g [M, S*R] if needed, and S db."""
    hs = [None] * len(dys) if h is None else h.chunk(len(dys), 1)
    gs, dbs = [], []
    for dy, b_s, own_h, needed, scale in zip(dys, b, hs, needs_db, how.scales):
        g, db = None, None
        if needs_g or needed:
            g, db = how.backend.output_gradients(
                dy, b_s.to(how.dtype) if needs_g else None, own_h if needed else None, scale
            )
        gs.append(g)
        dbs.append(db)
    return (gs[0] if len(gs) == 1 else torch.cat(gs, 1)) if needs_g else None, dbs


def _four(tensors: Sequence[Any]) -> list[Sequence[Any]]:
    num = len(tensors) // 4
    return [tensors[i * num : (i + 1) * num] for i in range(4)]


def _dropout(how: _How, seeds: torch.Tensor | None, features: torch.Tensor | None) -> Dropout | None:
    return None if seeds is None else Dropout(how.p, seeds, features)
