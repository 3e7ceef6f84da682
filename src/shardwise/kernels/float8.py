"""Linears whose products are in 8-bit floating point, with scales made of the numbers at hand.

y = x w^T, dx = dy w and dw = dy^T x, for x [rows, in], w [out, in] and dy [rows, out]. Before a
product each operand is multiplied by a scale, which brings its largest value to the largest of the
format, and rounded. Sums are wide, and what comes out is divided by both scales.

recipe      scales                                              x, w    dy
tensorwise  one of an operand                                   e4m3    e5m2
rowwise     one for each row of what comes out and one for each e4m3    e4m3
            column, rounded down to powers of 2

There is no history of scales (delayed scaling). The recipes are those of torchao.float8, whose
linears compute the same numbers (tests/kernels/test_float8.py); decision 060 says why they are not
used. Source: Micikevicius et al., "FP8 Formats for Deep Learning", arXiv 2209.05433.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from shardwise.kernels.backward_half import BackwardHalf

Recipe = Literal["tensorwise", "rowwise"]
Dim = Literal["rows", "in", "out"]
Dims = tuple[Dim, Dim]
"""Roles of the two dims of an operand."""
UNIT = 16
"""The dims of a matrix must be multiples of this for its products to be in 8 bits."""
CAPABILITY = (8, 9)
"""The first compute capability of NVIDIA's GPUs with such products."""
_LEAST = 1e-12
"""The least that counts as the largest value of an operand, so that zeros have a scale."""


