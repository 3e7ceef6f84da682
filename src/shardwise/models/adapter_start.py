"""LoRA that starts from the adapter of a folder (`lora.path`) instead of drawn factors."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Any

import torch
from peft import LoraConfig
from peft.tuners.lora import ParamWrapper
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from shardwise.config import Lora, Model, RunConfig, UserError
from shardwise.models.adapter_folder import PREFIX, AdapterFolder, as_in_file, read_adapter
from shardwise.models.adapter_reading import CHANGE_THE_BASE, Reading, read_on, reading_of
from shardwise.models.adapter_targets import sizes_of
from shardwise.models.families import family_of
from shardwise.models.lora import adapter_layers
from shardwise.models.multimodal import multimodal_of
from shardwise.models.names import is_adapter, is_saved_copy
from shardwise.models.weight_files import weights_from_files

_READ = re.compile(
    "peft_type|peft_version|task_type|base_model_name_or_path|revision|inference_mode|auto_mapping|"
    "r|lora_alpha|lora_dropout|use_rslora|use_dora|target_modules|target_parameters|exclude_modules|"
    "modules_to_save|fan_in_fan_out|layers_to_transform|layers_pattern|init_lora_weights|"
    "rank_pattern|alpha_pattern|ensure_weight_tying|(eva|corda|lora_ga|loftq)_config"
)
"""Keys of PEFT's config that this library computes, or that only say which weights are adapted or
how their first values were found."""
_FROM_FOLDER = ("r", "alpha", "rslora", "dora", "targets", "modules_to_save", "experts")
"""The keys of `lora` that a folder says."""
_MERGED = "write a model with it (shardwise export --merge), and train a new adapter on that"


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
    reading = reading_of(adapter, model, multimodal_of(base, model))
    reading.require(f"lora.path {adapter.path}")
    saved = [reading.text_name(name) or name for name in reading.saved]
    _check_untied(reading, base, saved)
    _check_base(reading, base, saved)
    sizes = {target: sizes_of(reading.layers)[name] for name, target in _targets(reading).items()}
    if not sizes:
        raise UserError(f"lora.path {adapter.path}: no factors in the file; give a LoRA adapter")
    rank, alpha = Counter(sizes.values()).most_common(1)[0][0]
    others = {path: None if size == (rank, alpha) else [*size] for path, size in sizes.items()}
    return replace(
        lora,
        r=rank,
        alpha=float(alpha),
        rslora=bool(adapter.config.get("use_rslora")),
        dora=bool(adapter.config.get("use_dora")),
        targets=list(sizes) if not any(others.values()) else others,
        modules_to_save=saved,
        experts="each",
    )


def keys_of_folder(lora: Lora | None) -> dict[str, Any]:
    """Return what the folder of `lora.path` has given, by key: with it no resume needs a folder."""
    return {key: getattr(lora, key) for key in _FROM_FOLDER}


def resumed(cfg: RunConfig, saved: Lora | None) -> RunConfig:
    """Return the run with the adapter that a checkpoint has `saved`, in the place of a folder's."""
    if cfg.lora is None or cfg.lora.path is None or saved is None:
        return cfg
    return replace(cfg, lora=replace(cfg.lora, path=None, **keys_of_folder(saved)))


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


