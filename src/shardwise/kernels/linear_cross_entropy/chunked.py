"""Cross entropy of a linear head without its logits: a chunk of rows at a time, gradients in the forward.

The loss is the end of the graph, so that the gradient of a chunk of logits, softmax minus one-hot, is known as soon as
the chunk is: dx and dW are taken from it at once, up to the factor that comes with the backward, and its memory serves
the next chunk. Products are the vendor's; softmax and gradient are torch's operators or Triton's kernels (triton.py).
Rows without a target are left out before any product.
Source of the idea: Hsu et al., "Liger Kernel", arXiv 2410.10989, section 3.2.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch

from shardwise.config import UserError
from shardwise.kernels.linear_cross_entropy.vocabulary import Vocabulary
from shardwise.kernels.triton_support import why_not

CHUNK_BYTES = 256 * 2**20
"""Of a chunk of logits, as wide as they get: of 248,320 logits 256 rows in float32, 512 in bfloat16.

A product reads the weight once and multiplies each number as often as there are rows: from about 300 on, a GPU is
busier multiplying than reading.
"""
TILE = 128
"""Rows that a product on a GPU takes together: what is left of a tile costs as much as a whole one."""

Kernel = Literal["auto", "torch", "triton"]
"""What takes the softmax of a chunk; `auto`: Triton on a GPU, where it is installed."""


Softmax = Callable[
    [torch.Tensor, torch.Tensor | None, torch.Tensor, float | None, float | None, Vocabulary | None], torch.Tensor
]
"""What `softmax` below is."""


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
    kernel: Kernel = "auto",
) -> torch.Tensor:
    """The summed cross entropy of softcap * tanh(z / softcap), where z = scale * (hidden weight^T + bias).

    hidden [N, D], weight [V, D], labels [N] int64, bias [V]; without `softcap`, of z itself. Returns a float32 scalar
    (float64 of float64). Products are in the inputs' dtype, or autocast's; softmax, and sums over chunks, in float32.
    A row whose label is `ignore_index` costs nothing and its gradient is exactly 0; a gradient that nobody needs is not
    computed. With a trained weight, a second backward through the same loss is an error, raised by autograd.

    With a `vocabulary`, weight and bias are this rank's rows; the loss is that of all tokens, equal on every rank, and
    the gradient of `hidden` is this rank's summand. UserError where `kernel` is triton and cannot run.
    """
    rows = (labels != ignore_index).nonzero().squeeze(1)
    hidden = hidden.index_select(0, rows)
    if scale != 1.0:
        hidden = hidden * scale
        bias = None if bias is None else bias * scale
    tensors = (hidden, weight, bias)
    needed = [torch.is_grad_enabled() and tensor is not None and tensor.requires_grad for tensor in tensors]
    with torch.no_grad():
        loss, gradients = _loss_and_gradients(
            *tensors, labels.index_select(0, rows), softcap, needed, vocabulary, kernel
        )
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
    kernel: Kernel,
) -> tuple[torch.Tensor, tuple[torch.Tensor | None, ...]]:
    wide = torch.promote_types(hidden.dtype, torch.float32)
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
    loss_of, widens = _softmax_of(kernel, hidden.device)
    itemsize = (wide if widens else hidden.dtype).itemsize
    size = _rows_per_chunk(len(hidden), (vocabulary.most if vocabulary else len(weight)) * itemsize)
    buffer = _rows(hidden, size, len(weight))
    with torch.autocast(device, enabled=False):
        for start in range(0, len(hidden), max(size, 1)):
            x, targets = hidden[start : start + size], labels[start : start + size]
            logits = buffer[: len(x)]
            torch.mm(x, weight.t(), out=logits)
            loss += loss_of(logits, bias, targets, softcap, lift if any(needed) else None, vocabulary)
            if dx is not None:
                dx[start : start + size].copy_(logits @ weight).div_(lift)
            if dw is not None:
                _add_product(dw, logits.t(), x / lift)
            if db is not None:
                db.add_(logits.sum(0, dtype=wide), alpha=1 / lift)
    return loss, (dx, dw, db)


def softmax(
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    softcap: float | None,
    lift: float | None,
    vocabulary: Vocabulary | None,
) -> torch.Tensor:
    """The summed loss of a chunk of logits, which become its gradient with respect to them, times `lift` (None: junk).

    logits [rows, V], before bias and soft cap; targets [rows] int64. Returns a scalar, float32 (float64 of float64).
    """
    z = logits.to(torch.promote_types(logits.dtype, torch.float32))
    targets = targets[:, None]
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
        own = ((targets >= 0) & (targets < z.shape[1])).to(peak.dtype)
        targets = targets.clamp(0, z.shape[1] - 1)
    z.sub_(peak)
    target_logits = z.gather(1, targets) * own
    total = z.exp_().sum(1, keepdim=True)
    if vocabulary:
        # Two numbers a row, from every rank to all.
        total, target_logits = vocabulary.add_up(torch.stack([total, target_logits]))
    if lift is not None:
        z.mul_(lift / total).scatter_add_(1, targets, own.mul_(-lift))
        if slope is not None:
            z.mul_(slope)
        if z is not logits:
            logits.copy_(z)
    return (total.log() - target_logits).sum()


def kernel_of(kernel: Kernel, device: torch.device) -> Literal["torch", "triton"]:
    """What `kernel` comes to on a device. UserError where `triton` cannot run."""
    reason = why_not(device)
    if kernel == "triton" and reason is not None:
        raise UserError(f"the loss's kernel is triton, but {reason}; use auto or torch")
    return "torch" if kernel == "torch" or reason is not None else "triton"


def _softmax_of(kernel: Kernel, device: torch.device) -> tuple[Softmax, bool]:
    """The `softmax` to use, and whether it widens its chunk to float32."""
    if kernel_of(kernel, device) == "torch":
        return softmax, True
    from shardwise.kernels.linear_cross_entropy import triton  # optional: not everyone has it

    return triton.softmax, False


def _rows_per_chunk(num_rows: int, row_bytes: int) -> int:
    """Of chunks nearly alike, as few as keep each within CHUNK_BYTES (or one row); whole tiles where that holds one."""
    most = max(1, CHUNK_BYTES // row_bytes)
    tile = TILE if most >= TILE else 1
    most -= most % tile
    num_chunks = -(-num_rows // most)
    size = -(-num_rows // max(num_chunks, 1))
    return min(num_rows, -(-size // tile) * tile)


def _rows(like: torch.Tensor, num_rows: int, width: int) -> torch.Tensor:
    """Return a buffer [num_rows, width] whose rows begin at multiples of 16 numbers, which products prefer.

    The padding between rows is zero: on a CPU with AMX oneDNN multiplies it by zero, which must not be NaN.
    """
    padded = like.new_empty(num_rows, -(-width // 16) * 16)
    padded[:, width:].zero_()
    return padded[:, :width]


def _add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """Add a b to total, in one pass where the dtypes are equal, or a GPU's library writes another one."""
    if total.dtype == a.dtype:
        torch.addmm(total, a, b, out=total)
    elif total.is_cuda:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total += a @ b
