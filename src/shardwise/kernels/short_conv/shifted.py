"""The short convolution as one elementwise product per tap, with its own backward.

It reads and writes tokens [B, T, D] as projections lay them out, so nothing is copied. On a CPU it
takes a block of tokens at a time, whose sums stay in a cache. The backward keeps x and the weight
and computes the sums before the activation again.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

Tensors = Iterable[torch.Tensor]
BLOCK = 64
"""Tokens of a block on a CPU."""


def short_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    earlier: torch.Tensor | None = None,
    documents: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return [B, T, D] of x [B, T, D] and weight [D, W], as the package does."""
    if documents is not None:
        # Of tokens that are 0: those before a row, and in the backward those after it.
        before = weight.shape[1] - 1
        documents = F.pad(documents, (before if earlier is None else 0, before))
    return _ShortConv.apply(x, weight, bias, activation is not None, earlier, documents)


class _ShortConv(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        has_silu: bool,
        earlier: torch.Tensor | None,
        documents: torch.Tensor | None,
    ) -> torch.Tensor:
        ctx.has_silu = has_silu
        ctx.save_for_backward(x, weight, bias, earlier, documents)
        out, taps = torch.empty_like(x), _taps(weight)
        with torch.autocast(x.device.type, enabled=False):
            for start, stop in _blocks(x):
                seen = _seen(x, earlier, len(taps) - 1, start, stop, taps.dtype)
                z = _sum(by_tap(seen, len(taps), documents, start, len(taps) - 1), taps, bias)
                out[:, start:stop] = F.silu(z, inplace=True) if has_silu else z
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, bias, earlier, documents = ctx.saved_tensors
        (grad_out,) = gradients
        taps = _taps(weight)
        width, before = len(taps), len(taps) - 1
        grad_x = torch.empty_like(x)
        grad_taps = torch.zeros_like(taps) if ctx.needs_input_grad[1] else None
        grad_bias = taps.new_zeros(x.shape[-1]) if ctx.needs_input_grad[2] else None
        # The gradient of the sums of the W - 1 tokens after a block: they read the block's last.
        later = taps.new_zeros(x.shape[0], before, x.shape[-1])
        for start, stop in reversed(_blocks(x)):
            grad_z = grad_out[:, start:stop].to(taps.dtype)
            seen = _seen(x, earlier, before, start, stop, taps.dtype)
            if ctx.has_silu:
                z = _sum(by_tap(seen, width, documents, start, before), taps, bias)
                grad_z = torch.ops.aten.silu_backward(grad_z, z)
            if grad_taps is not None:
                for tap, shifted in enumerate(by_tap(seen, width, documents, start, before)):
                    grad_taps[tap] += (grad_z * shifted).sum((0, 1))
            if grad_bias is not None:
                grad_bias += grad_z.sum((0, 1))
            grad_z = torch.cat([grad_z, later], 1)
            grad_x[:, start:stop] = _sum(
                by_tap(grad_z, width, documents, start + before, 0), taps.unbind()[::-1]
            )
            if start or ctx.needs_input_grad[4]:
                later = grad_z[:, :before].clone()
        grad_earlier = None
        if ctx.needs_input_grad[4]:
            grad_z = F.pad(later, (0, 0, before, 0))
            grad_earlier = _sum(by_tap(grad_z, width, documents, 0, 0), taps.unbind()[::-1]).to(
                earlier.dtype
            )
        return (
            grad_x,
            None if grad_taps is None else grad_taps.T.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            None,
            grad_earlier,
            None,
        )


def _taps(weight: torch.Tensor) -> torch.Tensor:
    """Return the weight [D, W] as [W, D] in the dtype of sums: float32, or float64 of float64."""
    dtype = torch.promote_types(weight.dtype, torch.float32)
    return weight.T.to(dtype, memory_format=torch.contiguous_format).contiguous()


def _blocks(x: torch.Tensor) -> list[tuple[int, int]]:
    """Return where blocks of x's tokens begin and end.

    A GPU, and a compiler that joins the products of a block, take all tokens at once.
    """
    tokens = x.shape[1]
    at_once = x.device.type != "cpu" or torch.compiler.is_compiling()
    block = tokens if at_once else BLOCK
    return [(start, min(start + block, tokens)) for start in range(0, tokens, block)]


def _seen(
    x: torch.Tensor,
    earlier: torch.Tensor | None,
    before: int,
    start: int,
    stop: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return the tokens of a block and the W - 1 tokens before it, [B, P + C, D]."""
    if start >= before:
        return x[:, start - before : stop].to(dtype)
    if earlier is None:
        earlier = x.new_zeros(x.shape[0], before, x.shape[2], dtype=dtype)
    return torch.cat([earlier[:, start:].to(dtype), x[:, :stop]], 1)  # one copy, which casts x


def by_tap(
    x: torch.Tensor, width: int, documents: torch.Tensor | None, start: int, place: int
) -> Iterator[torch.Tensor]:
    """Yield the tokens [B, C, D] that each of W taps multiplies, of x [B, P + C, D].

    The tap at `place` multiplies a token itself, and the others those before or after it, which are
    0 if they are of another document. x begins at `start` among the documents.
    """
    tokens = x.shape[1] - (width - 1)
    for tap in range(width):
        shifted = x[:, tap : tap + tokens]
        if documents is not None and tap != place:
            here, there = (documents[:, start + at : start + at + tokens] for at in (place, tap))
            shifted = shifted.masked_fill((here != there)[..., None], 0)
        yield shifted


def _sum(each: Tensors, taps: Tensors, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return the sum [B, C, D] of the tokens of each tap times its weights [D], plus a bias."""
    total: torch.Tensor | None = None
    for tokens, tap in zip(each, taps, strict=True):
        total = tokens * tap if total is None else total.addcmul_(tokens, tap)
    assert total is not None
    return total if bias is None else total.add_(bias)
