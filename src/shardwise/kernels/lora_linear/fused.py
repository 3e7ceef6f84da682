"""Frozen linears with LoRA adapters, in one autograd node for all that share an input.

y = x weight^T + bias + scale (drop(x) a^T) b^T. Beside the weights, the backward needs x and
h = drop(x) a^T, which has few columns; it computes the dropout masks again (kernels/dropout.py). No
gradient of a weight is ever computed. Shapes: see backend.py.
Source: Hu et al., "LoRA", arXiv 2106.09685, section 4.1; the gradients follow by the chain rule.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from shardwise.kernels.backward_half import BackwardHalf
from shardwise.kernels.dropout import Dropout, as_arguments, from_arguments
from shardwise.kernels.float8 import Float8
from shardwise.kernels.lora_linear import torch_backend
from shardwise.kernels.lora_linear.backend import LoraBackend
from shardwise.kernels.quantised import (
    Matrix,
    StoredLayout,
    Weight,
    layouts_of,
    tensors_of,
    weights_of,
)

_unsafe_view = torch.ops.aten._unsafe_view.default


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
    weights, biases, a, b, scales = zip(*linears)
    stored, layouts = weights, None
    for weight in weights:
        if isinstance(weight, Matrix):
            stored, layouts = tensors_of(weights), layouts_of(weights)
    if torch.is_grad_enabled():
        for tensor in (*stored, *biases):
            # A view passes: one into a flat parameter of frozen and trained weights requires a
            # gradient, as the parameter does.
            if tensor is not None and tensor.requires_grad:
                assert not tensor.is_leaf
    dtype, device = a[0].dtype, x.device.type
    if torch.is_autocast_enabled(device) and x.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(device)
        x = x if x.dtype == dtype else x.to(dtype)
    seeds, features, p = as_arguments(drop)
    in_8_bits = float8 if float8 and any(float8) else None
    assert in_8_bits is None or backend is torch_backend
    options = _Options(backend, scales, layouts, dtype, p, half, in_8_bits)
    # Dtypes are given: autocast, which goes on here, finds nothing to cast.
    return _LoraLinears.apply(options, seeds, features, x, *stored, *biases, *a, *b)


class _Options(NamedTuple):
    backend: LoraBackend
    scales: tuple[float, ...]  # one per linear
    layouts: tuple[StoredLayout | None, ...] | None  # if weights are stored in few bits
    dtype: torch.dtype  # dtype of the products with the adapters
    p: float  # probability of the dropout
    half: BackwardHalf | None  # None: every backward is a full one
    float8: Sequence[Float8 | None] | None  # one per linear, if any multiplies in 8 bits


class _LoraLinears(torch.autograd.Function):
    """The node: from x and the weights, biases, a's and b's of all linears to their outputs."""

    @staticmethod
    def forward(
        ctx: Any,
        options: _Options,
        seeds: torch.Tensor | None,
        features: torch.Tensor | None,
        whole_x: torch.Tensor,
        *tensors: Any,
    ) -> tuple[torch.Tensor, ...]:
        shape, x = whole_x.shape, _matrix(whole_x)
        backend, dtype, scales = options.backend, options.dtype, options.scales
        stored, biases, a, b = _parts(tensors, len(scales))
        _, _, needs_da, needs_db = _parts(ctx.needs_input_grad[4:], len(scales))
        drop = from_arguments(seeds, features, options.p)
        h = backend.project(x, a, drop, dtype)
        ctx.options, ctx.first_half, ctx.shape = options, None, shape
        ctx.set_materialize_grads(False)  # an output that nobody used has no gradient, not zeros
        # The weights themselves are saved: what autocast makes of them is made again.
        saved_x, saved_h = whole_x if True in needs_da else None, h if True in needs_db else None
        ctx.save_for_backward(seeds, features, saved_x, saved_h, *stored, *a, *b)
        biases = [c if c is None or c.dtype == x.dtype else c.to(x.dtype) for c in biases]
        ys = _outputs(options, x, stored, biases, h, b)
        if len(shape) == 2:
            return tuple(ys)
        # No views: those who get them may change them.
        return tuple([_unsafe_view(y, (*shape[:-1], y.shape[-1])) for y in ys])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        options: _Options = ctx.options
        half = "full" if options.half is None else options.half.current
        num_linears = len(grads)
        seeds, features, x, h, *tensors = ctx.saved_tensors
        grads = tuple([None if dy is None else _matrix(dy) for dy in grads])
        stored, a = tensors[: -2 * num_linears], tensors[-2 * num_linears : -num_linears]
        b = tensors[-num_linears:]
        needs = ctx.needs_input_grad
        needs_da, needs_db = needs[-2 * num_linears : -num_linears], needs[-num_linears:]
        dys: Any = grads
        if any(dy is None for dy in grads):
            dys, is_used = _filled(grads, b)
            if not dys:
                return (None,) * len(needs)
            needs_da = [needed and used for needed, used in zip(needs_da, is_used)]
            needs_db = [needed and used for needed, used in zip(needs_db, is_used)]
        needs_dx, trains_a, trains_b = (
            needs[3] and half != "weight",
            True in needs_da,
            True in needs_db,
        )
        drop = from_arguments(seeds, features, options.p)
        if half == "weight" and ctx.first_half is not None:
            (g, db), ctx.first_half = ctx.first_half, None
        else:
            g, db = options.backend.output_gradients(
                dys, b, h if trains_b else None, options.scales, options.dtype, needs_dx or trains_a
            )
        dx = None
        das = dbs = (None,) * num_linears
        if needs_dx:
            assert g is not None
            dx = _input_gradient(options, dys, _weights(stored, options), g, a, drop)
            dx = dx.view(ctx.shape)
        if half == "input":
            # g and db read dy together, so both are computed now, and kept for the second half.
            ctx.first_half = g, db
            return None, None, None, dx, *[None] * (len(needs) - 4)
        if trains_a:
            assert g is not None
            da = options.backend.factor_gradient(g, _matrix(x), drop)
            das = _shares(da, a, needs_da)
        if trains_b:
            assert db is not None
            dbs = _shares(db, b, needs_db)
        return None, None, None, dx, *[None] * (len(stored) + num_linears), *das, *dbs


def _matrix(x: torch.Tensor) -> torch.Tensor:
    return x if x.dim() == 2 else x.reshape(-1, x.shape[-1])


def _weights(stored: Sequence[torch.Tensor], options: _Options) -> Sequence[Weight]:
    return stored if options.layouts is None else [*weights_of(stored, options.layouts)]


def _outputs(
    options: _Options,
    x: torch.Tensor,
    stored: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    h: torch.Tensor,
    b: Sequence[torch.Tensor],
) -> list[torch.Tensor]:
    """Return the outputs [rows, out] for x [rows, in]."""
    weights: Any = _weights(stored, options)
    if options.float8 is None:
        are_ready = options.layouts is None and all(w.dtype == x.dtype for w in stored)
        if are_ready or options.backend is torch_backend:  # which reads one after the other
            return options.backend.products(x, weights, biases, h, b, options.scales)
    # What has to be made of a weight is in memory for one linear at a time.
    ys: list[torch.Tensor] = []
    float8s = options.float8 or [None] * len(b)
    parts = zip(weights, biases, h.chunk(len(b), 1), b, options.scales, float8s)
    for weight, bias, h_i, b_i, scale, float8 in parts:
        plain = weight.to(x.dtype)
        if float8 is None:
            ys += options.backend.products(x, [plain], [bias], h_i, [b_i], [scale])
        else:
            y = float8.output(x, plain)
            y = y if bias is None else y + bias
            ys.append(torch_backend.with_update(y, h_i, b_i, scale))
    return ys


def _input_gradient(
    options: _Options,
    dys: Sequence[torch.Tensor],
    weights: Sequence[Weight],
    g: torch.Tensor,
    a: Sequence[torch.Tensor],
    drop: Dropout | None,
) -> torch.Tensor:
    """Return dx [rows, in], as LoraBackend.input_gradient."""
    if options.backend is torch_backend and options.float8 is None:
        # It reads one weight at a time. Operators of the others take tensors.
        return torch_backend.input_gradient(dys, weights, g, a, drop)
    plain = [weight.to(dys[0].dtype) for weight in weights]
    if options.float8 is None:
        return options.backend.input_gradient(dys, plain, g, a, drop)
    parts = [
        dy @ weight if float8 is None else float8.input_gradient(float8.completed(dy), weight)
        for dy, weight, float8 in zip(dys, plain, options.float8)
    ]
    dx = parts[0]
    for part in parts[1:]:
        dx += part
    return torch_backend.with_input_gradient(dx, g, a, drop)


def _shares(
    gradient: torch.Tensor, factors: Sequence[torch.Tensor], needs: Sequence[bool]
) -> list[torch.Tensor | None]:
    """Return the gradient of each factor, which lie below one another, None if not needed."""
    gradient = gradient.to(factors[0].dtype)
    if len(factors) == 1:
        return [gradient]
    parts = gradient.split([factor.shape[0] for factor in factors])
    return [part if needed else None for part, needed in zip(parts, needs)]


def _filled(
    grads: Sequence[torch.Tensor | None], b: Sequence[torch.Tensor]
) -> tuple[list[torch.Tensor], list[bool]]:
    """Return the gradients of the outputs, zeros for those that nobody used, and which were used.

    Without any gradient, the first list is empty. b [out, R], one per linear.
    """
    is_used = [dy is not None for dy in grads]
    used = [dy for dy in grads if dy is not None]
    if not used:
        return [], is_used
    num_rows = len(used[0])
    dys = []
    for dy, b_i in zip(grads, b):
        dys.append(used[0].new_zeros(num_rows, b_i.shape[0]) if dy is None else dy)
    return dys, is_used


def _parts(values: Sequence[Any], num_linears: int) -> list[Sequence[Any]]:
    """Return what belongs to weights, biases, a's and b's; a stored weight has several tensors."""
    third, second, first = (len(values) - i * num_linears for i in (1, 2, 3))
    return [values[:first], values[first:second], values[second:third], values[third:]]
