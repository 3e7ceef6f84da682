"""Write an adapter under the names that its reader looks for: PEFT, transformers or a server."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from peft.utils import CONFIG_NAME, SAFETENSORS_WEIGHTS_NAME
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from shardwise.config import Model, UserError
from shardwise.models.adapter import check_writable, short_targets
from shardwise.models.adapter_folder import PREFIX, AdapterFolder, read_adapter
from shardwise.models.families import family_of, spec_of
from shardwise.models.families.servers import (
    SERVERS,
    Factors,
    Server,
    check_read,
    for_server,
    target_modules,
)
from shardwise.models.load import build_meta, read_config
from shardwise.models.multimodal import Multimodal, multimodal_of
from shardwise.models.save import save_for_generation

READERS = ("peft", "hf", *SERVERS)
"""Who may read an exported adapter: `peft` on the class that `architectures` names, `hf` on the
class of transformers' AutoModelForCausalLM, and the servers."""
_BEYOND_LORA = (
    *("use_dora", "lora_bias", "use_qalora", "use_bdlora", "alora_invocation_tokens"),
    *("layer_replication", "rank_pattern", "alpha_pattern", "trainable_token_indices"),
    "modules_to_save",
)
"""Keys of an adapter's config that servers do not read, all of them or one."""
_CHANGE_THE_BASE = ("pissa", "olora", "corda", "loftq")
"""Values of `init_lora_weights` with which PEFT changes the base model's weights."""
_CHOOSE_MODULES = ("target_parameters", "layers_to_transform", "layers_pattern", "exclude_modules")
"""Keys of an adapter's config that choose among the modules beside `target_modules`."""


