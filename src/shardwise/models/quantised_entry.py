"""A matrix of a folder that is quantised already: several tensors under names of their own."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from shardwise.config import UserError
from shardwise.kernels.four_bits import nf4_levels, packed, unpacked
from shardwise.kernels.quantised import (
    BLOCK,
    FP8_BLOCK,
    Format,
    are_finite,
    block_of,
    dequantise,
    is_ordered,
    shapes_of,
)

Header = Mapping[str, tuple[str, list[int]]]
"""Dtype, as safetensors writes it, and shape of each key in the files."""
Read = Callable[[str], torch.Tensor]
SCALES = ("F32", "BF16", "F16", "F8_E8M0")
"""Dtypes of scales, as safetensors writes them."""
STATE = ".quant_state.bitsandbytes__nf4"
_FP4 = {"mxfp4": ("U8", "F8_E8M0"), "nvfp4": ("F8_E4M3",), "nvfp4_divided": ("F8_E4M3",)}
"""Dtypes of scales of forms in e2m1, as safetensors writes them."""
_CODES = {"nf4_float32": "U8", "int8": "I8", **dict.fromkeys(_FP4, "U8")}
"""Dtypes of codes that are not e4m3, as safetensors writes them."""


AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Place among 8 codes of a word of AWQ of each output: it has outputs 0, 2, 4, 6, 1, 3, 5, 7."""


