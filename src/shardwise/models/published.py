"""Model folders whose weights are quantised already: what is read, and its values.

A matrix there is several tensors under names of their own. A `QuantisedEntry` has them for one key,
so that the reader of weight files gives plain values, or the codes and scales as they are.

quant_method         codes                               scales
bitsandbytes         X [n, 1] uint8, two of nf4 each     X.absmax, one for each 64 of the flattened
                                                         matrix, in float32 or in 8 bits
fp8                  X e4m3                              X_scale_inv, one for each [128, 128]
compressed-tensors   X e4m3                              X_scale, one a row
                     X_packed, e2m1                      X_scale, e4m3 or e8m0; X_global_scale
modelopt             X uint8, e2m1                       X_scale, e4m3; X_scale_2
gptq                 module.qweight, 8 inputs a word     module.scales, qzeros, g_idx
awq                  module.qweight, 8 outputs a word    module.scales, qzeros
torchao              module._X_qdata, int8 or e4m3       module._X_scale, one a row
mxfp4                X_blocks [.., out, in / 32, 16]     X_scales [.., out, in / 32], e8m0
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from transformers import PretrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.quantizers_utils import should_convert_module

from shardwise.config import UserError, require
from shardwise.kernels.quantised import FP8_BLOCK, Format
from shardwise.models.quantised_entry import STATE, Header, QuantisedEntry

_TORCHAO = {"Int8WeightOnlyConfig": "I8", "Float8WeightOnlyConfig": "F8_E4M3"}
_KEPT: Mapping[tuple[str, str], Format] = {
    ("bitsandbytes", "nf4"): "nf4_float32",
    ("fp8", "fp8"): "fp8_blocks",
    ("compressed-tensors", "nvfp4"): "nvfp4_divided",
}
_BASES = {"bitsandbytes": "nf4", "modelopt": "nvfp4", "gptq": "int4", "awq": "int4"}
GROUPS = (-1, 16, 32, 64, 128, 256, 512, 1024)
"""Sizes of groups of GPTQ and AWQ; -1: a row."""
_COMPRESSED = {
    (8, "float", "channel", None): "fp8",
    (4, "float", "tensor_group", 16): "nvfp4",
    (4, "float", "group", 32): "mxfp4",
}
"""The `model.base` of what compressed-tensors says of weights: bits, type, strategy, group."""


def method_of(config: PretrainedConfig) -> str | None:
    """Return the quant_method of a folder, or None where its weights are plain."""
    section = getattr(config, "quantization_config", None)
    return section["quant_method"] if section else None


def stored_form(config: PretrainedConfig, base: Format) -> Format:
    """Return the form of `model.base` that keeps a folder's own scales, where there is one."""
    if base == "int4" and base_of(config) == base:
        return _int4_form(config.quantization_config)
    return _KEPT.get((method_of(config) or "", base), base)


def _int4_form(section: Mapping[str, Any]) -> Format:
    """Return the form of a folder in GPTQ or AWQ: its group, and whether inputs are in order."""
    size = section["group_size"]
    if size == -1:
        return "int4_row"  # whatever the order, a row has one scale
    return f"int4_{size}" + "_ordered" * bool(section.get("desc_act"))


def base_of(config: PretrainedConfig) -> str | None:
    """Return the `model.base` under which a quantised folder has its own codes."""
    method = method_of(config)
    if method == "torchao":
        kind = config.quantization_config["quant_type"]["default"]["_type"]
        return "int8" if _TORCHAO[kind] == "I8" else "fp8"
    if method == "compressed-tensors":
        return next(iter(_compressed(config.quantization_config)))
    return None if method is None else _BASES.get(method, method)


def _compressed(section: Mapping[str, Any]) -> set[str]:
    """Return each `model.base` that groups of compressed-tensors have."""
    bases = set()
    for group in section["config_groups"].values():
        bits, kind, strategy = (group["weights"][key] for key in ("num_bits", "type", "strategy"))
        size = group["weights"].get("group_size") if bits == 4 else None
        bases.add(_COMPRESSED[bits, kind, strategy, size])
    return bases


