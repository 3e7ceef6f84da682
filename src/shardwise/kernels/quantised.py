"""Matrices stored in 8 or 4 bits: codes, and scales of the codes.

A matrix [..., out, in] becomes plain tensors whose last dim is a share of `in`, or 1, and whose
other dims are its own. So rows and stacks may be sharded as those of the matrix, and columns
wherever no block is cut: the same weight has the same codes under every layout.

format   codes                        scales
int8     int8 [..., out, in]          float32 [..., out, 1]
fp8      uint8 [..., out, in]         float32 [..., out, 1]
nf4      uint8 [..., out, in / 2]     in 8 bits [..., out, in / 64], with the least and the step of
                                      a row's scales beside them, float32 [..., out, 2]
mxfp4    uint8 [..., out, in / 2]     e8m0, powers of two in 8 bits [..., out, in / 32]
nvfp4    uint8 [..., out, in / 2]     e4m3 in 8 bits [..., out, in / 16], with a factor of the
                                      matrix beside them, float32 [..., out, 1]
int4     uint8 [..., out, in / 2]     float16 [..., out, in / 64], with zeros beside them, the
                                      codes of the value 0, uint8 [..., out, in / 64]

More forms keep the scales of a folder that is quantised already, to the bit:

nf4_float32      as nf4               float32 [..., out, in / 64]
fp8_blocks       as fp8               float32 [..., out, in / block], block = gcd(in, 128)
nvfp4_divided    as nvfp4             as nvfp4, but what stands beside them divides
int4_128         as int4              in groups of so many inputs; int4_row: of a row
int4_128_ordered                      with groups, int32 [in]: the group of each input

fp8 is e4m3, whose bits are kept as uint8, since gloo sends no float8. nf4 has the 16 levels of a
normal distribution that QLoRA defines, blocks of 64 and doubly quantised scales: Dettmers et al.,
"QLoRA", arXiv 2305.14314, section 3. There, scales are quantised over 256 blocks of the flattened
matrix; here over a row, whose blocks lie on one rank. The levels of 4 bits are in `four_bits.py`.
"""

from collections.abc import Iterator, Mapping, Sequence
from math import gcd
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from shardwise.kernels import four_bits

Format = str
"""How codes and scales are read: a name of the table above."""
BLOCK = 64
"""Consecutive inputs of a row that share a scale in nf4."""
NF4 = ("nf4", "nf4_float32")
FP8_BLOCK = 128
"""Consecutive inputs of a row that share a scale in fp8_blocks, where `in` is a multiple."""
CHUNK_ELEMENTS = 2**22
"""Elements of a matrix that are stored or read at once, in whole rows: beside what is stored and
what is read, no more than some copies of so many are in memory."""
_LARGEST_FP8 = 448.0
_BLOCKS = {"nf4": BLOCK, "nf4_float32": BLOCK, "mxfp4": 32, "nvfp4": 16, "nvfp4_divided": 16}
_BLOCKS["int4"] = BLOCK
"""Consecutive inputs of a row that share a scale, of forms in which two share a byte."""
_SCALES = dict.fromkeys(("nf4", "mxfp4", "nvfp4", "nvfp4_divided"), torch.uint8)
"""Dtypes of scales that are not float32."""
_STEPS = {"nf4": 2, "nvfp4": 1, "nvfp4_divided": 1}
"""Numbers beside the scales of a row."""


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
    def mT(self) -> "Matrix":  # as a tensor's
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
    codes = width // _per_byte(fmt), torch.int8 if fmt == "int8" else torch.uint8
    num_scales = width // _group_of(fmt, width)
    is_int4 = fmt.startswith("int4")
    scale_dtype = torch.float16 if is_int4 else _SCALES.get(fmt, torch.float32)
    sizes = {"codes": codes, "scales": (num_scales, scale_dtype)}
    sizes |= {"steps": (_STEPS[fmt], torch.float32)} if fmt in _STEPS else {}
    sizes |= {"zeros": (num_scales, torch.uint8)} if is_int4 else {}
    shapes = {name: (torch.Size([*rows, size]), dtype) for name, (size, dtype) in sizes.items()}
    return shapes | ({"groups": (torch.Size([width]), torch.int32)} if is_ordered(fmt) else {})


