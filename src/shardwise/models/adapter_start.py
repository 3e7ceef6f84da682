"""LoRA that starts from the adapter of a folder (`lora.path`) instead of drawn factors."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Any

import torch
from peft import LoraConfig
from safetensors import safe_open
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from shardwise.config import Lora, Model, RunConfig, UserError
from shardwise.models.adapter_folder import PREFIX, AdapterFolder, as_in_file, read_adapter
from shardwise.models.lora import adapter_layers
from shardwise.models.multimodal import Multimodal, multimodal_of
from shardwise.models.names import is_adapter, is_saved_copy

_READ = re.compile(
    "peft_type|peft_version|task_type|base_model_name_or_path|revision|inference_mode|auto_mapping|"
    "r|lora_alpha|lora_dropout|use_rslora|use_dora|target_modules|target_parameters|exclude_modules|"
    "modules_to_save|fan_in_fan_out|layers_to_transform|layers_pattern|init_lora_weights"
)
"""Keys of PEFT's config that this library computes, or that only say which weights are adapted."""
_KEEPS_BASE = (None, True, False, "gaussian", "eva", "orthogonal")
"""Values of `init_lora_weights` with which PEFT leaves the base weights as they are."""
_FROM_FOLDER = ("r", "alpha", "rslora", "dora", "targets", "modules_to_save", "experts")
"""The keys of `lora` that a folder says."""


def section_of(lora: Lora, base: Model, model: PreTrainedModel) -> Lora:
    """Return the section with what the folder of `lora.path` says; without a path as it is.

    `model` is the language model of `base` without adapters. UserError where the folder has no
    adapter that fits it, or one of a kind that is not computed here. Which keys may stand beside it
    say the rules (`contradicted`).
    """
    if lora.path is None:
        return lora
    adapter = read_adapter(lora.path)
    _check_kind(adapter)
    multimodal = multimodal_of(base, model)
    saved = list(adapter.patterns("modules_to_save"))
    if multimodal is not None:
        saved = [multimodal.text_name(name) or name for name in saved]
    return replace(
        lora,
        r=adapter.rank,
        alpha=float(adapter.config["lora_alpha"]),
        rslora=bool(adapter.config.get("use_rslora")),
        dora=bool(adapter.config.get("use_dora")),
        targets=_targets(adapter, base, model),
        modules_to_save=saved,
        experts="each",
    )


def of_folder(lora: Lora | None) -> dict[str, Any]:
    """Return what the folder of `lora.path` has given, by key: with it no resume needs a folder."""
    return {key: getattr(lora, key) for key in _FROM_FOLDER}


def resumed(cfg: RunConfig, saved: Lora | None) -> RunConfig:
    """Return the run with the adapter that a checkpoint has `saved`, in the place of a folder's."""
    if cfg.lora is None or cfg.lora.path is None or saved is None:
        return cfg
    return replace(cfg, lora=replace(cfg.lora, path=None, **of_folder(saved)))


def contradicted(given: Lora, found: Lora) -> tuple[str, object, object] | None:
    """Return a key that says otherwise than the folder, its value and the folder's; None if none.

    A key at its default says nothing.
    """
    default = Lora()
    for key in _FROM_FOLDER:
        value, other = getattr(given, key), getattr(found, key)
        if value not in (other, getattr(default, key)):
            return key, value, "other weights" if key == "targets" else other
    return None


def check_tensors(lora: Lora, base: Model, model: PreTrainedModel) -> None:
    """Raise UserError unless the file of `lora.path` has the tensors of `model`, and no others.

    `model` is on meta and has the adapters.
    """
    assert lora.path is not None
    adapter = read_adapter(lora.path)
    keys = _keys(adapter, multimodal_of(base, model))
    wanted = {
        _plain(name): tuple(p.shape) for name, p in model.named_parameters() if _is_ours(name)
    }
    for words, names in (
        ("lacks", wanted.keys() - keys.keys()),
        ("has, and this model has no place for,", keys.keys() - wanted.keys()),
    ):
        if names:
            raise UserError(
                f"lora.path {lora.path}: the file {words} {len(names)} tensors, such as "
                f"{min(names)}; give an adapter of {base.path}"
            )
    for name, shape in wanted.items():
        if adapter.shapes[keys[name]] != shape:
            raise UserError(
                f"lora.path {lora.path}: {name} is {list(adapter.shapes[keys[name]])}, but "
                f"{list(shape)} in this model; give an adapter of {base.path}"
            )


