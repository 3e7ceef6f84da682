"""Adapters of a run on disk: in PEFT's format, merged into the weights, for other readers."""

from __future__ import annotations

import dataclasses
import json
import os
import warnings
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.pytorch_utils import Conv1D

from shardwise.config import Lora, Model, UserError
from shardwise.models.adapters.peft_config import Seen, names_of_adapters, peft_config, text_key
from shardwise.models.adapters.reading import (
    CHANGE_THE_BASE,
    CONFIG_NAME,
    PREFIX,
    SAFETENSORS_WEIGHTS_NAME,
    Reading,
    bypassed,
    read_on,
    some,
)
from shardwise.models.families import family_of, spec_of
from shardwise.models.families.servers import (
    SERVERS,
    Factors,
    Server,
    check_read,
    for_server,
    target_modules,
)
from shardwise.models.load import (
    build_meta,
    fill,
    in_own_dtype,
    load_whole,
    other_weights,
    read_config,
)
from shardwise.models.multimodal import Multimodal
from shardwise.models.names import adapter_layers, hf_name, is_adapter, is_saved_copy, num_sharing
from shardwise.models.published import method_of
from shardwise.models.quantise import read_back, rounding_of_merge
from shardwise.models.save import checkpoint_entries, save_for_generation, save_model, write_tensors
from shardwise.models.weight_files import weights_from_files
from shardwise.models.weights import weights_of

if TYPE_CHECKING:
    from peft.tuners.lora import LoraLayer

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


def save_adapter(
    model: PreTrainedModel,
    lora: Lora,
    state: Mapping[str, torch.Tensor],
    folder: str | Path,
    base_name: str,
    multimodal: Multimodal | None = None,
) -> None:
    """Write the adapters so that `peft` alone loads them onto the model that `transformers` loads.

    `state`: the model's trainable parameters (LoRA factors and copies of modules to save) by name,
    full CPU tensors. Of `model`, which has the adapters, only names are used. `base_name`: where
    PEFT finds the base model. With `multimodal` the names are those of that class.
    """
    family = family_of(model)
    names = names_of_adapters(model)
    assert state.keys() == set(names), (
        f"not the adapters of this model: {sorted(state.keys() ^ set(names))[:5]}"
    )
    renamed = str if multimodal is None else multimodal.name_of
    loaded = model if multimodal is None else multimodal.model
    base_names = frozenset(row.path for row in weights_of(loaded))
    seen = Seen(base_names, loaded.config.model_type, renamed(family.layers))
    layers = {renamed(path): layer for path, layer in adapter_layers(model).items()}
    modules, parameters = seen.targets(layers)
    saved = dict.fromkeys(
        hf_name(name.partition(".modules_to_save.")[0]) for name in names if is_saved_copy(name)
    )
    config = peft_config(
        dataclasses.replace(lora, dropout=0.0 if parameters else lora.dropout),
        modules=modules,
        parameters=parameters,
        saved=[renamed(path) for path in saved],
        transposed=any(isinstance(layer.get_base_layer(), Conv1D) for layer in layers.values()),
    )
    for key, entries in seen.patterns(seen.sizes(layers), lora.r, lora.alpha).items():
        setattr(config, key, entries)
    config.base_model_name_or_path = base_name
    config.inference_mode = True
    for key, value in vars(config).items():
        if isinstance(value, set):  # whose order in the file would differ between processes
            setattr(config, key, sorted(value))
    folder = Path(folder)
    config.save_pretrained(str(folder))
    tensors = {
        PREFIX + text_key(renamed(name)): _for_each_expert(model, name, tensor).contiguous()
        for name, tensor in state.items()
    }
    write_tensors(tensors, folder / SAFETENSORS_WEIGHTS_NAME)


