"""Model folders that are quantised already, written by the definitions of their formats."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from math import ceil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional as F

from shardwise.kernels.four_bits import NF4_LEVELS

Tensors = dict[str, torch.Tensor]
Metadata = dict[str, str]


def write(folder: Path, plain: Path, method: str) -> None:
    """Write a plain folder's model, whose matrices of layers are quantised by this method."""
    folder.mkdir(parents=True)
    section, quantise = METHODS[method]
    tensors: Tensors = {}
    metadata: Metadata = {"format": "pt"}
    for key, value in load_file(plain / "model.safetensors").items():
        if value.dim() == 2 and re.search(r"\.layers\..*(proj(_\w+)?|w[123])\.weight$", key):
            tensors |= quantise(key, value.float(), metadata)
        else:
            tensors[key] = value
    save_file(tensors, folder / "model.safetensors", metadata)
    config = json.loads((plain / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": section}))


def bitsandbytes(
    is_nested: bool, size: int = 64
) -> Callable[[str, torch.Tensor, Metadata], Tensors]:
    def quantise(key: str, value: torch.Tensor, metadata: Metadata) -> Tensors:
        levels = torch.tensor(NF4_LEVELS)
        blocks = F.pad(value.flatten(), (0, -value.numel() % size)).view(-1, size)
        absmax = blocks.abs().amax(-1)
        codes = ((blocks / absmax[:, None])[..., None] - levels).abs().argmin(-1).flatten()
        codes = codes[: value.numel()]
        state: dict[str, Any] = {"quant_type": "nf4", "blocksize": size, "dtype": "bfloat16"}
        state["shape"] = list(value.shape)
        tensors = {
            key: (codes[::2] << 4 | codes[1::2]).to(torch.uint8)[:, None],
            f"{key}.absmax": absmax,
            f"{key}.quant_map": levels,
        }
        if is_nested:
            offset = absmax.mean().item()
            table = torch.linspace(-1, 1, 256)
            rest = F.pad(absmax - offset, (0, -len(absmax) % 256)).view(-1, 256)
            largest = rest.abs().amax(-1)
            steps = ((rest / largest[:, None])[..., None] - table).abs().argmin(-1).flatten()
            tensors[f"{key}.absmax"] = steps[: len(absmax)].to(torch.uint8)
            tensors[f"{key}.nested_absmax"] = largest
            tensors[f"{key}.nested_quant_map"] = table
            state |= {"nested_blocksize": 256, "nested_offset": offset}
        name = f"{key}.quant_state.bitsandbytes__nf4"
        return tensors | {name: torch.tensor([*json.dumps(state).encode()], dtype=torch.uint8)}

    return quantise


def in_blocks(key: str, value: torch.Tensor, metadata: Metadata) -> Tensors:
    rows, columns = (ceil(size / 128) for size in value.shape)
    padded = F.pad(value, (0, -value.shape[1] % 128, 0, -value.shape[0] % 128))
    scales = padded.view(rows, 128, columns, 128).abs().amax((1, 3)) / 448
    # A power of two, as newer models have: the largest code is below 448.
    scales[0] = scales[0].log2().ceil().exp2()
    every = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
    codes = (padded / every)[: value.shape[0], : value.shape[1]].to(torch.float8_e4m3fn)
    return {key: codes, f"{key}_scale_inv": scales}


def in_rows(key: str, value: torch.Tensor, metadata: Metadata) -> Tensors:
    scales = (value.abs().amax(-1, keepdim=True) / 448).bfloat16()
    return {key: (value / scales.float()).to(torch.float8_e4m3fn), f"{key}_scale": scales}


def torchao(is_float: bool) -> Callable[[str, torch.Tensor, Metadata], Tensors]:
    def quantise(key: str, value: torch.Tensor, metadata: Metadata) -> Tensors:
        owner = key.removesuffix("weight") + "_weight_"
        largest = value.abs().amax(-1, keepdim=True)
        scales = largest / (448 if is_float else 127.5)
        data: dict[str, Any] = {"block_size": [1, value.shape[1]], "act_quant_kwargs": None}
        metadata[key] = json.dumps(
            {"_type": "Float8Tensor" if is_float else "Int8Tensor", "_data": data}
        )
        if is_float:
            codes = (value / scales).to(torch.float8_e4m3fn)
            return {f"{owner}qdata": codes, f"{owner}scale": scales}
        codes = (value / scales).round().clamp(-128, 127).to(torch.int8)
        zeros = torch.zeros_like(scales, dtype=torch.int8)
        return {f"{owner}qdata": codes, f"{owner}scale": scales, f"{owner}zero_point": zeros}

    return quantise


FP4 = (
    0.0,
    0.5,
    1.0,
    1.5,
    2.0,
    3.0,
    4.0,
    6.0,
    *(-v for v in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)),
)


def nibbles(blocks: torch.Tensor) -> torch.Tensor:
    """The bytes of the nearest levels of e2m1, the first of two in the lower half."""
    codes = (blocks[..., None] - torch.tensor(FP4)).abs().argmin(-1)
    return (codes[..., ::2] | codes[..., 1::2] << 4).to(torch.uint8)


def mxfp4(key: str, value: torch.Tensor, metadata: Metadata) -> Tensors:
    name = key.removesuffix(".weight") + ".weight"
    blocks = value.unflatten(-1, (-1, 32))
    exponents = (blocks.abs().amax(-1) / 6).log2().ceil()
    codes = nibbles(blocks / exponents.exp2()[..., None])
    return {f"{name}_blocks": codes, f"{name}_scales": (exponents + 127).to(torch.uint8)}


def nvfp4(is_divided: bool) -> Callable[[str, torch.Tensor, Metadata], Tensors]:
    def quantise(key: str, value: torch.Tensor, metadata: Metadata) -> Tensors:
        factor = value.abs().amax() / (448 * 6)
        blocks = value.unflatten(-1, (-1, 16))
        scales = (blocks.abs().amax(-1) / 6 / factor).to(torch.float8_e4m3fn)
        codes = nibbles(blocks / (scales.float() * factor)[..., None]).flatten(-2)
        owner = key.removesuffix(".weight")
        tensors = {f"{owner}.weight_scale": scales, f"{owner}.input_scale": torch.ones(())}
        if is_divided:
            return tensors | {f"{key}_packed": codes, f"{key}_global_scale": 1 / factor.view(1)}
        return tensors | {key: codes, f"{key}_scale_2": factor}

    return quantise


def in_words(
    packing: str, size: int, is_ordered: bool = False
) -> Callable[[str, torch.Tensor, Metadata], Tensors]:
    """GPTQ's or AWQ's words of eight codes, in groups of `size`; zeros differ by group."""

    def words(codes: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
        eights = codes.unflatten(-1, (-1, 8))[..., order].long()
        return (eights << torch.arange(0, 32, 4)).sum(-1).to(torch.int32)

    def quantise(key: str, value: torch.Tensor, metadata: Metadata) -> Tensors:
        groups = torch.arange(value.shape[1]) // size
        if is_ordered:
            groups = groups[torch.randperm(len(groups), generator=torch.Generator().manual_seed(1))]
        order = groups.argsort(stable=True)
        blocks = value[:, order].unflatten(-1, (-1, size))
        least, most = blocks.amin(-1), blocks.amax(-1)
        scales = ((most - least) / 14).half()
        zeros = (-least / scales.float()).round().clamp(1, 15)
        codes = (value / scales.float()[:, groups] + zeros[:, groups]).round().clamp(0, 15)
        owner = key.removesuffix(".weight")
        tensors = {f"{owner}.scales": scales.T.contiguous()}
        if packing == "awq":
            tensors[f"{owner}.qweight"] = words(codes.T, (0, 2, 4, 6, 1, 3, 5, 7))
            return tensors | {f"{owner}.qzeros": words(zeros.T, (0, 2, 4, 6, 1, 3, 5, 7))}
        tensors[f"{owner}.qweight"] = words(codes, tuple(range(8))).T.contiguous()
        tensors[f"{owner}.qzeros"] = words(zeros.T - 1, tuple(range(8)))
        return tensors | {f"{owner}.g_idx": groups.int()}

    return quantise


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False}
NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
ROWS = {"weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}}
METHODS: dict[str, tuple[dict[str, Any], Callable[[str, torch.Tensor, Metadata], Tensors]]] = {
    "nf4": (NF4, bitsandbytes(is_nested=False)),
    "nf4 nested": (NF4 | {"bnb_4bit_use_double_quant": True}, bitsandbytes(is_nested=True)),
    "fp8": (
        {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"},
        in_blocks,
    ),
    "compressed-tensors": (
        {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "config_groups": {"group_0": ROWS | {"targets": ["Linear"]}},
        },
        in_rows,
    ),
    "nvfp4": (
        {
            "quant_method": "compressed-tensors",
            "format": "nvfp4-pack-quantized",
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "weights": {
                        **{"num_bits": 4, "type": "float", "strategy": "tensor_group"},
                        **{"group_size": 16, "symmetric": True},
                    },
                }
            },
            "ignore": ["lm_head", "re:.*visual.*"],
        },
        nvfp4(is_divided=True),
    ),
    "modelopt": (
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head", "*router*"]},
        nvfp4(is_divided=False),
    ),
    "gptq": (GPTQ, in_words("gptq", 32)),
    "gptq desc_act": (GPTQ | {"desc_act": True}, in_words("gptq", 32, is_ordered=True)),
    "awq": (
        {"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm"},
        in_words("awq", 64),
    ),
    "mxfp4": ({"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}, mxfp4),
    **{
        f"torchao {name}": (
            {"quant_method": "torchao", "quant_type": {"default": {"_type": kind, "_data": {}}}},
            torchao(is_float),
        )
        for name, kind, is_float in (
            ("int8", "Int8WeightOnlyConfig", False),
            ("fp8", "Float8WeightOnlyConfig", True),
        )
    },
}
"""Of each method the section of config.json, and the tensors of one matrix."""
BASE_OF = {
    **{"nf4": "nf4", "nf4 nested": "nf4", "fp8": "fp8", "compressed-tensors": "fp8"},
    **{"torchao int8": "int8", "torchao fp8": "fp8", "mxfp4": "mxfp4"},
    **dict.fromkeys(("nvfp4", "modelopt"), "nvfp4"),
    **dict.fromkeys(("gptq", "gptq desc_act", "awq"), "int4"),
}
"""The `model.base` that stores the same codes."""