def folder_weights(
    lora: Lora, base: Model, model: PreTrainedModel, wanted: Collection[str]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, full CPU tensor) of the adapters and saved copies in `wanted`, one at a time."""
    assert lora.path is not None
    mine = {n: p.dtype for n, p in model.named_parameters() if _is_ours(n) and n in wanted}
    if not mine:
        return
    adapter = read_adapter(lora.path)
    keys = _keys(adapter, multimodal_of(base, model))
    with safe_open(adapter.file, framework="pt") as file:
        for name, dtype in mine.items():
            yield name, file.get_tensor(keys[_plain(name)]).to(dtype)


def section_of_layers(lora: Lora, model: nn.Module) -> Lora:
    """Return the section with rank and scale of the adapters that `model` has."""
    layer: Any = next(iter(adapter_layers(model).values()))
    return replace(
        lora,
        r=layer.r["default"],
        alpha=layer.lora_alpha["default"],
        rslora=layer.use_rslora["default"],
        dora=layer.use_dora["default"],
    )


def _check_kind(adapter: AdapterFolder) -> None:
    config, plain = adapter.config, LoraConfig().to_dict()
    for key, value in config.items():
        if value and value != plain.get(key) and not _READ.fullmatch(key):
            raise UserError(
                f"lora.path {adapter.path}: its config has {key}, a kind of LoRA that is not "
                "computed here; give an adapter of plain LoRA"
            )
    if config.get("init_lora_weights") not in _KEEPS_BASE:
        raise UserError(
            f"lora.path {adapter.path}: init_lora_weights is {config['init_lora_weights']}, which "
            "changes the base too; convert it to plain LoRA with PEFT's save_pretrained"
        )


def _targets(adapter: AdapterFolder, base: Model, model: PreTrainedModel) -> list[str]:
    """Return the paths of the linears and stacks of experts that have factors in the file."""
    names = adapter.text_names(model, multimodal_of(base, model))
    targets: list[str] = []
    for there, name in names.items():
        plain = "" if name is None else name.replace(".base_layer", "")
        module = None if name is None else model.get_submodule(plain)
        if isinstance(module, (nn.Linear, Conv1D)):
            targets.append(plain)
        elif module is not None and adapter.patterns("target_parameters"):
            # PEFT nests the adapters of several stacks of a module; its config names the stacks.
            ends = adapter.patterns("target_parameters")
            stacks = [f"{plain}.{leaf}" for leaf, _ in module.named_parameters(recurse=False)]
            targets += [path for path in stacks if f".{path}".endswith(_dotted(ends))]
        else:
            raise UserError(
                f"lora.path {adapter.path}: {base.path} has no linear {there}; give an adapter of "
                "this model"
            )
    if not targets:
        raise UserError(f"lora.path {adapter.path}: no factors in the file; give a LoRA adapter")
    return list(dict.fromkeys(targets))


def _dotted(ends: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(f".{end}" for end in ends)


def _keys(adapter: AdapterFolder, multimodal: Multimodal | None) -> dict[str, str]:
    """Return the key in the file by the name in the text class, without PEFT's wrappers."""
    keys = {}
    for key in adapter.shapes:
        name = key.removeprefix(PREFIX)
        inside = None if multimodal is None else multimodal.text_name(name)
        keys[_plain(inside or name)] = key
    return keys


def _is_ours(name: str) -> bool:
    return is_adapter(name) or is_saved_copy(name)


def _plain(name: str) -> str:
    name = name.replace(".modules_to_save.default.", ".").replace(".default.", ".")
    return as_in_file(name)