def block_of(fmt: Format, width: int) -> int:
    """Return how many inputs of a row of so many must stay together."""
    return {"int8": 1, "fp8": 1, "int4_row": 2}.get(fmt) or _group_of(fmt, width)


def is_ordered(fmt: Format) -> bool:
    """Return whether inputs of a group lie anywhere in a row, as GPTQ's `desc_act` leaves them."""
    return fmt.endswith("_ordered")


def _group_of(fmt: Format, width: int) -> int:
    """Return how many inputs of a row of so many share a scale."""
    if fmt == "fp8_blocks":
        return gcd(width, FP8_BLOCK)
    number = fmt.split("_")[1] if fmt.startswith("int4_") else ""
    return int(number) if number.isdecimal() else _BLOCKS.get(fmt, width)


def quantise(matrix: torch.Tensor, fmt: Format) -> dict[str, torch.Tensor]:
    """Return the stored tensors of a matrix [..., out, in], by their names.

    Arithmetic is in float32. Every value must be finite, and `in` whole blocks of `block_of`. A
    block's largest value has the outermost code.
    """
    given = {"matrix": matrix}
    if fmt.startswith("nvfp4"):
        given["steps"] = _factor_of(matrix)
    at_once = _rows_at_once(matrix.shape)
    if at_once is None:
        return _quantise(given, fmt)
    stored = {
        name: torch.empty(size, dtype=dtype, device=matrix.device)
        for name, (size, dtype) in shapes_of(fmt, matrix.shape).items()
    }
    for part, into in zip(_in_rows(given, at_once), _in_rows(stored, at_once), strict=True):
        for name, tensor in _quantise(part, fmt).items():
            into[name].copy_(tensor)
    return stored


def _factor_of(matrix: torch.Tensor) -> torch.Tensor:
    """Return the factor of nvfp4's scales [..., out, 1] that gives the largest value of a matrix
    the outermost scale and code, as NVIDIA's ModelOpt chooses it.
    """
    largest = torch.linalg.vector_norm(matrix, torch.inf, dim=(-2, -1), keepdim=True).float()
    factor = largest / (_LARGEST_FP8 * four_bits.FP4_LEVELS[-1])
    return factor.where(largest > 0, 1.0).expand(*matrix.shape[:-1], 1)


def _quantise(given: Mapping[str, torch.Tensor], fmt: Format) -> dict[str, torch.Tensor]:
    matrix = given["matrix"]
    size, _ = shapes_of(fmt, matrix.shape)["scales"]
    blocks = matrix.float().unflatten(-1, (size[-1], -1))
    largest = blocks.abs().amax(-1)
    if fmt == "mxfp4":
        stored = {"scales": four_bits.e8m0_of(largest)}
    elif fmt.startswith("nvfp4"):
        scales = largest / (four_bits.FP4_LEVELS[-1] * given["steps"])
        scales = scales.where(largest > 0, 1.0).clamp(2**-9, _LARGEST_FP8).to(torch.float8_e4m3fn)
        steps = given["steps"] if fmt == "nvfp4" else 1 / given["steps"]
        stored = {"scales": scales.view(torch.uint8), "steps": steps}
    elif fmt == "nf4":
        stored = _quantised_scales(largest)
    elif fmt.startswith("int4"):
        least = blocks.amin(-1).clamp(max=0)
        span = blocks.amax(-1).clamp(min=0) - least
        scales = (span / 15).clamp(min=2**-24).half().where(span > 0, 1.0)
        zeros = (-least / scales).round().clamp(0, 15).to(torch.uint8)
        stored = {"scales": scales, "zeros": zeros}
        if is_ordered(fmt):
            width = matrix.shape[-1]
            stored["groups"] = torch.arange(width, dtype=torch.int32, device=matrix.device)
            stored["groups"] //= _group_of(fmt, width)
    else:
        outermost = {"int8": 127.0, "fp8": _LARGEST_FP8, "fp8_blocks": _LARGEST_FP8}
        stored = {"scales": largest / outermost.get(fmt, 1.0)}
    scales = _scales_of(stored, fmt)
    # Where a scale is 0, so are the values.
    scaled = blocks / scales.where(scales != 0, 1e-30).unsqueeze(-1)
    if "zeros" in stored:
        scaled += stored["zeros"].unsqueeze(-1)
    scaled = scaled.flatten(-2)
    if fmt == "int8":
        codes = scaled.round().to(torch.int8)
    elif _per_byte(fmt) == 2:
        codes = four_bits.codes_of(scaled.contiguous(), _levels(fmt))
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


