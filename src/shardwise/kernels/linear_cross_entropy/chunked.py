"""Cross entropy of a linear head without all its logits: chunk by chunk, gradients in the forward.

The loss ends the graph. So the gradient of a chunk of logits, softmax minus one-hot, is known as
soon as the chunk is, except for the factor that the backward brings: the gradients of hidden states
and weight take their share of it at once, and the next chunk reuses its memory. The products are
the vendor's; softmax and gradient are torch's operators or Triton's kernels (triton.py). Rows
without a target are left out before any product. Where each row has a factor of its own, as the
losses of preferences give it, the gradient of a trained weight takes the chunks again.
Source of the idea: Hsu et al., "Liger Kernel", arXiv 2410.10989, section 3.2.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch

from shardwise.config import UserError
from shardwise.kernels.linear_cross_entropy.vocabulary import Vocabulary
from shardwise.kernels.triton_support import why_not

CHUNK_BYTES = 256 * 2**20
"""Bytes of a chunk of logits at most: of 248,320 logits 256 rows in float32, 512 in bfloat16.

A product reads the weight once and multiplies each number as often as there are rows. From about
300 rows on, a GPU spends more time on multiplying than on reading.
"""
CPU_ROWS = 128
"""Rows of a chunk on a CPU at most: its products are not faster with more."""
TILE = 128
"""Rows of a tile of a product on a GPU: a part of a tile costs as much as a whole one."""

Kernel = Literal["auto", "torch", "triton"]
"""Backend of the softmax of a chunk; `auto`: Triton on a GPU where it is installed."""


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
    rows: torch.Tensor | None = None,
    is_summed: bool = True,
) -> torch.Tensor:
    """Return the cross entropy of a linear head's logits: its sum, or [targets], one for each.

    The logits are softcap * tanh(z / softcap), where z = scale * (hidden weight^T + bias).

    hidden [rows, D], weight [V, D], labels [rows] int64, bias [V]; without `softcap`, the logits
    are z. The loss is the sum over rows, a scalar in float32 (float64 for float64). Products are in
    the dtype of the inputs or of autocast; softmax, and sums over chunks, are in float32. A row
    whose label is `ignore_index` adds nothing, and its gradient is exactly 0. A gradient that
    nobody needs is not computed. With a trained weight, autograd refuses a second backward through
    the same loss.

    With a `vocabulary`, weight and bias are this rank's rows. The loss is then that of all tokens,
    equal on every rank, and the gradient of `hidden` is this rank's partial sum.

    `rows` [targets] int64 are those with another label than `ignore_index`. Without them the host
    waits for their number.

    Raise UserError if `kernel` is triton and Triton cannot run.
    """
    if rows is None:
        rows = (labels != ignore_index).nonzero().squeeze(1)
    hidden = hidden.index_select(0, rows)
    if scale != 1.0:
        hidden = hidden * scale
        bias = None if bias is None else bias * scale
    labels = labels.index_select(0, rows)
    head = _Head(labels, softcap, vocabulary, kernel, _dtype_of_products(hidden))
    tensors = (hidden, weight, bias)
    needs_grad = [torch.is_grad_enabled() and t is not None and t.requires_grad for t in tensors]
    with torch.no_grad():
        known = needs_grad if is_summed else [needs_grad[0], False, False]
        losses, gradients = head.losses_and_gradients(*tensors, known)
    if is_summed:
        losses = losses.sum()
    # One node per tensor, side by side. A backward for one of them alone runs no other: some
    # pipelines take the gradient of the hidden states first and that of the weight later.
    for tensor, gradient in zip(tensors, gradients):
        if gradient is not None:
            losses = losses + _KnownGradient.apply(tensor, gradient, is_summed, tensor is weight)
    for place in (1, 2) if not is_summed else ():
        if needs_grad[place]:
            later = _GradientLater.apply(tensors[place], place, head, *tensors)
            losses = losses + later
    return losses


class _KnownGradient(torch.autograd.Function):
    """0, whose gradient with respect to `tensor` is known except for the factor of the backward:
    one number or, where the losses are not summed, one for each row of `gradient`.
    """

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, gradient: torch.Tensor, is_summed: bool, is_large: bool
    ) -> torch.Tensor:
        ctx.dtype, ctx.is_large = tensor.dtype, is_large
        ctx.save_for_backward(gradient)
        return gradient.new_zeros(() if is_summed else len(gradient))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (grad,) = grads
        (gradient,) = ctx.saved_tensors
        factor = grad[:, None] if grad.dim() else grad
        # In place if it is large; autograd then refuses to give it out a second time.
        scaled = gradient.mul_(factor) if ctx.is_large else gradient * factor
        return scaled.to(ctx.dtype), None, None, None


class _GradientLater(torch.autograd.Function):
    """Zeros [targets], whose backward computes the logits again for the gradient of a weight or a
    bias: it is a sum over rows, each times its own factor.
    """

    @staticmethod
    def forward(
        ctx: Any,
        tensor: torch.Tensor,
        place: int,
        head: "_Head",
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        ctx.place, ctx.head, ctx.dtype = place, head, tensor.dtype
        ctx.save_for_backward(hidden.detach(), weight, bias)
        return hidden.new_zeros(len(hidden), dtype=_wide(hidden))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        needs_grad = [place == ctx.place for place in range(3)]
        _, gradients = ctx.head.losses_and_gradients(*ctx.saved_tensors, needs_grad, grads[0])
        gradient = gradients[ctx.place]
        assert gradient is not None
        return gradient.to(ctx.dtype), None, None, None, None, None


def _wide(x: torch.Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _dtype_of_products(hidden: torch.Tensor) -> torch.dtype:
    device = hidden.device.type
    if torch.is_autocast_enabled(device) and _wide(hidden) == torch.float32:
        return torch.get_autocast_dtype(device)
    return hidden.dtype


class _Head(NamedTuple):
    """Arguments of the losses of a head beside its tensors; see linear_cross_entropy."""

    labels: torch.Tensor
    """[targets] int64."""
    softcap: float | None
    vocabulary: Vocabulary | None
    kernel: Kernel
    dtype: torch.dtype
    """Dtype of the products."""

    def losses_and_gradients(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        needs_grad: list[bool],
        factors: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor | None, ...]]:
        """Return the losses [targets], and the gradients of hidden, weight and bias: None where not
        needed; those of weight and bias of the sum of `factors` [targets] times the losses.
        """
        wide, vocabulary = _wide(hidden), self.vocabulary
        hidden, weight = hidden.to(self.dtype), weight.to(self.dtype)
        # float16 is coarse below 6e-5 and ends at 6e-8, and there lie most of the probabilities of
        # a large vocabulary: the gradient of the logits is kept times `lift`.
        lift = 64.0 if hidden.dtype == torch.float16 else 1.0

        def zeros_if(needed: bool, *shape: int) -> torch.Tensor | None:
            return torch.zeros(shape, dtype=wide, device=hidden.device) if needed else None

        losses = torch.empty(len(hidden), dtype=wide, device=hidden.device)
        dx = zeros_if(needs_grad[0], *hidden.shape)
        dw = zeros_if(needs_grad[1], *weight.shape)
        db = zeros_if(needs_grad[2], len(weight))
        losses_of, widens = _softmax_of(self.kernel, hidden.device)
        itemsize = (wide if widens else hidden.dtype).itemsize
        num_logits = vocabulary.max_tokens if vocabulary else len(weight)
        size = _rows_per_chunk(len(hidden), num_logits * itemsize)
        if hidden.device.type == "cpu":
            size = min(size, CPU_ROWS)
        buffer = _buffer(hidden, size, len(weight))
        chunk_lift = lift if any(needs_grad) else None
        with torch.autocast(hidden.device.type, enabled=False):
            for start in range(0, len(hidden), max(size, 1)):
                rows = slice(start, start + size)
                x, targets = hidden[rows], self.labels[rows]
                logits = buffer[: len(x)]
                torch.mm(x, weight.t(), out=logits)
                losses[rows] = losses_of(
                    logits, bias, targets, self.softcap, chunk_lift, vocabulary
                )
                if dx is not None:
                    dx[rows].copy_(logits @ weight).div_(lift)
                rest = lift
                if factors is not None:
                    logits.mul_(factors[rows, None] / lift)
                    rest = 1.0
                if dw is not None:
                    _add_product(dw, logits.t(), x / rest)
                if db is not None:
                    db.add_(logits.sum(0, dtype=wide), alpha=1 / rest)
        return losses, (dx, dw, db)


def softmax(
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    softcap: float | None,
    lift: float | None,
    vocabulary: Vocabulary | None,
) -> torch.Tensor:
    """Return the losses [rows] of a chunk; overwrite its logits with their gradient times `lift`.

    logits [rows, V], before bias and soft cap; targets [rows] int64. The losses are in float32
    (float64 for float64). Where `lift` is None, no gradient is computed and what is left in
    `logits` has no meaning.
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
    is_here = torch.ones_like(peak)  # 1 where this rank has the logit of the target
    if vocabulary:
        # [rows, 1], the maximum over all ranks.
        peak = vocabulary.max_over_ranks(peak)
        targets = targets - vocabulary.first
        is_here = ((targets >= 0) & (targets < z.shape[1])).to(peak.dtype)
        targets = targets.clamp(0, z.shape[1] - 1)
    z.sub_(peak)
    target_logits = z.gather(1, targets) * is_here
    total = z.exp_().sum(1, keepdim=True)
    if vocabulary:
        # [2, rows, 1], the sum over all ranks: two numbers per row.
        total, target_logits = vocabulary.sum_over_ranks(torch.stack([total, target_logits]))
    if lift is not None:
        z.mul_(lift / total).scatter_add_(1, targets, is_here.mul_(-lift))
        if slope is not None:
            z.mul_(slope)
        if z is not logits:
            logits.copy_(z)
    return (total.log() - target_logits).flatten()


