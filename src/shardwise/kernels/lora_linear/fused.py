"""Frozen linears with LoRA adapters, in one autograd node for all that share an input.

y = x weight^T + bias + scale (drop(x) a^T) b^T. Beside the weights, the backward needs x and
h = drop(x) a^T, which has few columns; it computes the dropout masks again (kernels/dropout.py). No
gradient of a weight is ever computed. Shapes: see backend.py.
Source: Hu et al., "LoRA", arXiv 2106.09685, section 4.1; the gradients follow by the chain rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from shardwise.kernels.backward_half import BackwardHalf
from shardwise.kernels.dropout import Dropout, as_arguments, from_arguments
from shardwise.kernels.float8 import Float8
from shardwise.kernels.lora_linear import torch_backend
from shardwise.kernels.lora_linear.backend import LoraBackend
from shardwise.kernels.quantised import StoredLayout, Weight, layouts_of, tensors_of, weights_of


class Linear(NamedTuple):
    """A linear and its adapter."""

    weight: Weight  # [out, in], frozen
    bias: torch.Tensor | None  # [out], frozen
    a: torch.Tensor  # [R, in]
    b: torch.Tensor  # [out, R]
    scale: float


def lora_linear(
    x: torch.Tensor,
    linears: Sequence[Linear],
    drop: Dropout | None = None,
    backend: LoraBackend = torch_backend,
    half: BackwardHalf | None = None,
    float8: Sequence[Float8 | None] = (),
) -> tuple[torch.Tensor, ...]:
    """Return the outputs [..., out] of linears that share the input x [..., in], one per linear.

    Weights and biases are frozen. `drop` has a module per linear, and its rows are the tokens of x
    in their order. `half` is needed only where a pipeline runs backwards in two halves.
    `float8` has an entry per linear: how its product with the weight is done in 8 bits, if it is.
    That needs torch's backend.

    All adapters have one rank and one dtype. If that is another dtype than x and the weights have,
    the products with the adapters are computed in it; under autocast, all products are in
    autocast's dtype. A gradient that nobody needs is not computed. The adapter of an output that
    nobody uses gets no gradient (zeros where the call is compiled). There are no second
    derivatives.
    """
    for linear in linears:
        for tensor in (*tensors_of([linear.weight]), linear.bias):
            # A view passes: one into a flat parameter of frozen and trained weights requires a
            # gradient, as the parameter does.
            if tensor is not None and torch.is_grad_enabled() and tensor.is_leaf:
                assert not tensor.requires_grad
    device = x.device.type
    rows, dtype = _rows_and_dtype(x, linears)
    seeds, features, p = as_arguments(drop)
    scales = tuple(linear.scale for linear in linears)
    weights = [linear.weight for linear in linears]
    assert backend is torch_backend or not any(float8)
    in_8_bits = tuple(float8 or (None for _ in linears))
    options = _Options(backend, scales, layouts_of(weights), dtype, p, half, in_8_bits)
    biases = [linear.bias for linear in linears]
    a = [linear.a for linear in linears]
    b = [linear.b for linear in linears]
    with torch.autocast(device, enabled=False):
        ys = _LoraLinears.apply(
            options, seeds, features, rows, *tensors_of(weights), *biases, *a, *b
        )
    return tuple(y.view(*x.shape[:-1], y.shape[-1]) for y in ys)


def _rows_and_dtype(x: torch.Tensor, linears: Sequence[Linear]) -> tuple[torch.Tensor, torch.dtype]:
    """Return x as [rows, in] in the weights' product dtype, and the adapters' product dtype."""
    rows, device = x.reshape(-1, x.shape[-1]), x.device.type
    if torch.is_autocast_enabled(device) and x.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(device)
        return rows.to(dtype), dtype
    return rows, linears[0].a.dtype


class _Options(NamedTuple):
    backend: LoraBackend
    scales: tuple[float, ...]  # one per linear
    layouts: tuple[StoredLayout | None, ...]  # of weights that are stored in few bits
    dtype: torch.dtype  # of the products with the adapters
    p: float  # of the dropout
    half: BackwardHalf | None  # None: every backward is a full one
    float8: tuple[Float8 | None, ...]  # one per linear


class _LoraLinears(torch.autograd.Function):
    """The node: from x and the weights, biases, a's and b's of all linears to their outputs."""

    @staticmethod
    def forward(
        ctx: Any,
        options: _Options,
        seeds: torch.Tensor | None,
        features: torch.Tensor | None,
        x: torch.Tensor,
        *tensors: Any,
    ) -> tuple[torch.Tensor, ...]:
        backend, dtype = options.backend, options.dtype
        num_linears = len(options.scales)
        stored, biases, a, b = _parts(tensors, num_linears)
        weights = [*weights_of(stored, options.layouts)]
        _, _, needs_da, needs_db = _parts(ctx.needs_input_grad[4:], num_linears)
        drop = from_arguments(seeds, features, options.p)
        h = backend.project(x, _stacked(a), drop, dtype)
        ctx.options, ctx.first_half = options, None
        ctx.set_materialize_grads(False)  # an output that nobody used has no gradient, not zeros
        # The weights themselves are saved: what autocast makes of them is made again.
        saved_x, saved_h = x if any(needs_da) else None, h if any(needs_db) else None
        ctx.save_for_backward(seeds, features, saved_x, saved_h, *stored, *a, *b)
        ys = []
        parts = zip(weights, biases, h.chunk(len(a), 1), b, options.scales, options.float8)
        for weight, bias, h_i, b_i, scale, float8 in parts:
            weight = weight.to(x.dtype)
            bias = None if bias is None else bias.to(x.dtype)
            if float8 is None:
                ys.append(backend.product(x, weight, bias, h_i, b_i, scale))
            else:
                y = float8.output(x, weight)
                y = y if bias is None else y + bias
                ys.append(torch_backend.with_update(y, h_i, b_i, scale))
        return tuple(ys)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        options: _Options = ctx.options
        half = "full" if options.half is None else options.half.current
        num_linears = len(grads)
        seeds, features, x, h, *tensors = ctx.saved_tensors
        num_factors = 2 * num_linears
        stored, factors = tensors[:-num_factors], tensors[-num_factors:]
        weights = [*weights_of(stored, options.layouts)]
        a, b = factors[:num_linears], factors[num_linears:]
        dys, is_used = _filled(grads, weights)
        if not any(is_used):
            return (None,) * len(ctx.needs_input_grad)
        _, _, needs_da, needs_db = _parts(ctx.needs_input_grad[4:], num_linears)
        needs_da = [needed and used for needed, used in zip(needs_da, is_used)]
        needs_db = [needed and used for needed, used in zip(needs_db, is_used)]
        needs_dx = ctx.needs_input_grad[3] and half != "weight"
        drop = from_arguments(seeds, features, options.p)
        if half == "weight" and ctx.first_half is not None:
            (g, dbs), ctx.first_half = ctx.first_half, None
        else:
            needs_g = needs_dx or any(needs_da)
            g, dbs = _output_gradients(options, dys, b, h, needs_g, needs_db)
        dx = None
        das: list[torch.Tensor | None] = [None] * num_linears
        if needs_dx:
            assert g is not None
            dx = _input_gradient(options, dys, weights, g, _stacked(a), drop)
        if half == "input":
            # g and dbs read dy together, so both are computed now, and kept for the second half.
            ctx.first_half = g, dbs
            return None, None, None, dx, *[None] * (len(stored) + 3 * num_linears)
        if any(needs_da):
            assert g is not None
            parts = options.backend.factor_gradient(g, x, drop).chunk(num_linears)
            for i, part in enumerate(parts):
                das[i] = part.to(a[i].dtype) if needs_da[i] else None
        dbs = [None if db is None else db.to(b_i.dtype) for db, b_i in zip(dbs, b)]
        return None, None, None, dx, *[None] * (len(stored) + num_linears), *das, *dbs


def _input_gradient(
    options: _Options,
    dys: Sequence[torch.Tensor],
    weights: Sequence[Weight],
    g: torch.Tensor,
    a: torch.Tensor,
    drop: Dropout | None,
) -> torch.Tensor:
    """Return dx [rows, in], as LoraBackend.input_gradient."""
    if options.backend is torch_backend and not any(options.float8):
        # It reads one weight at a time. Operators of the others take tensors.
        return torch_backend.input_gradient(dys, weights, g, a, drop)
    plain = [weight.to(dys[0].dtype) for weight in weights]
    if not any(options.float8):
        return options.backend.input_gradient(dys, plain, g, a, drop)
    parts = [
        dy @ weight if float8 is None else float8.input_gradient(float8.completed(dy), weight)
        for dy, weight, float8 in zip(dys, plain, options.float8)
    ]
    dx = parts[0]
    for part in parts[1:]:
        dx += part
    return torch_backend.with_input_gradient(dx, g, a, drop)


def _output_gradients(
    options: _Options,
    dys: Sequence[torch.Tensor],
    b: Sequence[torch.Tensor],
    h: torch.Tensor | None,
    needs_g: bool,
    needs_db: Sequence[bool],
) -> tuple[torch.Tensor | None, list[torch.Tensor | None]]:
    """Return g [rows, linears * R] if it is needed, and a db [out, R] or None per linear."""
    hs = [None] * len(dys) if h is None else h.chunk(len(dys), 1)
    gs, dbs = [], []
    for dy, b_i, h_i, needed, scale in zip(dys, b, hs, needs_db, options.scales):
        g, db = None, None
        if needs_g or needed:
            b_i = None if not needs_g else b_i if needed else b_i.to(options.dtype)
            g, db = options.backend.output_gradients(dy, b_i, h_i if needed else None, scale)
        gs.append(g)
        dbs.append(db)
    if not needs_g:
        return None, dbs
    return gs[0] if len(gs) == 1 else torch.cat(gs, 1), dbs


def _stacked(factors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the a's of the linears below one another: [linears * R, in]."""
    return factors[0] if len(factors) == 1 else torch.cat([*factors])


def _filled(
    grads: Sequence[torch.Tensor | None], weights: Sequence[Weight]
) -> tuple[list[torch.Tensor], list[bool]]:
    """Return the gradients of the outputs, zeros for those that nobody used, and which were used.

    Without any gradient, the first list is empty.
    """
    is_used = [dy is not None for dy in grads]
    used = [dy for dy in grads if dy is not None]
    if not used:
        return [], is_used
    num_rows = len(used[0])
    dys = []
    for dy, weight in zip(grads, weights):
        dys.append(used[0].new_zeros(num_rows, weight.shape[0]) if dy is None else dy)
    return dys, is_used


def _parts(values: Sequence[Any], num_linears: int) -> list[Sequence[Any]]:
    """Return what belongs to weights, biases, a's and b's; a stored weight has several tensors."""
    first = len(values) - 3 * num_linears
    starts = [0, *range(first, len(values), num_linears)]
    return [values[start:end] for start, end in zip(starts, [*starts[1:], len(values)])]