@dataclass(frozen=True)
class QuantisedEntry:
    """A quantised matrix in files."""

    key: str
    """Key of the matrix, as a plain folder would have it."""
    form: Format
    codes: str
    """The key of its codes, and below those of other tensors."""
    scales: str
    others: tuple[str, ...] = ()
    packing: Literal["", "gptq", "gptq_v2", "awq"] = ""
    """How integers of 4 bits lie in words of 32 bits."""

    @property
    def parts(self) -> tuple[str, ...]:
        """The keys of its tensors."""
        return self.codes, self.scales, *self.others

    def values(self, read: Read) -> torch.Tensor:
        """Return the matrix in float32; UserError where its tensors do not fit together."""
        tensors = self._tensors(read)
        if tensors is None:
            values = self._flat_nf4_values(read)
        else:
            values = dequantise(tensors, self.form, torch.float32)
        if not values.isfinite().all():
            raise self._damaged()
        return values.mT if self._is_turned(read) else values

    def stored(self, read: Read) -> dict[str, torch.Tensor] | None:
        """Return the tensors that `kernels.quantised` computes with, by their names, with the dims
        of the parameter; None where blocks go over the ends of rows.

        UserError where they do not fit together or a value is not finite.
        """
        tensors = self._tensors(read)
        if tensors is None:
            return None
        if not are_finite(tensors, self.form):
            raise self._damaged()
        return {n: t.mT for n, t in tensors.items()} if self._is_turned(read) else tensors

    def _damaged(self) -> UserError:
        return UserError(
            f"{self.key}: its codes or scales are not all finite; fetch the model again"
        )

    def _is_turned(self, read: Read) -> bool:
        """Return whether it is a stack [E, in, out], which MXFP4's files have as [E, out, in]."""
        return self.form == "mxfp4" and read(self.scales).dim() == 3

    def _tensors(self, read: Read) -> dict[str, torch.Tensor] | None:
        """Return what `stored` gives, as [..., out, in]."""
        codes, scales = read(self.codes), read(self.scales)
        if self.form == "nf4_float32":
            return self._nf4_tensors(read)
        if self.packing:
            return self._int4_tensors(read)
        if self.form in _FP4:
            codes = codes.flatten(-2) if codes.dim() > scales.dim() else codes
            tensors = {"codes": codes, "scales": scales.view(torch.uint8)}
            if self.form != "mxfp4":
                factor = read(self.others[0]).float().reshape(())
                tensors["steps"] = factor.expand(*codes.shape[:-1], 1)
            return tensors
        for key in self.others:
            if read(key).any():
                raise UserError(f"{key}: not zero, which is not read; give symmetric codes")
        *rows, columns = codes.shape
        scales = scales.float()
        if self.form == "fp8_blocks":
            block = block_of(self.form, columns)
            scales = scales.repeat_interleave(FP8_BLOCK, -2)[..., : rows[-1], :]
            scales = scales.repeat_interleave(FP8_BLOCK // block, -1)[..., : columns // block]
        else:
            scales = scales.reshape(*rows, 1)
        codes = codes if self.form == "int8" else codes.view(torch.uint8)
        return {"codes": codes, "scales": scales}

    def _int4_tensors(self, read: Read) -> dict[str, torch.Tensor]:
        """Return the codes of GPTQ and AWQ, whose words have the codes of 8 inputs (GPTQ) or, in an
        order of their own, of 8 outputs (AWQ). Zeros are of 8 outputs, and GPTQ's are one less.
        """
        words, scales, zero_words = read(self.codes), read(self.scales), read(self.others[0])
        zeros = unpacked(zero_words.contiguous().view(torch.uint8))
        if self.packing == "awq":
            zeros = _in_order(zeros)
            codes = packed(_in_order(unpacked(words.contiguous().view(torch.uint8))).T)
        else:
            codes = words.T.contiguous().view(torch.uint8)  # of a word the lowest byte comes first
            if self.packing == "gptq":
                zeros = zeros + 1 & 15
        tensors = {"codes": codes, "scales": scales.T, "zeros": zeros.T}
        groups = read(self.others[1]) if len(self.others) > 1 else None
        if groups is None:
            return tensors
        in_order = torch.arange(len(groups)) // (len(groups) // len(scales))
        if is_ordered(self.form) and groups.min() >= 0 and groups.max() < len(scales):
            tensors["groups"] = groups.int()
        elif is_ordered(self.form) or not torch.equal(groups.long(), in_order):
            raise UserError(
                f"{self.others[1]}: no groups as quantization_config says; fetch the model again, "
                "or set desc_act to true there if columns are in another order"
            )
        return tensors

    def _nf4_tensors(self, read: Read) -> dict[str, torch.Tensor] | None:
        state = self._state(read)
        *rows, width = state["shape"]
        if state["blocksize"] % BLOCK or width % BLOCK:
            return None
        scales = self._absmax(read, state).repeat_interleave(state["blocksize"] // BLOCK)
        scales = scales[: torch.Size(state["shape"]).numel() // BLOCK]
        codes = read(self.codes).view(*rows, width // 2)
        return {"codes": codes, "scales": scales.view(*rows, width // BLOCK)}

    def _flat_nf4_values(self, read: Read) -> torch.Tensor:
        """Return the values of nf4 whose blocks go over the ends of rows, or are of other sizes."""
        state = self._state(read)
        shape = torch.Size(state["shape"])
        codes = read(self.codes).flatten().int()
        levels = nf4_levels(codes.device)
        values = levels[torch.stack([codes >> 4, codes & 15], -1).flatten()[: shape.numel()]]
        scales = self._absmax(read, state).repeat_interleave(state["blocksize"])
        return values.mul_(scales[: values.numel()]).view(shape)

    def _absmax(self, read: Read, state: Mapping[str, Any]) -> torch.Tensor:
        scales = read(self.scales)
        if scales.dtype != torch.uint8:
            return scales.float()
        steps = read(f"{self.key}.nested_absmax").float()
        steps = steps.repeat_interleave(state["nested_blocksize"])[: scales.numel()]
        return read(f"{self.key}.nested_quant_map")[scales.int()] * steps + state["nested_offset"]

    def _state(self, read: Read) -> dict[str, Any]:
        """Return what bitsandbytes writes of a matrix; UserError unless all tensors fit to it."""
        try:
            state = json.loads(bytes(read(self.key + STATE).tolist()))
            *shape, block = torch.Size([*state["shape"], state["blocksize"]])
            if min(*shape, block) < 1 or state.get("quant_type", "nf4") != "nf4":
                raise ValueError
            num_values = torch.Size(shape).numel()
            sizes = {self.codes: -(-num_values // 2), f"{self.key}.quant_map": 16}
            sizes[self.scales] = num_blocks = -(-num_values // block)
            is_nested = f"{self.key}.nested_absmax" in self.others
            if is_nested:
                sizes[f"{self.key}.nested_quant_map"] = 256
                (nested_block,) = torch.Size([state["nested_blocksize"]])
                num_steps = -(-num_blocks // nested_block)
                sizes[f"{self.key}.nested_absmax"] = num_steps
                float(state["nested_offset"])
        except (ValueError, KeyError, TypeError, ZeroDivisionError, RecursionError):
            raise UserError(f"{self.key}{STATE}: cannot be read; fetch the model again") from None
        for key, size in sizes.items():
            found = read(key).numel() if key == self.codes else [*read(key).shape]
            is_small = read(self.scales).dtype == torch.uint8
            if found not in (size, [size]) or is_small != is_nested:
                raise UserError(
                    f"{key}: {found} values of {read(key).dtype}, but the shape "
                    f"{state['shape']} needs {size}; fetch the model again"
                )
        levels = read(f"{self.key}.quant_map")
        if not torch.equal(levels.float(), nf4_levels(levels.device)):
            raise UserError(f"{self.key}.quant_map: not nf4's levels; give a folder in nf4")
        return state

    def check(self, header: Header) -> None:
        """Raise UserError where the files lack a tensor, or one has another dtype or shape."""
        for key in self.parts:
            if key not in header:
                raise UserError(
                    f"{key}: not in the files, but {self.key} is quantised; fetch the model again"
                )
        if self.packing:
            return self._check_int4(header)
        dtype, shape = header[self.codes]
        wanted = _CODES.get(self.form, "F8_E4M3")
        if dtype != wanted:
            raise UserError(
                f"{self.codes}: {dtype}, not {wanted}; give a folder of plain weights (bfloat16)"
            )
        for key in (self.scales, *self.others):
            wanted = SCALES
            if key.endswith((STATE, "_zero_point", ".absmax")):
                wanted = (*SCALES, "U8", "I8")
            elif key == self.scales:
                wanted = _FP4.get(self.form, SCALES)
            if header[key][0] not in wanted:
                raise UserError(f"{key}: {header[key][0]} holds no scales; fetch the model again")
        if self.form == "nf4_float32":  # its sizes are in a tensor, which is read with the matrix
            return
        scales = header[self.scales][1]
        if self.form == "fp8_blocks":
            needed = [[*shape[:-2], *(-(-size // FP8_BLOCK) for size in shape[-2:])]]
        elif self.codes.endswith("_blocks"):
            needed = [shape[:-1]] if shape[-1] == 16 else []
        elif self.form in _FP4:
            num_bytes = block_of(self.form, 0) // 2
            needed = [[*shape[:-1], shape[-1] // num_bytes]] if shape[-1] % num_bytes == 0 else []
            if self.form != "mxfp4" and header[self.others[0]][1] not in ([], [1]):
                factor = self.others[0]
                raise UserError(
                    f"{factor}: shape {header[factor][1]}, not one number; fetch the model again"
                )
        else:
            needed = [[*shape[:-1], 1], shape[:-1]]
        if scales not in needed or len(shape) < 2:
            raise UserError(
                f"{self.scales}: shape {scales}, but {self.codes} {shape} needs "
                f"{next(iter(needed), 'whole blocks of bytes')}; fetch the model again"
            )

    def _check_int4(self, header: Header) -> None:
        shape = header[self.codes][1]
        num_words, num_rows = shape if len(shape) == 2 else (0, 0)
        width = 8 * num_words
        if self.packing == "awq":
            width, num_rows = num_words, 8 * num_rows
        num_groups = shapes_of(self.form, torch.Size([num_rows, width]))["scales"][0][1]
        needed = {
            self.codes: ("I32", shape),
            self.scales: ("F16", [num_groups, num_rows]),
            self.others[0]: ("I32", [num_groups, num_rows // 8]),
            **{key: ("I32", [width]) for key in self.others[1:]},
        }
        for key, (dtype, size) in needed.items():
            if header[key] != (dtype, size) or not width or width % block_of(self.form, width):
                raise UserError(
                    f"{key}: {header[key][0]} {header[key][1]}, but {self.codes} {shape} needs "
                    f"{dtype} {size}, in whole groups of {block_of(self.form, width or 1)}; give a "
                    "folder with these, or with plain weights"
                )


def _in_order(codes: torch.Tensor) -> torch.Tensor:
    """Return codes [.., out] of AWQ's words in the order of the outputs."""
    return codes.unflatten(-1, (-1, 8))[..., AWQ_ORDER].flatten(-2)
