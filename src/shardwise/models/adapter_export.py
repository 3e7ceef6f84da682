"""Write an adapter under the names that its reader looks for: PEFT, transformers or a server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from peft.utils import CONFIG_NAME, SAFETENSORS_WEIGHTS_NAME
from transformers import PreTrainedTokenizerBase

from shardwise.config import Model, UserError
from shardwise.models.adapter import check_writable
from shardwise.models.adapter_folder import PREFIX
from shardwise.models.adapter_reading import CHANGE_THE_BASE, Reading, read_on
from shardwise.models.adapter_targets import Seen
from shardwise.models.families import family_of, spec_of
from shardwise.models.families.servers import (
    SERVERS,
    Factors,
    Server,
    check_read,
    for_server,
    target_modules,
)
from shardwise.models.multimodal import Multimodal
from shardwise.models.save import save_for_generation, write_tensors

READERS = ("peft", "hf", *SERVERS)
"""Who may read an exported adapter: `peft` on the class that `architectures` names, `hf` on the
class of transformers' AutoModelForCausalLM, and the servers."""
_BEYOND_LORA = (
    *("use_dora", "lora_bias", "use_qalora", "use_bdlora", "alora_invocation_tokens"),
    *("kasa_config", "monteclora_config", "arrow_config", "trainable_token_indices"),
    "modules_to_save",
)
"""Keys of an adapter's config that servers do not read, all of them or one."""
_CHOOSE_MODULES = (
    *("target_parameters", "layers_to_transform", "layers_pattern", "exclude_modules"),
    *("rank_pattern", "alpha_pattern"),
)
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
    out = Path(out_folder)
    reading = read_on(base, adapter_folder)
    check_writable(out)
    reading.require(f"{reading.folder.path}: does not fit {base.path}")
    beside = [name for name in reading.sources if _text_name(reading, name) is None]
    if beside:
        raise UserError(
            f"{reading.folder.path}: {len(beside)} names in it are none of the language model of "
            f"{base.path} ({', '.join(beside[:2])}); write a whole model instead (--merge)"
        )
    if reader in SERVERS:
        config, tensors = _for_server(SERVERS[reader], reading)
    else:
        config, tensors = _for_peft(reading, reading.multimodal if reader == "peft" else None)
    out.mkdir(parents=True, exist_ok=True)
    write_tensors(tensors, out / SAFETENSORS_WEIGHTS_NAME)
    (out / CONFIG_NAME).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    save_for_generation(out, tokenizer)


def _text_name(reading: Reading, name: str) -> str | None:
    return reading.text_name(name.removeprefix(PREFIX))


def _for_peft(
    reading: Reading, written_for: Multimodal | None
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Return config and tensors under the names of the text class, or of `written_for`."""
    model = reading.text if written_for is None else written_for.model

    def renamed(name: str) -> str:  # an end of names stays as it is
        text_name = reading.text_name(name) or name
        if written_for is None:
            return text_name
        is_path = any(f"{text_name}.".startswith(f"{place}.") for place in written_for.places)
        return written_for.name_of(text_name) if is_path else text_name

    names = frozenset(name for name, _ in model.named_parameters())
    seen = Seen(names, model.config.model_type, renamed(family_of(reading.text).layers))
    layers = {renamed(name): layer for name, layer in reading.layers.items()}
    modules, parameters = seen.targets(layers)
    config: dict[str, Any] = {**reading.folder.config, **dict.fromkeys(_CHOOSE_MODULES)}
    config["target_modules"] = sorted(modules)
    if parameters:
        config |= {"target_parameters": sorted(parameters), "lora_dropout": 0.0}
    config |= seen.patterns(seen.sizes(layers), config["r"], config["lora_alpha"])
    if saved := reading.folder.patterns("modules_to_save"):
        config["modules_to_save"] = [renamed(name) for name in saved]
    if isinstance(tokens := config.get("trainable_token_indices"), dict):
        config["trainable_token_indices"] = {renamed(name): ids for name, ids in tokens.items()}
    tensors = {
        PREFIX + renamed(name.removeprefix(PREFIX)): value for name, value in reading.values()
    }
    return config, tensors


def _for_server(server: Server, reading: Reading) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Return config and tensors as the server reads them, named after the class that it loads."""
    text, multimodal = reading.text, reading.multimodal
    spec = spec_of(text.config, text)
    own_names = {name: str(reading.text_name(name)) for name in reading.layers}
    paths = {name: path.removesuffix(".weight") for name, path in own_names.items()}
    check_read(server, paths.values(), spec)
    _check_plain_lora(server, reading)
    factors: Factors = {}
    alphas: dict[str, float] = {}
    for name, layer, a, b in reading.pairs():
        factors[paths[name]] = (a, b)
        # The scale is written as alpha / r: not every server reads use_rslora.
        rank, alpha = layer.r["default"], layer.lora_alpha["default"]
        alphas[paths[name]] = alpha * rank**0.5 if layer.use_rslora["default"] else alpha
    read = for_server(server, factors, text, spec)
    place = (lambda path: path) if multimodal is None else multimodal.name_of
    tensors, sizes = {}, {}
    for path, pair in read.items():
        # A part, or one with factors of zeros, is not in the file.
        alpha = alphas.get(path, next(iter(alphas.values())))
        sizes[place(path)] = pair[0].shape[0], alpha
        for letter, factor in zip("AB", pair):
            tensors[f"{PREFIX}{place(path)}.lora_{letter}.weight"] = factor.contiguous()
    model = text if multimodal is None else multimodal.model
    linears = {name.rpartition(".")[0] for name, _ in model.named_parameters()}
    names = frozenset(f"{path}.weight" for path in linears | sizes.keys())
    seen = Seen(names, model.config.model_type, place(family_of(text).layers))
    r, alpha = max(sizes.values())
    config = dict(reading.folder.config) | dict.fromkeys(_CHOOSE_MODULES)
    config |= {"r": r, "lora_alpha": alpha, "use_rslora": False}
    config |= seen.patterns(sizes, r, alpha)
    return config | {"target_modules": target_modules(server, read)}, tensors


def _check_plain_lora(server: Server, reading: Reading) -> None:
    config = reading.folder.config
    beyond = [key for key in _BEYOND_LORA if config.get(key)]
    if config.get("bias", "none") != "none":
        beyond.append("bias")
    if str(config.get("init_lora_weights", "")).lower().startswith(CHANGE_THE_BASE):
        beyond.append("init_lora_weights")
    sizes = {(layer.r["default"], layer.scaling["default"]) for layer in reading.layers.values()}
    if len(sizes) > 1 and not server.reads_patterns:
        beyond.append("several ranks or scales")
    if beyond or reading.others:
        what = [*beyond, *reading.others[:1]]
        raise UserError(
            f"--for {server.name}: it reads plain LoRA"
            f"{'' if server.reads_patterns else ' of one rank'} only, and {reading.folder.path} "
            f"has {', '.join(what)}; write a whole model instead (--merge)"
        )
