"""Matrices stored in 8 or 4 bits: codes, and scales of the codes.

A matrix [..., out, in] becomes plain tensors whose last dim is a share of `in`, or 1, and whose
other dims are its own. So rows and stacks may be sharded as those of the matrix, and columns
wherever no block is cut: the same weight has the same codes under every layout.

format   codes                        scales
int8     int8 [..., out, in]          float32 [..., out, 1]
fp8      uint8 [..., out, in]         float32 [..., out, 1]
nf4      uint8 [..., out, in / 2]     in 8 bits [..., out, in / 64], with the least and the step of
                                      a row's scales beside them, float32 [..., out, 2]

Two more forms keep the scales of a folder that is quantised already, to the bit:

nf4_float32   as nf4                  float32 [..., out, in / 64]
fp8_blocks    as fp8                  float32 [..., out, in / block], block = gcd(in, 128)

fp8 is e4m3, whose bits are kept as uint8, since gloo sends no float8. nf4 has the 16 levels of a
normal distribution that QLoRA defines, blocks of 64 and doubly quantised scales: Dettmers et al.,
"QLoRA", arXiv 2305.14314, section 3. There, scales are quantised over 256 blocks of the flattened
matrix; here over a row, whose blocks lie on one rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from math import gcd
from typing import Any, Literal, NamedTuple

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

Format = Literal["nf4", "int8", "fp8", "nf4_float32", "fp8_blocks"]
"""How codes and scales are read."""
BLOCK = 64
"""Consecutive inputs of a row that share a scale in nf4."""
NF4 = ("nf4", "nf4_float32")
FP8_BLOCK = 128
"""Consecutive inputs of a row that share a scale in fp8_blocks, where `in` is a multiple."""
CHUNK_ELEMENTS = 2**22
"""Elements of a matrix that are stored or read at once, in whole rows: beside what is stored and
what is read, no more than some copies of so many are in memory."""
_LARGEST_FP8 = 448.0
_LEVELS = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
"""Levels of nf4, as published: quantiles of a normal law, 8 above and 7 below zero."""


class StoredLayout(NamedTuple):
    """How the stored tensors of one matrix are read."""

    format: Format
    names: tuple[str, ...]
    """Names of the stored tensors, in their order."""
    dtype: torch.dtype
    """Dtype of the matrix before it was stored."""
    is_transposed: bool = False
    """Whether the matrix is wanted with its last two dims exchanged."""


class Matrix(NamedTuple):
    """A matrix in 8 or 4 bits, in the place of a weight [..., out, in]."""

    tensors: tuple[torch.Tensor, ...]
    layout: StoredLayout

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the matrix before it was stored."""
        return self.layout.dtype

    @property
    def shape(self) -> torch.Size:
        """The shape of the matrix that is read."""
        codes = self.tensors[self.layout.names.index("codes")]
        shape = _shape_of(codes, self.layout.format)
        if self.layout.is_transposed:
            shape = torch.Size([*shape[:-2], shape[-1], shape[-2]])
        return shape

    def to(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the values in `dtype`: new memory."""
        tensors = dict(zip(self.layout.names, self.tensors, strict=True))
        values = dequantise(tensors, self.layout.format, dtype)
        return values.mT if self.layout.is_transposed else values

    @property
    def mT(self) -> Matrix:  # as a tensor's
        """The matrix with its last two dims exchanged."""
        layout = self.layout._replace(is_transposed=not self.layout.is_transposed)
        return self._replace(layout=layout)


Weight = torch.Tensor | Matrix


def tensors_of(weights: Sequence[Weight]) -> list[torch.Tensor]:
    """Return the tensors of weights one after the other, as autograd's functions take them."""
    return [t for w in weights for t in (w.tensors if isinstance(w, Matrix) else (w,))]


def layouts_of(weights: Sequence[Weight]) -> tuple[StoredLayout | None, ...]:
    """Return what `weights_of` needs to know of weights: None for a plain one."""
    return tuple(w.layout if isinstance(w, Matrix) else None for w in weights)


def weights_of(
    tensors: Sequence[torch.Tensor], layouts: Sequence[StoredLayout | None]
) -> Iterator[Weight]:
    """Yield the weights that `tensors_of` has laid side by side."""
    start = 0
    for layout in layouts:
        end = start + (1 if layout is None else len(layout.names))
        part = tuple(tensors[start:end])
        yield part[0] if layout is None else Matrix(part, layout)
        start = end


def quantised_linear(x: torch.Tensor, weight: Matrix, bias: torch.Tensor | None) -> torch.Tensor:
    """Return x weight^T + bias [..., out] of a frozen matrix, for x [..., in].

    Neither the forward nor the backward keeps the values that they read.
    """
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    with torch.autocast(x.device.type, enabled=False):
        y = _QuantisedLinear.apply(x, weight.layout, *weight.tensors)
    return y if bias is None else y + bias.to(y.dtype)


class _QuantisedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, layout: StoredLayout, *tensors: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(*tensors)
        ctx.layout = layout
        return F.linear(x, Matrix(tensors, layout).to(x.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        weight = Matrix(ctx.saved_tensors, ctx.layout)
        return dy @ weight.to(dy.dtype), None, *[None] * len(weight.tensors)


def shapes_of(fmt: Format, shape: torch.Size) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Return the shape and dtype of each stored tensor of a matrix of this shape, by its name."""
    rows, width = shape[:-1], shape[-1]
    if fmt == "int8":
        sizes = {"codes": (width, torch.int8), "scales": (1, torch.float32)}
    elif fmt in NF4:
        is_small = fmt == "nf4"
        scales = (width // BLOCK, torch.uint8 if is_small else torch.float32)
        sizes = {"codes": (width // 2, torch.uint8), "scales": scales}
        sizes |= {"steps": (2, torch.float32)} if is_small else {}
    else:
        num_scales = width // block_of(fmt, width) if fmt == "fp8_blocks" else 1
        sizes = {"codes": (width, torch.uint8), "scales": (num_scales, torch.float32)}
    return {name: (torch.Size([*rows, size]), dtype) for name, (size, dtype) in sizes.items()}


def block_of(fmt: Format, width: int) -> int:
    """Return how many inputs of a row of so many must stay together."""
    if fmt == "fp8_blocks":
        return gcd(width, FP8_BLOCK)
    return BLOCK if fmt in NF4 else 1


def quantise(
    matrix: torch.Tensor, fmt: Format, scales: torch.Tensor | None = None
) -> dict[str, torch.Tensor]:
    """Return the stored tensors of a matrix [..., out, in], by their names.

    Arithmetic is in float32. Every value must be finite, and in nf4 `in` a multiple of BLOCK.
    `scales`: float32, those that the values were made with; any form but nf4 keeps them, and so
    gets the same codes again. Without them a block's largest value has the outermost code.
    """
    at_once = _rows_at_once(matrix.shape)
    if at_once is None:
        return _quantise(matrix, fmt, scales)
    stored = {
        name: torch.empty(size, dtype=dtype, device=matrix.device)
        for name, (size, dtype) in shapes_of(fmt, matrix.shape).items()
    }
    given = {"matrix": matrix} | ({} if scales is None else {"scales": scales})
    for part, into in zip(_in_rows(given, at_once), _in_rows(stored, at_once), strict=True):
        for name, tensor in _quantise(part["matrix"], fmt, part.get("scales")).items():
            into[name].copy_(tensor)
    return stored


def _quantise(
    matrix: torch.Tensor, fmt: Format, scales: torch.Tensor | None
) -> dict[str, torch.Tensor]:
    size, dtype = shapes_of(fmt, matrix.shape)["scales"]
    blocks = matrix.float().unflatten(-1, (size[-1], -1))
    if scales is None:
        outermost = {"int8": 127.0, "fp8": _LARGEST_FP8, "fp8_blocks": _LARGEST_FP8}.get(fmt, 1.0)
        scales = blocks.abs().amax(-1) / outermost
    stored = {"scales": scales}
    if dtype == torch.uint8:
        stored["scales"], stored["steps"] = _quantised_scales(scales)
        scales = _scales_of(stored["scales"], stored["steps"])
    assert stored["scales"].shape == size, (fmt, size)
    # Where a scale is 0, so are the values. Another one may be negative in a folder.
    scaled = (blocks / scales.where(scales != 0, 1e-30).unsqueeze(-1)).flatten(-2)
    if fmt == "int8":
        codes = scaled.round().to(torch.int8)
    elif fmt in NF4:
        levels = nf4_levels(matrix.device)
        # The nearest level: the number of midpoints that lie below.
        codes = torch.bucketize(scaled, (levels[1:] + levels[:-1]) / 2)
        codes = (codes[..., ::2] << 4 | codes[..., 1::2]).to(torch.uint8)
    else:
        codes = scaled.to(torch.float8_e4m3fn).view(torch.uint8)
    return {"codes": codes, **stored}


def dequantise(
    tensors: Mapping[str, torch.Tensor], fmt: Format, dtype: torch.dtype
) -> torch.Tensor:
    """Return the matrix [..., out, in] of stored tensors, in `dtype`: a new tensor."""
    codes = tensors["codes"]
    shape = _shape_of(codes, fmt)
    at_once = _rows_at_once(shape)
    if at_once is None:
        return _dequantise(tensors, fmt, dtype)
    values = torch.empty(shape, dtype=dtype, device=codes.device)
    rows = values.flatten(0, -2).split(at_once)
    for part, into in zip(_in_rows(tensors, at_once), rows, strict=True):
        into.copy_(_dequantise(part, fmt, dtype))
    return values


def read_bytes(fmt: Format, shape: Sequence[int], itemsize: int) -> int:
    """Return the most bytes that `dequantise` has in memory, beside what is stored, for values of
    `itemsize` bytes.
    """
    shape = torch.Size(shape)
    at_once = _rows_at_once(shape)
    whole = 0 if at_once is None else shape.numel() * itemsize
    numel = shape.numel() if at_once is None else at_once * shape[-1]
    if fmt not in NF4:
        return whole + numel * (4 if itemsize == 4 else 4 + itemsize)
    scale_bytes = 4 * numel // BLOCK if fmt == "nf4" else 0
    # Codes as indices of 32 bits, two weights each, and values in float32.
    return whole + numel * 6 + scale_bytes


def _rows_at_once(shape: torch.Size) -> int | None:
    """Return how many rows of a matrix are stored or read at once; None: all."""
    if shape.numel() <= CHUNK_ELEMENTS or torch.compiler.is_compiling():
        return None
    return max(1, CHUNK_ELEMENTS // shape[-1])


def _in_rows(
    tensors: Mapping[str, torch.Tensor], at_once: int
) -> Iterator[dict[str, torch.Tensor]]:
    """Yield so many rows [rows, ...] of tensors [..., out, ...] at a time, as views."""
    parts = [tensor.flatten(0, -2).split(at_once) for tensor in tensors.values()]
    for rows in zip(*parts, strict=True):
        yield dict(zip(tensors, rows, strict=True))


def _dequantise(
    tensors: Mapping[str, torch.Tensor], fmt: Format, dtype: torch.dtype
) -> torch.Tensor:
    codes, scales = tensors["codes"], tensors["scales"]
    if fmt in NF4:
        if fmt == "nf4":
            scales = _scales_of(scales, tensors["steps"])
        levels = nf4_levels(codes.device)
        pairs = torch.cartesian_prod(levels, levels)  # [256, 2]: a byte's levels at once
        values = pairs.index_select(0, codes.flatten().int()).view(_shape_of(codes, fmt))
    elif fmt != "int8":
        values = codes.view(torch.float8_e4m3fn).float()
    else:
        values = codes.float()
    # In place: a matrix in float32 and, where `dtype` is another one, in that.
    values.unflatten(-1, (scales.shape[-1], -1)).mul_(scales.unsqueeze(-1))
    return values.to(dtype)


def _shape_of(codes: torch.Tensor, fmt: Format) -> torch.Size:
    return torch.Size([*codes.shape[:-1], codes.shape[-1] * (2 if fmt in NF4 else 1)])


def _quantised_scales(scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scales of a row's blocks in 8 bits, and the least of them and a step, [..., 2]."""
    least, most = scales.aminmax(dim=-1, keepdim=True)
    step = (most - least) / 255
    codes = ((scales - least) / step.clamp_min(1e-30)).round().to(torch.uint8)
    return codes, torch.cat([least, step], -1)


def _scales_of(codes: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
    least, step = steps.split(1, dim=-1)
    return least + codes * step


@cache
def nf4_levels(device: torch.device) -> torch.Tensor:
    """Return the 16 values of the codes at scale 1, ascending, float32; one tensor a device."""
    return torch.tensor(_LEVELS, device=device)
