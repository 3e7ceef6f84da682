"""What computes the products of a LoRA linear: five functions, which a module (torch's, Triton's, CUDA C++'s) has.

K features in, N out, M rows; S linears of the same x have adapters of rank R, whose A's lie one below the other,
[S*R, K]: so x is read once for all of them. Linear s has the columns s*R to (s+1)*R of h and g [M, S*R], and with
dropout the mask s. Tensors may lie in memory as they like, and M may be 0. x, weights, biases, outputs and their
gradients have one dtype; a, b, h and g have one too, which may be another (float32 adapters on a bfloat16 model). Sums
are in float32, of float64 in float64. Functions are pure, and what launches kernels of its own is a custom operator of
torch's, `shardwise::lora_*`, with a fake implementation.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch

from shardwise.kernels.dropout import Dropout


class Backend(Protocol):
    """The five, and what they need; `drop` is None where nothing is dropped."""

    def missing(self, device: torch.device) -> str | None:
        """What it lacks to run on a device, and the way to get it ("triton: pip install triton"); None: nothing."""
        ...

    def refused(self, dtypes: Iterable[torch.dtype]) -> str | None:
        """Why it does not compute with matrices of such dtypes together; None: it does."""
        ...

    def project(self, x: torch.Tensor, a: torch.Tensor, drop: Dropout | None) -> torch.Tensor:
        """Give h [M, S*R] = drop(x) a^T, of x [M, K] and a [S*R, K]; in a's dtype."""
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
        """Give y [M, N] = x weight^T + bias + scale h b^T, of weight [N, K], h [M, R], b [N, R]; in x's dtype.

        A weight that is kept as [K, N] comes as a transposed view.
        """
        ...

    def output_gradients(
        self, dy: torch.Tensor, b: torch.Tensor | None, h: torch.Tensor | None, scale: float
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Give g [M, R] = scale dy b, in b's dtype, and db [N, R] = scale dy^T h, in float32 or float64, of dy [M, N].

        Without b no g is computed, without h no db.
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
        """Give dx [M, K] = sum over s of dy_s weight_s + drop_s(g_s a_s), of a [S*R, K], in dy's dtype."""
        ...

    def factor_gradient(self, g: torch.Tensor, x: torch.Tensor, drop: Dropout | None) -> torch.Tensor:
        """Give da [S*R, K] = g^T drop(x), each g_s with its own mask; in float32 (float64)."""
        ...
