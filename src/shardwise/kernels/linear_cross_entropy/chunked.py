"""Cross entropy of a linear head without its logits: a chunk of rows at a time, gradients in the forward.

The loss is the end of the graph, so that the gradient of a chunk of logits, softmax minus one-hot, is known as soon as
the chunk is: dx and dW are taken from it at once, up to the factor that comes with the backward, and its memory serves
the next chunk. Rows without a target are left out before any product.
Source of the idea: Hsu et al., "Liger Kernel", arXiv 2410.10989, section 3.2.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

CHUNK_BYTES = 256 * 2**20
"""Of a chunk of logits: enough rows for the products to run at full speed (270 of 248,320 logits)."""


@dataclass(frozen=True)
class Vocabulary:
    """Which tokens a rank has, where each of some ranks has other rows of the weight; reductions are elementwise."""

    first: int  # of this rank's tokens
    most: int  # tokens that a rank has: chunks are alike on all
    add_up: Callable[[torch.Tensor], torch.Tensor]
    largest: Callable[[torch.Tensor], torch.Tensor]


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    scale: float = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
    vocabulary: Vocabulary | None = None,
) -> torch.Tensor:
    """The summed cross entropy of softcap * tanh(z / softcap), where z = scale * (hidden weight^T + bias).

    hidden [N, D], weight [V, D], labels [N] int64, bias [V]; without `softcap`, of z itself. Returns a float32 scalar
    (float64 of float64). Products are in the inputs' dtype, or autocast's; softmax, and sums over chunks, in float32.
    A row whose label is `ignore_index` costs nothing and its gradient is exactly 0; a gradient that nobody needs is not
    computed. With a trained weight, a second backward through the same loss is an error, raised by autograd.

    With a `vocabulary`, weight and bias are this rank's rows; the loss is that of all tokens, equal on every rank, and
    the gradient of `hidden` is this rank's summand.
    """
    rows = (labels != ignore_index).nonzero().squeeze(1)
    hidden = hidden.index_select(0, rows)
    if scale != 1.0:
        hidden = hidden * scale
        bias = None if bias is None else bias * scale
    tensors = (hidden, weight, bias)
    needed = [torch.is_grad_enabled() and tensor is not None and tensor.requires_grad for tensor in tensors]
    with torch.no_grad():
        loss, gradients = _loss_and_gradients(*tensors, labels.index_select(0, rows), softcap, needed, vocabulary)
    # One node for each, side by side: a backward for one of them alone (pipelines take the hidden states' first and the
    # weight's later) runs no other.
    for tensor, gradient in zip(tensors, gradients):
        if gradient is not None:
            loss = loss + _Known.apply(tensor, gradient, tensor is weight)
    return loss


class _Known(torch.autograd.Function):
    """0, with a gradient with respect to `tensor` that is known up to the factor that comes with the backward."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, gradient: torch.Tensor, large: bool) -> torch.Tensor:
        ctx.dtype, ctx.large = tensor.dtype, large
        ctx.save_for_backward(gradient)
        return gradient.new_zeros(())

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (grad,) = grads
        (gradient,) = ctx.saved_tensors
        # In place if it is large; autograd then refuses to hand it out a second time.
        return (gradient.mul_(grad) if ctx.large else gradient * grad).to(ctx.dtype), None, None


def _loss_and_gradients(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    softcap: float | None,
    needed: list[bool],
    vocabulary: Vocabulary | None,
) -> tuple[torch.Tensor, tuple[torch.Tensor | None, ...]]:
    wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    device = hidden.device.type
    if torch.is_autocast_enabled(device) and wide == torch.float32:
        hidden, weight = (tensor.to(torch.get_autocast_dtype(device)) for tensor in (hidden, weight))
    # float16 is coarse below 6e-5 and ends at 6e-8: there lie most of the probabilities of a large vocabulary.
    lift = 64.0 if hidden.dtype == torch.float16 else 1.0

    def zeros_if(wanted: bool, *shape: int) -> torch.Tensor | None:
        return torch.zeros(shape, dtype=wide, device=hidden.device) if wanted else None

    loss = torch.zeros((), dtype=wide, device=hidden.device)
    dx, dw, db = (
        zeros_if(needed[0], *hidden.shape),
        zeros_if(needed[1], *weight.shape),
        zeros_if(needed[2], len(weight)),
    )
    size = _rows_per_chunk(len(hidden), (vocabulary.most if vocabulary else len(weight)) * wide.itemsize)
    # The chunk as the products give and take it, and as the softmax does: the same memory where the dtype is.
    narrow_buffer = hidden.new_empty(size, len(weight))
    wide_buffer = narrow_buffer if hidden.dtype == wide else torch.empty_like(narrow_buffer, dtype=wide)
    with torch.autocast(device, enabled=False):
        for start in range(0, len(hidden), max(size, 1)):
            x, targets = hidden[start : start + size], labels[start : start + size, None]
            narrow = narrow_buffer[: len(x)]
            z = narrow if wide_buffer is narrow_buffer else wide_buffer[: len(x)]
            torch.mm(x, weight.t(), out=narrow)
            z.copy_(narrow)
            if bias is not None:
                z.add_(bias)
            slope = None
            if softcap is not None:
                z.div_(softcap).tanh_()
                slope = 1 - z * z
                z.mul_(softcap)
            peak = z.amax(1, keepdim=True)
            own = torch.ones_like(peak)  # 1 where this rank has the target's logit
            if vocabulary:
                peak = vocabulary.largest(peak)
                targets = targets - vocabulary.first
                own = ((targets >= 0) & (targets < len(weight))).to(peak.dtype)
                targets = targets.clamp(0, len(weight) - 1)
            z.sub_(peak)
            target_logits = z.gather(1, targets) * own
            total = z.exp_().sum(1, keepdim=True)
            if vocabulary:
                # Two numbers a row, from every rank to all.
                total, target_logits = vocabulary.add_up(torch.stack([total, target_logits]))
            loss += (total.log() - target_logits).sum()
            if not any(needed):
                continue
            z.mul_(lift / total).scatter_add_(1, targets, own.mul_(-lift))
            if slope is not None:
                z.mul_(slope)
            narrow.copy_(z)
            if dx is not None:
                dx[start : start + size].copy_(narrow @ weight).div_(lift)
            if dw is not None:
                _add_product(dw, narrow.t(), x / lift)
            if db is not None:
                db.add_(z.sum(0), alpha=1 / lift)
    return loss, (dx, dw, db)


def _rows_per_chunk(num_rows: int, row_bytes: int) -> int:
    """Of equal chunks, as few as keep each within CHUNK_BYTES (or one row)."""
    most = max(1, CHUNK_BYTES // row_bytes)
    num_chunks = -(-num_rows // most)
    return -(-num_rows // max(num_chunks, 1))


def _add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """Add a b to total, in one pass where the dtypes are equal."""
    if total.dtype == a.dtype:
        torch.addmm(total, a, b, out=total)
    else:
        total += a @ b
