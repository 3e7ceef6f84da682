"""Write tests/models/four_bits.safetensors: matrices of 4 bits as other packages read them.

It needs compressed-tensors, torchao, auto-gptq and autoawq, which tests do not; the file's metadata
has their versions. The last two are read by file, as they do not import with today's transformers.
"""

from __future__ import annotations

import importlib.util
from importlib.metadata import distribution, version
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors.mxfp4 import MXFP4PackedCompressor
from compressed_tensors.compressors.nvfp4 import NVFP4PackedCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from safetensors.torch import save_file
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.mx_tensor import to_mx
from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

OUT = Path(__file__).with_name("four_bits.safetensors")
PACKAGES = ("compressed-tensors", "torchao", "transformers", "auto-gptq", "autoawq")
ROWS, COLUMNS, GROUP = 32, 128, 32
Tensors = dict[str, torch.Tensor]


def main() -> None:
    """Write the records."""
    torch.manual_seed(0)
    plain = torch.randn(ROWS, COLUMNS) * torch.randn(ROWS, 1).exp()
    records = {"plain": plain, **_e2m1(plain)}
    for name, zero, is_ordered in (
        ("sym", 8, False),
        ("asym", None, False),
        ("desc_act", None, True),
    ):
        records |= {f"gptq.{name}.{k}": t for k, t in _gptq(plain, zero, is_ordered).items()}
    records |= {f"awq.{k}": t for k, t in _awq().items()}
    records = {name: tensor.detach().contiguous().clone() for name, tensor in records.items()}
    save_file(records, OUT, {name: version(name) for name in PACKAGES})


def _e2m1(plain: torch.Tensor) -> Tensors:
    scales, codes = to_mx(plain, torch.float4_e2m1fn_x2, 32, ScaleCalculationMode.RCEIL)
    scales, codes = scales.view(torch.uint8), codes.view(torch.uint8).view(ROWS, -1)
    args: dict[str, Any] = {"num_bits": 4, "type": "float", "symmetric": True}
    scheme = QuantizationScheme(
        targets=["Linear"], weights=QuantizationArgs(**args, strategy="group", group_size=32)
    )
    packed = {"weight_packed": codes, "weight_scale": scales.view(ROWS, -1)}
    records = {f"mxfp4.{name}": tensor for name, tensor in packed.items()}
    records["mxfp4.compressed"] = MXFP4PackedCompressor.decompress(packed, scheme)["weight"]
    stack = codes.view(1, ROWS, -1, 16), scales.view(1, ROWS, -1)
    records["mxfp4.transformers"] = convert_moe_packed_tensors(*stack)
    factor = plain.abs().amax() / (448 * 6)
    tensor = NVFP4Tensor.to_nvfp4(plain, 16, factor)
    packed = {"weight": tensor.qdata.view(torch.uint8), "weight_scale": tensor.scale}
    records |= {f"modelopt.{name}": part for name, part in packed.items()}
    records |= {"modelopt.weight_scale_2": factor, "modelopt.values": tensor.dequantize()}
    weights = QuantizationArgs(**args, strategy="tensor_group", group_size=16)
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    packed = {"weight_packed": packed["weight"], "weight_scale": tensor.scale}
    packed["weight_global_scale"] = torch.tensor([0.73]) / factor
    records |= {f"nvfp4.{name}": part for name, part in packed.items()}
    records["nvfp4.values"] = NVFP4PackedCompressor.decompress(packed, scheme)["weight"]
    return records


def _gptq(plain: torch.Tensor, zero: int | None, is_ordered: bool) -> Tensors:
    qlinear = _module("auto-gptq", "auto_gptq/nn_modules/qlinear/qlinear_cuda.py")
    groups = torch.arange(COLUMNS) // GROUP
    if is_ordered:
        groups = groups[torch.randperm(COLUMNS)]
    linear = torch.nn.Linear(COLUMNS, ROWS, bias=False)
    linear.weight.data = plain
    scales = plain.abs().amax(-1, keepdim=True) / 7 * (1 + torch.rand(1, COLUMNS // GROUP))
    scales = scales.half().float()
    zeros = torch.randint(1, 16, scales.shape) if zero is None else torch.full(scales.shape, zero)
    layer = qlinear.QuantLinear(4, GROUP, COLUMNS, ROWS, bias=False)
    scaled = (plain / scales[:, groups]).round().clamp(-zeros[:, groups], 15 - zeros[:, groups])
    linear.weight.data = scaled * scales[:, groups]
    layer.pack(linear, scales, zeros.float(), groups.int())
    layer.scales = layer.scales.half()
    parts = {k: getattr(layer, k) for k in ("qweight", "qzeros", "scales", "g_idx")}
    return {**parts, "values": layer(torch.eye(COLUMNS, dtype=torch.float16)).T}


def _awq() -> Tensors:
    packing = _module("autoawq", "awq/utils/packing_utils.py")
    words = {"low": -(2**31), "high": 2**31, "dtype": torch.int32}
    qweight = torch.randint(size=(COLUMNS, ROWS // 8), **words)
    qzeros = torch.randint(size=(COLUMNS // GROUP, ROWS // 8), **words)
    scales = (torch.rand(COLUMNS // GROUP, ROWS) / 100).half()
    values = packing.dequantize_gemm(qweight, qzeros, scales, 4, GROUP)
    return {"qweight": qweight, "qzeros": qzeros, "scales": scales, "values": values.T}


def _module(package: str, file: str) -> Any:
    path = distribution(package).locate_file(file)
    spec = importlib.util.spec_from_file_location(Path(str(path)).stem, str(path))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    main()
