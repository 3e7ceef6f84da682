"""Model folders whose weights are quantised already: what is read, and its values.

A matrix there is several tensors under names of their own. `QuantisedEntry` finds them for one key,
so that the reader of weight files gives plain values, and the scales that they were made with.

quant_method         codes                               scales
bitsandbytes         X [n, 1] uint8, two of nf4 each     X.absmax, one for each 64 of the flattened
                                                         matrix, in float32 or in 8 bits
fp8                  X e4m3                              X_scale_inv, one for each [128, 128]
compressed-tensors   X e4m3                              X_scale, one a row
torchao              module._X_qdata, int8 or e4m3       module._X_scale, one a row
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import PretrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from shardwise.config import UserError
from shardwise.kernels.quantised import BLOCK, FP8_BLOCK, NF4, Format, block_of, nf4_levels

Header = Mapping[str, tuple[str, list[int]]]
"""Dtype, as safetensors writes it, and shape of each key in the files."""
Read = Callable[[str], torch.Tensor]
SCALES = ("F32", "BF16", "F16", "F8_E8M0")
"""Dtypes of scales, as safetensors writes them."""
STATE = ".quant_state.bitsandbytes__nf4"
_TORCHAO = {"Int8WeightOnlyConfig": "I8", "Float8WeightOnlyConfig": "F8_E4M3"}
_KEPT: Mapping[tuple[str, str], Format] = {
    ("bitsandbytes", "nf4"): "nf4_float32",
    ("fp8", "fp8"): "fp8_blocks",
}


def method_of(config: PretrainedConfig) -> str | None:
    """Return the quant_method of a folder, or None where its weights are plain."""
    section = getattr(config, "quantization_config", None)
    return section["quant_method"] if section else None


def stored_form(config: PretrainedConfig, base: Format) -> Format:
    """Return the form of `model.base` that keeps a folder's own scales, where there is one."""
    return _KEPT.get((method_of(config) or "", base), base)


def base_of(config: PretrainedConfig) -> str | None:
    """Return the `model.base` under which a quantised folder has its own codes."""
    method = method_of(config)
    if method == "torchao":
        kind = config.quantization_config["quant_type"]["default"]["_type"]
        return "int8" if _TORCHAO[kind] == "I8" else "fp8"
    return None if method is None else "nf4" if method == "bitsandbytes" else "fp8"


def check_config(path: str, section: Any) -> None:
    """Raise UserError unless weights with this `quantization_config` can be read."""
    section = section if isinstance(section, dict) else {}
    method = section.get("quant_method")
    is_read = {
        "bitsandbytes": lambda: (
            section.get("load_in_4bit") is True
            and section.get("bnb_4bit_quant_type") == "nf4"
            and section.get("bnb_4bit_quant_storage", "uint8") == "uint8"
        ),
        "fp8": lambda: section.get("weight_block_size") == [FP8_BLOCK, FP8_BLOCK],
        "torchao": lambda: section["quant_type"]["default"]["_type"] in _TORCHAO,
        "compressed-tensors": lambda: (
            not section.get("transform_config")  # rotates activations, too
            and (section.get("sparsity_config") or {}).get("format", "dense") == "dense"
            and all(
                [group["weights"][key] for key in ("num_bits", "type", "strategy")]
                == [8, "float", "channel"]
                for group in section["config_groups"].values()
            )
        ),
    }.get(str(method))
    try:
        if is_read is not None and is_read():
            return
    except (KeyError, TypeError, AttributeError):
        pass
    detail = " in a form that is not read" if is_read else ", which is not read"
    raise UserError(
        f"{path}: the weights are quantised by {str(method)[:40]}{detail}; give a folder with "
        "plain weights, nf4 of bitsandbytes, int8 or float8 weights of torchao, fp8 in blocks "
        f"of {FP8_BLOCK}, or fp8 of compressed-tensors with a scale a row"
    )


