"""The five products of LoRA linears, which each backend computes: torch's or Triton's.

Several linears may share their input x [rows, in]. Linear i has a weight [out, in] and an adapter
of rank R, a [R, in] and b [out, R]. Each function computes for all of them at once, so that x is
read once and few kernels are launched. Linear i has the columns i*R to (i+1)*R of h and g, both
[rows, linears * R], and with dropout the mask i.

Tensors may have any strides, and there may be no rows. x, weights, biases, outputs and the
gradients of outputs have one dtype; h and g have one too, which may be another; a and b are rounded
to that of h or g where either is given. Sums are in float32, or float64 for float64. The functions
are pure, and their results are new tensors. Backends that launch kernels of their own are called
through operators.py.
"""

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
        self, x: torch.Tensor, a: Sequence[torch.Tensor], drop: Dropout | None, dtype: torch.dtype
    ) -> torch.Tensor:
        """Return h = drop(x) a^T [rows, linears * R], in `dtype`, to which a is rounded.

        x [rows, in], a [R, in] of each linear.
        """
        ...

    def products(
        self,
        x: torch.Tensor,
        weights: Sequence[torch.Tensor],
        biases: Sequence[torch.Tensor | None],
        h: torch.Tensor,
        b: Sequence[torch.Tensor],
        scales: Sequence[float],
    ) -> list[torch.Tensor]:
        """Return y_i = x weight_i^T + bias_i + scale_i h_i b_i^T [rows, out], in x's dtype.

        x [rows, in], h [rows, linears * R]; for each linear weight [out, in], bias [out] and b
        [out, R]. A weight that is stored as [in, out] comes as a transposed view.
        """
        ...

    def output_gradients(
        self,
        dys: Sequence[torch.Tensor],
        b: Sequence[torch.Tensor],
        h: torch.Tensor | None,
        scales: Sequence[float],
        dtype: torch.dtype,
        needs_g: bool,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return g_i = scale_i dy_i b_i [rows, linears * R] and db_i = scale_i dy_i^T h_i, below
        one another: [sum of outs, R].

        dy [rows, out] and b [out, R], one per linear; h [rows, linears * R]. g is in `dtype`, which
        h has too; db is float32, or float64 for float64. Without `needs_g` there is no g, without h
        no db.
        """
        ...

    def input_gradient(
        self,
        dys: Sequence[torch.Tensor],
        weights: Sequence[torch.Tensor],
        g: torch.Tensor,
        a: Sequence[torch.Tensor],
        drop: Dropout | None,
    ) -> torch.Tensor:
        """Return dx = sum over i of dy_i weight_i + drop_i(g_i a_i) [rows, in], in dy's dtype.

        dys [rows, out], weights [out, in] and a [R, in], one per linear; g [rows, linears * R].
        """
        ...

    def factor_gradient(
        self, g: torch.Tensor, x: torch.Tensor, drop: Dropout | None
    ) -> torch.Tensor:
        """Return da = g^T drop(x) [linears * R, in], each g_i with its own mask.

        g [rows, linears * R], x [rows, in]. da is float32, or float64 for float64.
        """
        ...