def export_adapter(
    base: Model,
    adapter_folder: str | Path,
    out_folder: str | Path,
    reader: str,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> None:
    """Write the adapter with the names that `reader`, one of READERS, looks for.

    It may be named after the text class or after the class in `architectures`. No weight of the
    base is read. UserError if it does not fit the base, or if the reader would not use all of it.
    """
    adapter, out = read_adapter(adapter_folder), Path(out_folder)
    check_writable(out)
    text = build_meta(base, read_config(base))
    multimodal = multimodal_of(base, text)
    names = adapter.text_names(text, multimodal)
    unknown = [name for name, text_name in names.items() if text_name is None]
    unknown += [key for key in adapter.others if not _is_inside(key, text, multimodal)]
    if unknown or not names:
        way_out = "see shardwise check"
        if multimodal is not None and multimodal.names_any(unknown):
            way_out = "write a whole model instead (--merge)"
        raise UserError(
            f"{adapter.path}: {len(unknown)} names in it are none of the language model of "
            f"{base.path} ({', '.join(unknown[:2])}); {way_out}"
        )
    own_names = {name: text_name for name, text_name in names.items() if text_name is not None}
    if reader in SERVERS:
        config, tensors = _for_server(SERVERS[reader], adapter, own_names, text, multimodal)
    else:
        whole = multimodal if reader == "peft" else None
        config, tensors = _for_peft(adapter, own_names, text, multimodal, whole)
    out.mkdir(parents=True, exist_ok=True)
    save_file(tensors, out / SAFETENSORS_WEIGHTS_NAME, metadata={"format": "pt"})
    (out / CONFIG_NAME).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    save_for_generation(out, tokenizer)


def _for_peft(
    adapter: AdapterFolder,
    names: dict[str, str],
    text: PreTrainedModel,
    multimodal: Multimodal | None,
    written_for: Multimodal | None,
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Return config and tensors under the names of the text class, or of `written_for`."""

    def renamed(name: str) -> str:
        inside = None if multimodal is None else multimodal.text_name(name)
        text_name = inside or name
        return text_name if written_for is None else written_for.name_of(text_name)

    def renamed_key(key: str) -> str:  # an end of names stays as it is
        return renamed(key) if _is_inside(key, text, multimodal) else key

    tensors = {}
    with safe_open(adapter.file, framework="pt") as opened:
        for key in list(opened.keys()):
            tensors[PREFIX + renamed(key.removeprefix(PREFIX))] = opened.get_tensor(key)
    config = dict(adapter.config)
    for key in ("modules_to_save", "target_parameters"):
        if config.get(key):
            config[key] = [renamed_key(value) for value in config[key]]
    for key in ("rank_pattern", "alpha_pattern"):
        config[key] = {renamed_key(name): value for name, value in (config.get(key) or {}).items()}
    config["target_modules"] = _targets(adapter, names, text, written_for)
    return config, tensors


def _targets(
    adapter: AdapterFolder,
    names: dict[str, str],
    text: PreTrainedModel,
    written_for: Multimodal | None,
) -> list[str]:
    """Return what `target_modules` must say for the modules that have factors, and no others."""
    parameters = adapter.patterns("target_parameters")
    linears = []
    for path in names.values():
        if "experts" not in path.split(".") and not f"{path}.weight".endswith(parameters):
            linears.append(path)
    if len(linears) < len(names) and not parameters:
        raise UserError(
            f"{adapter.path}: has factors of routed experts without target_parameters in its "
            "config; write a whole model instead (--merge)"
        )
    place: Callable[[str], str] = str if written_for is None else written_for.name_of
    seen = text if written_for is None else written_for.model
    all_modules = {name.rpartition(".")[0] for name, _ in seen.named_parameters()}
    layers = place(family_of(text).layers)
    return sorted(short_targets([place(path) for path in linears], all_modules, layers))


def _is_inside(key: str, text: PreTrainedModel, multimodal: Multimodal | None) -> bool:
    """Return whether a key or path is in the language model, by the names of one class or other."""
    name = key.removeprefix(PREFIX)
    if multimodal is not None and multimodal.text_name(name) is not None:
        return True
    modules = {path for path, _ in text.named_modules()} - {text.base_model_prefix}
    parts = name.split(".")
    return any(".".join(parts[:count]) in modules for count in range(1, len(parts) + 1))


def _for_server(
    server: Server,
    adapter: AdapterFolder,
    names: dict[str, str],
    text: PreTrainedModel,
    multimodal: Multimodal | None,
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Return config and tensors as the server reads them, named after the class that it loads."""
    spec = spec_of(text.config, text)
    check_read(server, names.values(), spec)
    _check_plain_lora(server, adapter)
    factors: Factors = {}
    with safe_open(adapter.file, framework="pt") as opened:
        for name, pair in adapter.factors.items():
            a, b = (opened.get_tensor(pair[letter].key) for letter in "AB")
            factors[names[name]] = (a, b)
    read = for_server(server, factors, text, spec)
    tensors = {}
    for path, pair in read.items():
        name = path if multimodal is None else multimodal.name_of(path)
        for letter, factor in zip("AB", pair):
            tensors[f"{PREFIX}{name}.lora_{letter}.weight"] = factor.contiguous()
    # The scale is written as alpha / r: not every server reads use_rslora.
    config = dict(adapter.config) | dict.fromkeys(_CHOOSE_MODULES)
    config |= {"lora_alpha": adapter.scale * adapter.rank, "use_rslora": False}
    return config | {"target_modules": target_modules(server, read)}, tensors


def _check_plain_lora(server: Server, adapter: AdapterFolder) -> None:
    config = adapter.config
    beyond = [key for key in _BEYOND_LORA if config.get(key)]
    if config.get("bias", "none") != "none":
        beyond.append("bias")
    if str(config.get("init_lora_weights", "")).lower().startswith(_CHANGE_THE_BASE):
        beyond.append("init_lora_weights")
    incomplete = [name for name, pair in adapter.factors.items() if len(pair) < 2]
    others = [pair["A"].shape for pair in adapter.factors.values() if "A" in pair]
    if any(shape[0] != adapter.rank for shape in others):
        beyond.append("several ranks")
    if beyond or adapter.others or incomplete:
        what = [*beyond, *adapter.others[:1], *incomplete[:1]]
        raise UserError(
            f"--for {server.name}: it reads plain LoRA of one rank only, and {adapter.path} has "
            f"{', '.join(what)}; write a whole model instead (--merge)"
        )
