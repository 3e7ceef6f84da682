"""Rotary positions with a written backward, which turns gradients by the opposite angles.

It keeps the angles alone. Source: Su et al., "RoFormer", arXiv 2104.09864.
"""

from typing import Any, Literal

import torch
from torch.autograd.function import once_differentiable

from shardwise.kernels.recurrence import wide

HALVES, PAIRS = "halves", "pairs"
"""Features that one angle turns, where each stands once: i and i + R/2, or 2 i and 2 i + 1."""


def rotate(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return queries and keys [B, N, T, H] turned by the angles of their tokens, in their dtypes.

    cos and sin are [1 or B, T, R], whose second half equals the first. The first R features of each
    head are turned, feature i with feature i + R/2; the rest stay as they are. `unsqueeze_dim`
    is the dim of heads. It computes in the wider dtype of x and the angles.
    """
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return _Rotation.apply(q, cos, sin), _Rotation.apply(k, cos, sin)


def rotate_halves(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return queries and keys as `rotate`, of angles [1 or B, T, R/2] that stand once."""
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return _Rotation.apply(q, cos, sin, HALVES), _Rotation.apply(k, cos, sin, HALVES)


def rotate_pairs(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    position_ids: None = None,
    unsqueeze_dim: int = 1,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return queries and keys as `rotate`, feature 2 i with feature 2 i + 1: they become features
    i and i + R/2.
    """
    apart = (torch.cat([x[..., ::2], x[..., 1::2]], -1) for x in (q, k))
    return rotate(*apart, cos, sin, unsqueeze_dim)


def rotate_neighbours(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return queries and keys as `rotate`, feature 2 i with feature 2 i + 1, each in its place."""
    half = cos.shape[-1] // 2
    cos, sin = (x[..., :half].unsqueeze(unsqueeze_dim) for x in (cos, sin))
    return _Rotation.apply(q, cos, sin, PAIRS), _Rotation.apply(k, cos, sin, PAIRS)


def rotate_repeated(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what `rotate_neighbours` does of angles that stand twice, one beside the other.

    It computes in float32.
    """
    cos, sin = (x[..., ::2].unsqueeze(unsqueeze_dim) for x in (cos, sin))
    return _Rotation.apply(q, cos, sin, PAIRS, True), _Rotation.apply(k, cos, sin, PAIRS, True)


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        once: Literal["", "halves", "pairs"] = "",
        is_wide: bool = False,
    ) -> torch.Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.flags = once, is_wide
        return _turned(x, cos, sin, 1, once, is_wide)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return _turned(gradients[0], cos, sin, -1, *ctx.flags), None, None, None, None


def _turned(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, sign: int, once: str, is_wide: bool
) -> torch.Tensor:
    """Return x turned by the angles times `sign`; `is_wide`: in float32.

    `once`: each angle stands once, and turns a pair of neighbours or a feature of each of the
    halves; else the angles of the halves stand one after the other.
    """
    if is_wide:
        cos, sin = wide(cos), wide(sin)
    size = cos.shape[-1] * (2 if once else 1)
    turned, half = x[..., :size], size // 2
    if once:
        places = slice(half), slice(half, size)
        if once == PAIRS:
            places = slice(0, size, 2), slice(1, size, 2)
        first, second = (turned[..., place] for place in places)
        out = torch.empty_like(turned, dtype=torch.promote_types(x.dtype, cos.dtype))
        both = out[..., places[0]], out[..., places[1]]
        for part, of in zip(both, (first, second), strict=True):
            if torch.compiler.is_compiling():  # it takes no `out` with gaps, and fuses these two
                part.copy_(of * cos)
            else:
                torch.mul(of, cos, out=part)
    else:
        first, second = turned[..., :half], turned[..., half:]
        out = turned * cos
        both = out[..., :half], out[..., half:]
    both[0].addcmul_(second, sin[..., :half], value=-sign)
    both[1].addcmul_(first, sin[..., -half:], value=sign)
    out = out.to(x.dtype)
    return out if size == x.shape[-1] else torch.cat([out, x[..., size:]], -1)