@dataclass(frozen=True)
class QuantisedEntry:
    """A quantised matrix in files."""

    key: str
    """Key of the matrix, as a plain folder would have it."""
    format: Format
    codes: str
    """The key of its codes, and below those of other tensors."""
    scales: str
    others: tuple[str, ...] = ()

    def values(self, read: Read) -> torch.Tensor:
        """Return the matrix in float32; UserError where its tensors do not fit together."""
        values = self._values(read)
        if not values.isfinite().all():
            raise UserError(
                f"{self.key}: its codes or scales are not all finite; fetch the model again"
            )
        return values

    def _values(self, read: Read) -> torch.Tensor:
        codes = read(self.codes)
        if self.format == "nf4":
            return self._nf4_values(codes, read)
        for key in self.others:
            if read(key).any():
                raise UserError(f"{key}: not zero, which is not read; give symmetric codes")
        scales = self.grid(read, codes.shape)
        return (codes.float().unflatten(-1, (scales.shape[-1], -1)) * scales[..., None]).flatten(-2)

    def grid(self, read: Read, shape: torch.Size) -> torch.Tensor:
        """Return the scales of the columns' blocks in each row, float32 [..., out, in / block]."""
        scales = read(self.scales).float()
        if not self.scales.endswith("_scale_inv"):
            return scales.reshape(*shape[:-1], 1)
        *_, rows, columns = shape
        block = block_of("fp8_blocks", columns)
        scales = scales.repeat_interleave(FP8_BLOCK, -2)[..., :rows, :]
        return scales.repeat_interleave(FP8_BLOCK // block, -1)[..., : columns // block]

    def own_scales(self, read: Read) -> torch.Tensor | None:
        """Return the scales as `kernels.quantised` has them; None where blocks go over rows."""
        if self.format != "nf4":
            return self.grid(read, read(self.codes).shape)
        state = self._state(read)
        if state["blocksize"] % BLOCK or state["shape"][-1] % BLOCK:
            return None
        scales = self._absmax(read, state).repeat_interleave(state["blocksize"] // BLOCK)
        *rows, width = state["shape"]
        return scales[: torch.Size(state["shape"]).numel() // BLOCK].view(*rows, width // BLOCK)

    def _nf4_values(self, codes: torch.Tensor, read: Read) -> torch.Tensor:
        state = self._state(read)
        shape = torch.Size(state["shape"])
        levels = nf4_levels(codes.device)
        codes = codes.flatten().int()
        values = levels[torch.stack([codes >> 4, codes & 15], -1).flatten()[: shape.numel()]]
        scales = self._absmax(read, state)
        if values.numel() % state["blocksize"]:
            values *= scales.repeat_interleave(state["blocksize"])[: values.numel()]
        else:
            values.unflatten(0, (-1, state["blocksize"])).mul_(scales[:, None])
        return values.view(shape)

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


def plain_keys(
    files: Mapping[str, Path], skeleton: PreTrainedModel, path: str
) -> tuple[dict[str, Path], dict[str, QuantisedEntry]]:
    """Return files by key, as a plain folder would have the keys, and its quantised matrices."""
    method = method_of(skeleton.config)
    if method is None:
        return {**files}, {}
    entries = entries_in(files, method)
    if method == "bitsandbytes" and any(isinstance(m, Conv1D) for m in skeleton.modules()):
        raise UserError(
            f"{path}: bitsandbytes stores the weights of this class transposed, which is not read; "
            "give a folder with plain weights"
        )
    used = {part for entry in entries.values() for part in _parts(entry)}
    plain = {key: file for key, file in files.items() if key not in used}
    return plain | {key: files[entry.codes] for key, entry in entries.items()}, entries


def entries_in(files: Mapping[str, Path], method: str) -> dict[str, QuantisedEntry]:
    """Return the quantised matrices in files by key; UserError where a tensor is missing.

    UserError, too, where a tensor's shape or dtype is another one, and where an entry is in few
    bits without scales. Only the headers of the files are read.
    """
    header: dict[str, tuple[str, list[int]]] = {}
    for file in sorted(set(files.values())):
        try:
            with safe_open(file, framework="pt") as opened:
                keys = opened.keys()
                for key in keys:
                    if files.get(key) == file:
                        part = opened.get_slice(key)
                        header[key] = part.get_dtype(), part.get_shape()
        except (SafetensorError, OSError) as error:
            raise UserError(
                f"{file}: not a whole safetensors file ({str(error)[:200]}); fetch it again"
            ) from None
    entries = [_entry(key, header, method) for key in header]
    by_key = {entry.key: entry for entry in entries if entry is not None}
    used = {part for entry in by_key.values() for part in _parts(entry)}
    for entry in by_key.values():
        _check_entry(entry, header)
    for key, (dtype, _) in header.items():
        if key not in used and (dtype.startswith("F8") or dtype in ("I8", "U8")):
            raise UserError(
                f"{key}: {dtype}, but no scales of {method} are in the files; fetch the model again"
            )
    return by_key


def _entry(key: str, header: Header, method: str) -> QuantisedEntry | None:
    if method == "bitsandbytes" and key.endswith(STATE):
        name = key.removesuffix(STATE)
        ends = ("nested_absmax", "nested_quant_map")
        nested = tuple(f"{name}.{end}" for end in ends if f"{name}.{ends[0]}" in header)
        return QuantisedEntry(
            name, "nf4", name, f"{name}.absmax", (key, f"{name}.quant_map", *nested)
        )
    ending = {"fp8": "_scale_inv", "compressed-tensors": ".weight_scale"}.get(method)
    if ending is not None and key.endswith(ending):
        name = key.removesuffix("_scale_inv").removesuffix("_scale")
        return QuantisedEntry(name, "fp8", name, key)
    found = re.fullmatch(r"(.*\.)_(\w+)_qdata", key) if method == "torchao" else None
    if found is None:
        return None
    zero = f"{found[1]}_{found[2]}_zero_point"
    fmt: Format = "int8" if header[key][0] == "I8" else "fp8"
    others = (zero,) if zero in header else ()
    return QuantisedEntry("".join(found.groups()), fmt, key, f"{found[1]}_{found[2]}_scale", others)


def _parts(entry: QuantisedEntry) -> tuple[str, ...]:
    return entry.codes, entry.scales, *entry.others


def _check_entry(entry: QuantisedEntry, header: Header) -> None:
    for key in _parts(entry):
        if key not in header:
            raise UserError(
                f"{key}: not in the files, but {entry.key} is quantised; fetch the model again"
            )
    dtype, shape = header[entry.codes]
    wanted = {"nf4": "U8", "int8": "I8"}.get(entry.format, "F8_E4M3")
    if dtype != wanted:
        raise UserError(
            f"{entry.codes}: {dtype}, not {wanted}; give a folder of plain weights (bfloat16)"
        )
    for key in (entry.scales, *entry.others):
        is_code = key.endswith((STATE, "_zero_point", ".absmax"))
        if header[key][0] not in (*SCALES, *(("U8", "I8") if is_code else ())):
            raise UserError(f"{key}: {header[key][0]} holds no scales; fetch the model again")
    if entry.format in NF4:  # its sizes are in a tensor, which is read with the matrix
        return
    scales = header[entry.scales][1]
    if entry.scales.endswith("_scale_inv"):
        blocks = [-(-size // FP8_BLOCK) for size in shape[-2:]]
        is_right = scales == [*shape[:-2], *blocks]
    else:
        blocks = [*shape[:-1], 1]
        is_right = scales in (blocks, blocks[:-1])
    if not is_right or len(shape) < 2:
        raise UserError(
            f"{entry.scales}: shape {scales}, but {entry.key} {shape} needs {blocks}; "
            "fetch the model again"
        )