def is_kept_plain(config: PretrainedConfig, path: str) -> bool:
    """Return whether a folder quantises its matrices, but by its config not that of a module.

    Who reads the files sees whether that is so (`OwnCodes.check`).
    """
    section = getattr(config, "quantization_config", None) or {}
    paths = [*_paths_in_folders(path)]
    inside = section.get(_INSIDE) or ()
    inside = [name for names in inside for name in ([names] if type(names) is str else names)]
    if inside and not path.endswith(tuple(inside)):
        return True
    groups = (section.get("config_groups") or {}).values()
    targets = [target for group in groups for target in group.get("targets") or ("Linear",)]
    if targets and "Linear" not in targets and not _is_named(paths, targets):
        return True
    named = [name for key in ("ignore", "exclude_modules") for name in section.get(key) or ()]
    skipped = [name for key in _SKIPPED for name in section.get(key) or ()]
    return _is_named(paths, named) or not all(should_convert_module(x, skipped) for x in paths)


_SKIPPED = ("modules_to_not_convert", "llm_int8_skip_modules", "ignored_layers")
_INSIDE = "modules_in_block_to_quantize"
_NAMES = (*_SKIPPED, "ignore", "exclude_modules", _INSIDE)
"""Keys of names of modules; _INSIDE may have lists of them."""


def _is_named(paths: Iterable[str], names: Iterable[str]) -> bool:
    return any(
        re.match(name[3:], path) if name.startswith("re:") else fnmatchcase(path, name)
        for path in paths
        for name in names
    )


def _paths_in_folders(path: str) -> Iterator[str]:
    """Yield the names that folders have for a module of the text class: also those of multimodal
    classes, and those of the first of a stack of experts.
    """
    owner, stack, leaf = path.partition(".experts.")
    leaves = {"gate_up_proj": ("gate_proj", "up_proj")}.get(leaf, (leaf,))
    for name in (path, *(f"{owner}{stack}0.{one}" for one in leaves if stack)):
        yield from (name, f"language_model.{name}")
        yield name.replace("model.", "model.language_model.", 1)


def check_config(path: str, section: Any) -> None:
    """Raise UserError unless weights with this `quantization_config` can be read."""
    section = section if isinstance(section, dict) else {}
    method = section.get("quant_method")
    for key in _NAMES:
        try:
            names = section.get(key) or []
            is_nested = key == _INSIDE and all(isinstance(x, list) for x in names)
            for name in [one for x in names for one in x] if is_nested else [*names]:
                re.compile(name.removeprefix("re:") if name.startswith("re:") else "")
            is_list = isinstance(names, list)
        except (re.error, TypeError, AttributeError):
            is_list = False
        require(
            is_list,
            f"{path}: {key} of quantization_config is {str(section.get(key))[:80]}; give a list of "
            "names, or of patterns that begin with re:",
        )
    is_read = {
        "bitsandbytes": lambda: (
            section.get("load_in_4bit") is True
            and section.get("bnb_4bit_quant_type") == "nf4"
            and section.get("bnb_4bit_quant_storage", "uint8") == "uint8"
        ),
        "fp8": lambda: section.get("weight_block_size") == [FP8_BLOCK, FP8_BLOCK],
        "mxfp4": lambda: True,
        "torchao": lambda: section["quant_type"]["default"]["_type"] in _TORCHAO,
        "compressed-tensors": lambda: (
            not section.get("transform_config")  # rotates activations, too
            and (section.get("sparsity_config") or {}).get("format", "dense") == "dense"
            and len(_compressed(section)) == 1
        ),
        "gptq": lambda: (
            section["bits"] == 4
            and section["group_size"] in GROUPS
            and not section.get("dynamic")
            and section.get("checkpoint_format", "gptq") in ("gptq", "gptq_v2")
        ),
        "awq": lambda: (
            section["bits"] == 4
            and section["group_size"] in GROUPS
            and str(section.get("version", "gemm")).lower() == "gemm"
        ),
        "modelopt": lambda: (
            section["quant_algo"] == "NVFP4" and section.get("group_size", 16) == 16
        ),
    }.get(str(method))
    try:
        if is_read is not None and is_read():
            return
    except (KeyError, TypeError, AttributeError):
        pass
    detail = " in a form that is not read" if is_read else ", which is not read"
    groups = ", ".join(map(str, GROUPS))
    raise UserError(
        f"{path}: the weights are quantised by {str(method)[:40]}{detail}; give a folder with "
        "plain weights, nf4 of bitsandbytes, int8 or float8 weights of torchao, mxfp4, NVFP4, GPTQ "
        f"or AWQ (gemm) in 4 bits and groups of {groups}, fp8 in blocks of {FP8_BLOCK}, or fp8 of "
        "compressed-tensors with a scale a row"
    )