def folder_weights(
    lora: Lora, base: Model, model: PreTrainedModel, wanted: Collection[str]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, full CPU tensor) of the adapters and saved copies in `wanted`, one at a time."""
    assert lora.path is not None
    mine = {n: p.dtype for n, p in model.named_parameters() if _is_ours(n) and n in wanted}
    if not mine:
        return
    reading = read_on(base, lora.path)
    found = {reading.text_name(name.removeprefix(PREFIX)): name for name in reading.sources}
    places = {found[_plain(name)]: name for name in mine}
    for name, value in reading.values(places):
        yield places[name], value.to(mine[places[name]])


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
    where = f"lora.path {adapter.path}"
    for key, value in config.items():
        if value and value != plain.get(key) and not _READ.fullmatch(key):
            raise UserError(
                f"{where}: its config has {key}, a kind of LoRA that is not computed here; give an "
                f"adapter of plain LoRA, or {_MERGED}"
            )
    init = str(config.get("init_lora_weights")).lower()
    if init == "mica":
        raise UserError(
            f"{where}: init_lora_weights is mica, which trains A alone, and a run trains both "
            "factors; set it to true in adapter_config.json if that is what you want"
        )
    if init.startswith(CHANGE_THE_BASE):
        raise UserError(
            f"{where}: init_lora_weights is {init}, which changes the base too; convert it to "
            "plain LoRA with PEFT's save_pretrained"
        )


def _check_untied(reading: Reading, base: Model, saved: list[str]) -> None:
    tied = {name for pair in reading.text.all_tied_weights_keys.items() for name in pair}
    for module in saved:
        if f"{module}.weight" in tied:
            raise UserError(
                f"lora.path {reading.folder.path}: it trains {module} in full, which {base.path} "
                f"ties to another weight; {_MERGED}"
            )


def _targets(reading: Reading) -> dict[str, str]:
    """Return the path of each linear and stack of experts with factors, by PEFT's name of it."""
    head, bypassed = reading.text.get_output_embeddings(), family_of(reading.text).bypassed
    targets: dict[str, str] = {}
    for name, layer in reading.layers.items():
        path = reading.text_name(name)
        module = None if path is None else _module_of(reading.text, path)
        if path is None:
            problem = "which is not of the language model"
        elif module is head:
            problem = "the head, which takes no adapter here"
        elif isinstance(module, nn.Embedding):
            problem = "the embedding, which takes no adapter here"
        elif path.endswith(bypassed):
            problem = "whose weight its layer reads past the adapter"
        elif isinstance(module, (nn.Linear, Conv1D)):
            targets[name] = path.removesuffix(".weight")
            continue
        elif isinstance(layer, ParamWrapper) and not name.endswith(".weight"):
            targets[name] = path
            continue
        else:
            problem = f"a {type(module).__name__}, which takes no adapter here"
        raise UserError(f"lora.path {reading.folder.path}: it adapts {name}, {problem}; {_MERGED}")
    return targets


def _module_of(text: PreTrainedModel, path: str) -> nn.Module:
    """Return the module that a path names, or the parameter of which."""
    modules = dict(text.named_modules())
    return modules.get(path) or modules[path.rpartition(".")[0]]


def _check_base(reading: Reading, base: Model, saved: list[str]) -> None:
    """Raise UserError where a base weight that stands in the file is not that of `base`.

    PEFT writes them beside an embedding that was resized. Of modules that are trained in full it
    then writes copies too, which it does not compute with.
    """
    text, tied = reading.text, reading.text.all_tied_weights_keys
    trained = tuple(f"{module}." for module in saved)
    parameters = dict(text.named_parameters(remove_duplicate=False))
    inside = {name: str(reading.text_name(name.removeprefix(PREFIX))) for name in reading.others}
    names = [
        name
        for name, own_name in inside.items()
        if own_name in parameters and not own_name.startswith(trained)
    ]
    for name, value in reading.values(names):
        own_name = tied.get(inside[name], inside[name])
        has_files = base.init == "weights"
        weights = weights_from_files(text, base.path, {own_name}) if has_files else ()
        if not any(torch.equal(weight, value.to(weight.dtype)) for _, weight in weights):
            raise UserError(
                f"lora.path {reading.folder.path}: the file has another {own_name} than "
                f"{base.path}, as of a model with more tokens; give that model as model.path"
            )


def _is_ours(name: str) -> bool:
    return is_adapter(name) or is_saved_copy(name)


def _plain(name: str) -> str:
    name = name.replace(".modules_to_save.default.", ".").replace(".default.", ".")
    return as_in_file(name)