def kernel_of(kernel: Kernel, device: torch.device) -> Literal["torch", "triton"]:
    """Return what `kernel` means on a device; raise UserError if it is triton and cannot run."""
    reason = why_not(device)
    if kernel == "triton" and reason is not None:
        raise UserError(f"Triton cannot compute the loss here: {reason}")
    return "torch" if kernel == "torch" or reason is not None else "triton"


def _softmax_of(kernel: Kernel, device: torch.device) -> tuple[Callable[..., torch.Tensor], bool]:
    """Return the `softmax` to use, and whether it copies its chunk to float32."""
    if kernel_of(kernel, device) == "torch":
        return softmax, True
    from shardwise.kernels.linear_cross_entropy import triton  # an optional dependency

    return triton.softmax, False


def _rows_per_chunk(num_rows: int, row_bytes: int) -> int:
    """Return the rows of a chunk: as few chunks as fit into CHUNK_BYTES, of nearly equal size.

    A chunk has at least one row, and whole tiles where CHUNK_BYTES holds a tile.
    """
    max_rows = max(1, CHUNK_BYTES // row_bytes)
    tile = TILE if max_rows >= TILE else 1
    max_rows -= max_rows % tile
    num_chunks = -(-num_rows // max_rows)
    size = -(-num_rows // max(num_chunks, 1))
    return min(num_rows, -(-size // tile) * tile)


def _buffer(like: torch.Tensor, num_rows: int, width: int) -> torch.Tensor:
    """Return [num_rows, width] whose rows begin at multiples of 16 numbers, which products prefer.

    The padding between rows is zero: on a CPU with AMX oneDNN multiplies it by zero, and it must
    not be NaN.
    """
    padded = like.new_empty(num_rows, -(-width // 16) * 16)
    padded[:, width:].zero_()
    return padded[:, :width]


def _add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """Add a b to `total`: in one pass where the dtypes are equal, and on a GPU always."""
    if total.dtype == a.dtype:
        torch.addmm(total, a, b, out=total)
    elif total.is_cuda:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total += a @ b