def are_finite(tensors: Mapping[str, torch.Tensor], fmt: Format) -> bool:
    """Return whether all values of stored tensors are finite, whatever the codes of 4 bits."""
    codes, scales = tensors["codes"], _scales_of(tensors, fmt).float()
    if fmt in ("fp8", "fp8_blocks") and (codes & 0x7F == 0x7F).any():
        return False
    return bool((scales * _LARGEST_FP8).isfinite().all())  # no code is larger


def read_bytes(fmt: Format, shape: Sequence[int], itemsize: int) -> int:
    """Return the most bytes that `dequantise` has in memory, beside what is stored, for values of
    `itemsize` bytes.
    """
    shape = torch.Size(shape)
    at_once = _rows_at_once(shape)
    whole = 0 if at_once is None else shape.numel() * itemsize
    numel = shape.numel() if at_once is None else at_once * shape[-1]
    if _per_byte(fmt) == 1:
        return whole + numel * (4 if itemsize == 4 else 4 + itemsize)
    if is_ordered(fmt):
        return whole + numel * 8  # values, and the scale of each
    scale_bytes = 4 * numel // _BLOCKS[fmt] if fmt in _SCALES else 0
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
    whole = {name: tensor for name, tensor in tensors.items() if tensor.dim() == 1}
    parts = {n: t.flatten(0, -2).split(at_once) for n, t in tensors.items() if n not in whole}
    for rows in zip(*parts.values(), strict=True):
        yield {**dict(zip(parts, rows, strict=True)), **whole}


def _dequantise(
    tensors: Mapping[str, torch.Tensor], fmt: Format, dtype: torch.dtype
) -> torch.Tensor:
    codes, scales = tensors["codes"], _scales_of(tensors, fmt)
    if _per_byte(fmt) == 2:
        values = four_bits.values_of(codes, _levels(fmt))
    elif fmt != "int8":
        values = codes.view(torch.float8_e4m3fn).float()
    else:
        values = codes.float()
    # In place: a matrix in float32 and, where `dtype` is another one, in that.
    zeros, groups = tensors.get("zeros"), tensors.get("groups")
    if groups is not None:
        assert zeros is not None
        values.sub_(zeros.float().index_select(-1, groups))
        return values.mul_(scales.float().index_select(-1, groups)).to(dtype)
    blocks = values.unflatten(-1, (scales.shape[-1], -1))
    if zeros is not None:
        blocks.sub_(zeros.unsqueeze(-1))
    blocks.mul_(scales.unsqueeze(-1))
    return values.to(dtype)


def _levels(fmt: Format) -> four_bits.Levels:
    return "nf4" if fmt in NF4 else "int4" if fmt.startswith("int4") else "e2m1"


def _per_byte(fmt: Format) -> int:
    """Return how many codes are in a byte."""
    return 1 if fmt.startswith(("int8", "fp8")) else 2


def _shape_of(codes: torch.Tensor, fmt: Format) -> torch.Size:
    return torch.Size([*codes.shape[:-1], codes.shape[-1] * _per_byte(fmt)])


def _quantised_scales(scales: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the scales of a row's blocks in 8 bits, and the least of them and a step, [..., 2]."""
    least, most = scales.aminmax(dim=-1, keepdim=True)
    step = (most - least) / 255
    codes = ((scales - least) / step.clamp_min(1e-30)).round().to(torch.uint8)
    return {"scales": codes, "steps": torch.cat([least, step], -1)}


def _scales_of(tensors: Mapping[str, torch.Tensor], fmt: Format) -> torch.Tensor:
    """Return the scales of the blocks of each row, float32 [..., out, blocks]."""
    scales = tensors["scales"]
    if fmt == "mxfp4":
        return four_bits.power_of(scales)
    if fmt.startswith("nvfp4"):
        scales = scales.view(torch.float8_e4m3fn).float()
        return scales * tensors["steps"] if fmt == "nvfp4" else scales / tensors["steps"]
    if fmt == "nf4":
        least, step = tensors["steps"].split(1, dim=-1)
        return least + scales * step
    return scales