def plain_keys(
    files: Mapping[str, Path], skeleton: PreTrainedModel, path: str
) -> tuple[dict[str, Path], dict[str, QuantisedEntry]]:
    """Return files by key, as a plain folder would have the keys, and its quantised matrices."""
    method = method_of(skeleton.config)
    if method is None:
        return {**files}, {}
    entries = entries_in(files, skeleton.config.quantization_config)
    if method in _BASES and any(isinstance(m, Conv1D) for m in skeleton.modules()):
        raise UserError(
            f"{path}: {method} stores the weights of this class transposed, which is not read; "
            "give a folder with plain weights"
        )
    used = {part for entry in entries.values() for part in entry.parts}
    plain = {key: file for key, file in files.items() if key not in used}
    return plain | {key: files[entry.codes] for key, entry in entries.items()}, entries


def entries_in(files: Mapping[str, Path], section: Mapping[str, Any]) -> dict[str, QuantisedEntry]:
    """Return the quantised matrices in files by key; UserError where a tensor is missing.

    UserError, too, where a tensor's shape or dtype is another one, and where an entry is in few
    bits without scales. Only the headers of the files are read.
    """
    header: dict[str, tuple[str, list[int]]] = {}
    method = section["quant_method"]
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
    if method in ("gptq", "awq"):
        entries = [_in_words(key, header, section) for key in header if key.endswith(".qweight")]
    else:
        entries = [_entry(key, header, method) for key in header]
    by_key = {entry.key: entry for entry in entries if entry is not None}
    used = {part for entry in by_key.values() for part in entry.parts}
    for entry in by_key.values():
        entry.check(header)
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
        others = (key, f"{name}.quant_map", *nested)
        return QuantisedEntry(name, "nf4_float32", name, f"{name}.absmax", others)
    if method == "mxfp4" and key.endswith("_blocks"):
        name = key.removesuffix("_blocks")
        return QuantisedEntry(name, "mxfp4", key, f"{name}_scales")
    if key.endswith(".weight_packed" if method == "compressed-tensors" else ".weight_scale_2"):
        return _in_e2m1(key, header, method)
    ending = {"fp8": "_scale_inv", "compressed-tensors": ".weight_scale"}.get(method)
    is_packed = f"{key.removesuffix('_scale')}_packed" in header
    if ending is not None and key.endswith(ending) and not is_packed:
        name = key.removesuffix("_scale_inv").removesuffix("_scale")
        return QuantisedEntry(name, "fp8_blocks" if method == "fp8" else "fp8", name, key)
    found = re.fullmatch(r"(.*\.)_(\w+)_qdata", key) if method == "torchao" else None
    if found is None:
        return None
    zero = f"{found[1]}_{found[2]}_zero_point"
    fmt: Format = "int8" if header[key][0] == "I8" else "fp8"
    others = (zero,) if zero in header else ()
    return QuantisedEntry("".join(found.groups()), fmt, key, f"{found[1]}_{found[2]}_scale", others)


def _in_e2m1(key: str, header: Header, method: str) -> QuantisedEntry:
    """Return a linear of compressed-tensors or of ModelOpt. Scales of activations and of caches
    stand beside some, and are not read.
    """
    owner, _, leaf = key.rpartition(".")
    weight, scales = f"{owner}.weight", f"{owner}.weight_scale"
    beside = ("input_scale", "input_global_scale", "k_scale", "v_scale")
    unread = tuple(name for end in beside if (name := f"{owner}.{end}") in header)
    if leaf == "weight_scale_2":
        return QuantisedEntry(weight, "nvfp4", weight, scales, (key, *unread))
    if header.get(scales, ("U8",))[0] == "U8" and f"{weight}_global_scale" not in header:
        return QuantisedEntry(weight, "mxfp4", key, scales, unread)
    others = (f"{weight}_global_scale", *unread)
    return QuantisedEntry(weight, "nvfp4_divided", key, scales, others)


def _in_words(key: str, header: Header, section: Mapping[str, Any]) -> QuantisedEntry:
    """Return a linear of GPTQ or AWQ."""
    owner, form = key.removesuffix(".qweight"), _int4_form(section)
    packing = section["quant_method"]
    if packing == "gptq":
        packing = section.get("checkpoint_format", packing)
    groups = f"{owner}.g_idx"
    others = (groups,) if groups in header or form.endswith("_ordered") else ()
    others = (f"{owner}.qzeros", *others)
    return QuantisedEntry(f"{owner}.weight", form, key, f"{owner}.scales", others, packing)
