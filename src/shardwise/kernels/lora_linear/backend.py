"""The five products of LoRA linears, which each backend computes: torch's or Triton's.

Several linears may share their input x [rows, in]. Linear i has a weight [out, in] and an adapter
of rank R, a [R, in] and b [out, R]. All a's lie below one another in one matrix [linears * R, in],
so that x is read once for all of them. Linear i has the columns i*R to (i+1)*R of h and g, both
[rows, linears * R], and with dropout the mask i.

Tensors may have any strides, and there may be no rows. x, weights, biases, outputs and the
gradients of outputs have one dtype; h and g have one too, which may be another; a and b are rounded
to that of h or g where either is given. Sums are in float32, or float64 for float64. The functions
are pure, and their results are new tensors. Backends that launch kernels of their own are called
through operators.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from shardwise.kernels.dropout import Dropout


class LoraBackend(Protocol):
    """The functions of a backend; `drop` is None where nothing is dropped."""

    def missing(self, device: torch.device) -> str | None:
        """Return why it cannot run on a device, as a clause with a way out; None if it can."""
        ...

    def project(
        self, x: torch.Tensor, a: torch.Tensor, drop: Dropout | None, dtype: torch.dtype
    ) -> torch.Tensor:
        """Return h = drop(x) a^T [rows, linears * R], in `dtype`, to which a is rounded.

        x [rows, in], a [linears * R, in].
        """
        ...

    def product(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        h: torch.Tensor,
        b: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        """Return y = x weight^T + bias + scale h b^T [rows, out] of one linear, in x's dtype.

        x [rows, in], weight [out, in], bias [out], h [rows, R], b [out, R]. A weight that is stored
        as [in, out] comes as a transposed view.
        """
        ...

    def output_gradients(
        self, dy: torch.Tensor, b: torch.Tensor | None, h: torch.Tensor | None, scale: float
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return g = scale dy b [rows, R] and db = scale dy^T h [out, R] of one linear.

        dy [rows, out], b [out, R], h [rows, R]. g has h's dtype, or b's without h; db is float32,
        or float64 for float64. Without b there is no g, without h no db.
        """
        ...

    def input_gradient(
        self,
        dys: Sequence[torch.Tensor],
        weights: Sequence[torch.Tensor],
        g: torch.Tensor,
        a: torch.Tensor,
        drop: Dropout | None,
    ) -> torch.Tensor:
        """Return dx = sum over i of dy_i weight_i + drop_i(g_i a_i) [rows, in], in dy's dtype.

        dys [rows, out] and weights [out, in], one per linear; g [rows, linears * R],
        a [linears * R, in].
        """
        ...

    def factor_gradient(
        self, g: torch.Tensor, x: torch.Tensor, drop: Dropout | None
    ) -> torch.Tensor:
        """Return da = g^T drop(x) [linears * R, in], each g_i with its own mask.

        g [rows, linears * R], x [rows, in]. da is float32, or float64 for float64.
        """
        ...