def _for_each_expert(model: PreTrainedModel, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return a factor as PEFT has it, which knows none that experts share: repeated for each."""
    layer = model.get_submodule(name.partition(".lora_")[0]) if is_adapter(name) else None
    num_copies = num_sharing(layer)
    if ".lora_A." in name:
        return tensor.repeat(num_copies, 1)  # [E R, in], by expert
    return tensor.repeat_interleave(num_copies, dim=-1)  # [out, R E], by rank


def merge_adapter(
    base: Model,
    adapter_folder: str | Path,
    out_folder: str | Path,
    seed: int = 0,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> list[str]:
    """Write the model with the adapters added into its weights: W + scale * BA.

    `transformers` alone loads it, as the class that the base's `architectures` names; what the base
    has beside the language model is copied, except where the adapter changes it. With `base.base` W
    has the values that it stores, on which the adapter was trained. The adapter's names may be
    those of the text class or of that one. Beside it stand the `tokenizer` and the
    base's generation config. `seed` is for a base with `init: random`. All of the model is in
    memory. Return notes for the user. UserError if the folder holds no adapters, or those of
    another model.
    """
    reading = read_on(base, adapter_folder)
    check_writable(Path(out_folder))
    reading.require(f"{reading.folder.path}: these adapters do not fit {base.path}")
    deque(reading.values(), maxlen=0)  # UserError at a number that is not finite
    config = read_config(base)
    base = in_own_dtype(base, config)  # the merged model is stored as its base is
    model = load_whole(base, config, seed, cast=False)
    family_of(model)
    if base.base != "none":
        fill(model, read_back(model, base, seed, base.base))
    multimodal = reading.multimodal
    tied = _untied(reading, model)
    written = (model,) if multimodal is None else (model, multimodal.model)
    configs = [config for m in written for config in (m.config, m.config.get_text_config())]
    configs = [config for config in configs if hasattr(config, "tie_word_embeddings")]
    ties = [config.tie_word_embeddings for config in configs]
    holder = model  # the class that the adapter's names are of
    beside: list[str] = []  # its parameters beside the language model, where the adapter has some
    if multimodal is not None and reading.holder is multimodal.model:
        if any(reading.text_name(name.removeprefix(PREFIX)) is None for name in reading.sources):
            parameters = [name for name, _ in multimodal.model.named_parameters()]
            beside = [name for name in parameters if multimodal.text_name(name) is None]
        values = weights_from_files(multimodal.model, base.path, beside) if beside else ()
        holder = multimodal.around(model, values)
    state, changed = _merged(reading, holder, base), {}
    if holder is not model:
        assert multimodal is not None
        changed = dict(checkpoint_entries(multimodal.model, ((n, state[n]) for n in beside)))
        inside = {multimodal.text_name(name): tensor for name, tensor in state.items()}
        state = {name: tensor for name, tensor in inside.items() if name is not None}
    if any(not torch.equal(state[name], state[other]) for name, other in tied.items()):
        model.all_tied_weights_keys, ties = {}, [False] * len(configs)
    for written_config, tie in zip(configs, ties):  # PEFT unties whatever it has put adapters on
        written_config.tie_word_embeddings = tie
    state = {n: tensor for n, tensor in state.items() if n not in model.all_tied_weights_keys}
    # Random weights have no files, and so nothing beside the language model.
    whole = multimodal if base.init == "weights" else None
    others = other_weights(build_meta(base, config), base)
    others = ((key, changed.get(key, tensor)) for key, tensor in others)
    note = save_model(model, state.items(), out_folder, multimodal=whole, others=others)
    save_for_generation(out_folder, tokenizer, base.path)
    notes = [note] if note else []
    if method_of(config) is not None:
        notes.append(
            f"{base.path} is quantised ({method_of(config)}); the merged model is in {base.dtype}"
        )
    if unread := bypassed(reading):
        notes.append(
            "merged adapters act on weights that their layer reads past the adapter, so the merged "
            f"model is not what PEFT computes with it: {some(unread)}"
        )
    if base.base != "none":
        again, moved = rounding_of_merge(build_meta(base, config), state, base, seed, base.base)
        notes.append(
            f"the adapter has moved the matrices of model.base by {moved:.2%} of their norm; to "
            f"store the merged ones as {base.base} again would move them by {again:.2%}"
        )
    return notes


def _untied(reading: Reading, model: PreTrainedModel) -> dict[str, str]:
    """Give tied weights that an adapter changes memory of their own; return which ones those are.

    PEFT would add an adapter of one to the other too, and one of both twice.
    """
    adapted = [*reading.layers, *(name.removeprefix(PREFIX) for name in reading.others)]
    parents = {reading.text_name(name.removesuffix(".weight")) for name in adapted}
    tied = {}
    for pair in model.all_tied_weights_keys.items():
        modules = [name.removesuffix(".weight") for name in pair]
        if any(parent and f"{parent}.".startswith(f"{m}.") for parent in parents for m in modules):
            tied[pair[0]] = pair[1]
            weight = model.get_parameter(pair[0]).detach().clone()
            model.get_submodule(modules[0]).weight = nn.Parameter(weight, requires_grad=False)
    return tied


def _merged(reading: Reading, holder: PreTrainedModel, base: Model) -> dict[str, torch.Tensor]:
    """Return the weights of `holder` with the adapters added by PEFT."""
    from peft import PeftModel

    path = reading.folder.path
    try:
        with warnings.catch_warnings():
            # Of a name that transformers will drop, of missing keys, which have been looked for, of
            # tied weights, which are not now, and of patterns that PEFT has made itself.
            warnings.simplefilter("ignore")
            adapted = PeftModel.from_pretrained(holder, str(path))
    except Exception as error:  # first values by rules that may not fit these weights
        raise UserError(
            f"{path}: these adapters do not fit {base.path} ({str(error)[:200]}); see "
            "shardwise check"
        ) from None
    try:
        return adapted.merge_and_unload().state_dict()
    except (NotImplementedError, RuntimeError, ValueError) as error:
        raise UserError(
            f"{path}: PEFT cannot add it to the weights ({str(error)[:200]}); load the adapter as "
            "it is (--for peft)"
        ) from None


def check_writable(out: Path) -> None:
    """Raise UserError unless a folder can be written here and nothing is in it."""
    existing = next(path for path in (out.absolute(), *out.absolute().parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        reason = "no write permission" if existing.is_dir() else "not a folder"
        raise UserError(f"{out}: cannot be written ({existing}: {reason}); give another place")
    if out.exists() and any(out.iterdir()):
        raise UserError(f"{out} is there already and not an empty folder; give another place")


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
    beside = [n for n in reading.sources if reading.text_name(n.removeprefix(PREFIX)) is None]
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
    for name, layer, a, b in _pairs(reading):
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


def _pairs(reading: Reading) -> Iterator[tuple[str, LoraLayer, torch.Tensor, torch.Tensor]]:
    """Yield name, layer, A and B of each linear or parameter with an adapter, as `layers`."""
    values = dict(reading.values(reading.sources.keys() - {*reading.others}))
    paths = reading.modules
    for name, layer in reading.layers.items():
        a, b = (values[f"{paths[layer]}.lora_{letter}.weight"] for letter in "AB")
        yield name, layer, a, b


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