@dataclass(eq=False)
class Float8:
    """The products of one linear in 8 bits.

    A rank may hold a share of an operand: some of its rows, or of its `in` or `out` features. Its
    scales are then made of the largest values on all ranks, so that they are those of the complete
    operand. (fsdp2 gathers a weight before the product, which needs nothing of that.)
    """

    recipe: Recipe
    half: BackwardHalf | None = None
    """Which half of a backward runs, in a pipeline whose schedule has two."""
    largest: dict[Dim, Callable[[torch.Tensor], torch.Tensor]] = field(default_factory=dict)
    """Functions that return the maximum over the ranks a dim is sharded over. A strategy sets
    them."""
    whole: Callable[[torch.Tensor], torch.Tensor] | None = None
    """Function that takes dy [rows, out] of which each rank has a partial sum, and returns the sum
    on one of the ranks, and zeros on the others. A strategy sets it."""

    def output(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        """Return x w^T [rows, out] in x's dtype."""
        x8, x_scale = self._in_8_bits(x, ("rows", "in"), "in")
        w8, w_scale = self._in_8_bits(w, ("out", "in"), "in")
        return multiply(x8, x_scale, w8.t(), w_scale.t(), x.dtype, is_forward=True)

    def completed(self, dy: torch.Tensor) -> torch.Tensor:
        """Return dy [rows, out] without the parts that are partial sums."""
        return dy if self.whole is None else self.whole(dy)

    def input_gradient(self, dy: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        """Return dx = dy w [rows, in] in dy's dtype, for what `completed` gives."""
        dy8, dy_scale = self._in_8_bits(dy, ("rows", "out"), "out")
        w8, w_scale = self._in_8_bits(w, ("out", "in"), "out")
        return multiply(dy8, dy_scale, w8, w_scale, dy.dtype)

    def weight_gradient(self, dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Return dw = dy^T x [out, in] in dy's dtype, for what `completed` gives."""
        dy8, dy_scale = self._in_8_bits(dy, ("rows", "out"), "rows")
        x8, x_scale = self._in_8_bits(x, ("rows", "in"), "rows")
        return multiply(dy8.t(), dy_scale.t(), x8, x_scale, dy.dtype)

    def _in_8_bits(
        self, operand: torch.Tensor, dims: Dims, summed: Dim
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return an operand in 8 bits, and its scale: [1, 1], or of size 1 in the `summed` dim."""
        over = dims if self.recipe == "tensorwise" else (summed,)
        amax = operand.abs().amax([dims.index(dim) for dim in over], keepdim=True)
        for dim in over:
            if dim in self.largest:
                # One number, or one for each row of the operand, goes from every rank to all.
                amax = self.largest[dim](amax)
        is_gradient = dims == ("rows", "out")
        has_wide_range = is_gradient and self.recipe == "tensorwise"
        dtype = torch.float8_e5m2 if has_wide_range else torch.float8_e4m3fn
        most = torch.finfo(dtype).max
        scale = (most / amax.double().clamp_min(_LEAST)).float()
        if self.recipe == "rowwise":
            mantissa, exponent = torch.frexp(scale)
            scale = torch.ldexp((mantissa * 2).floor() / 2, exponent)
        # Casts saturate from torch 2.12 on; before, what rounding brought above `most` became NaN.
        return rounded((operand * scale).clamp(-most, most), dtype), scale


def rounded(scaled: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return numbers within the range of a format in that format."""
    return scaled.to(dtype)


def float8_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, float8: Float8
) -> torch.Tensor:
    """Return x weight^T + bias [..., out] for x [..., in], with products in 8 bits.

    Under autocast, x and the weight are rounded to its dtype before they are scaled.
    """
    device = x.device.type
    if torch.is_autocast_enabled(device) and x.dtype != torch.float64:
        x = x.to(torch.get_autocast_dtype(device))
    with torch.autocast(device, enabled=False):
        y = _Float8Linear.apply(x.reshape(-1, x.shape[-1]), weight, float8)
    y = y.view(*x.shape[:-1], y.shape[-1])
    return y if bias is None else y + bias.to(y.dtype)


class _Float8Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, float8: Float8) -> torch.Tensor:
        ctx.float8 = float8
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        return float8.output(x, weight.to(x.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        float8: Float8 = ctx.float8
        half = "full" if float8.half is None else float8.half.current
        dx, dw, dy = None, None, float8.completed(dy)
        if ctx.needs_input_grad[0] and half != "weight":
            dx = float8.input_gradient(dy, weight.to(dy.dtype))
        if x is not None and half != "input":
            dw = float8.weight_gradient(dy, x).to(weight.dtype)
        return dx, dw, None


def multiply(
    a: torch.Tensor,
    a_scale: torch.Tensor,
    b: torch.Tensor,
    b_scale: torch.Tensor,
    dtype: torch.dtype,
    is_forward: bool = False,
) -> torch.Tensor:
    """Return a b / (a_scale b_scale) [rows, columns] in `dtype`, for matrices in 8 bits.

    a [rows, K] with a_scale [rows, 1] or [1, 1], b [K, columns] with b_scale [1, columns] or
    [1, 1]. Off a GPU the products are emulated: the same operands, with sums in float32.
    """
    if a.is_cuda:
        return scaled_product(a, a_scale, b, b_scale, dtype, is_forward)
    wide = torch.promote_types(dtype, torch.float32)
    return ((a.to(wide) @ b.to(wide)) / (a_scale * b_scale)).to(dtype)


def scaled_product(
    a: torch.Tensor,
    a_scale: torch.Tensor,
    b: torch.Tensor,
    b_scale: torch.Tensor,
    dtype: torch.dtype,
    is_forward: bool,
) -> torch.Tensor:
    """Do as `multiply`, with the device's products of 8 bits.

    Rows and columns of zeros fill what is no multiple of UNIT, such as a rank's share of a weight.
    """
    columns = b.shape[1]
    a, b = _filled(a), _filled(_filled(b).t())  # [rows, K] and [columns, K]
    one = torch.ones((), device=a.device)
    # Scales of rows are divided out afterwards: with them, the device's products give bfloat16
    # only, and are slow where sums are exact.
    is_one = a_scale.numel() == b_scale.numel() == 1
    scales = [s.reciprocal().view(()) if is_one else one for s in (a_scale, b_scale)]
    y = torch._scaled_mm(
        a,
        b.t(),
        scale_a=scales[0],
        scale_b=scales[1],
        out_dtype=dtype if is_one else torch.float32,
        use_fast_accum=is_forward,
    )[:, :columns]
    return y if is_one else (y / (a_scale * b_scale)).to(dtype)


def missing(device: torch.device) -> str | None:
    """Return why products in 8 bits cannot run on a device, as a clause; None if they can."""
    if device.type != "cuda":
        return None
    if torch.version.hip is not None:
        return "AMD's GPUs have other formats of 8 bits"
    capability = torch.cuda.get_device_capability(device)
    if capability < CAPABILITY:
        has, needs = (".".join(map(str, version)) for version in (capability, CAPABILITY))
        return f"this GPU has compute capability {has}, and products in 8 bits need {needs}"
    return None


def _filled(x: torch.Tensor) -> torch.Tensor:
    """Return a matrix in 8 bits, contiguous, with zeros up to a multiple of UNIT columns."""
    return F.pad(x.view(torch.uint8), (0, -x.shape[1] % UNIT)).view(x.dtype).contiguous()
