"""Adapters of a run on disk: in PEFT's format, and merged into the weights."""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from peft import PeftModel
from peft.tuners.lora import ParamWrapper
from peft.utils import SAFETENSORS_WEIGHTS_NAME, get_peft_model_state_dict
from safetensors import SafetensorError
from safetensors.torch import save_file
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.pytorch_utils import Conv1D

from shardwise.config import Lora, Model, UserError
from shardwise.models.adapter_folder import PREFIX, AdapterFolder, as_in_file, read_adapter
from shardwise.models.families import family_of
from shardwise.models.load import (
    build_meta,
    fill,
    in_own_dtype,
    load_whole,
    other_weights,
    read_config,
)
from shardwise.models.lora import adapter_layers, num_sharing, peft_config
from shardwise.models.multimodal import Multimodal, multimodal_of
from shardwise.models.names import hf_name, is_adapter, is_saved_copy, renamed_by_peft
from shardwise.models.quantise import read_back, rounding_of_merge
from shardwise.models.save import checkpoint_entries, save_for_generation, save_model
from shardwise.models.stored import plain_names
from shardwise.models.weight_files import plain_entries, weights_from_files


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

    PEFT renames, by model type, targets that look like a checkpoint's per-expert matrices, and so
    loses linears of MLPs (`names.renamed_by_peft`). Those are listed as parameters (`....weight`)
    instead of modules, which gives the same factors under the same names. PEFT then computes W + BA
    rather than Wx + BAx, and the config must not have dropout.
    """
    family = family_of(model)
    names = [
        name for name, _ in model.named_parameters() if is_adapter(name) or is_saved_copy(name)
    ]
    assert state.keys() == set(names), (
        f"not the adapters of this model: {sorted(state.keys() ^ set(names))[:5]}"
    )
    base_names = {hf_name(name) for name in plain_names(model) if not is_adapter(name)}
    modules: list[str] = []
    parameters: list[str] = []
    layers = adapter_layers(model)
    loaded = model if multimodal is None else multimodal.model
    renamed_targets = renamed_by_peft(loaded.config.model_type)
    for path, layer in layers.items():
        if isinstance(layer, ParamWrapper):
            parameters.append(path)
        elif path.rpartition(".")[2] in renamed_targets:
            parameters.append(f"{path}.weight")
        else:
            modules.append(path)
    saved = dict.fromkeys(
        hf_name(name.partition(".modules_to_save.")[0]) for name in names if is_saved_copy(name)
    )
    renamed = str if multimodal is None else multimodal.name_of
    if multimodal is not None:
        base_names = {name for name, _ in multimodal.model.named_parameters()}
    inside = renamed(family.layers)
    all_modules = {name.rpartition(".")[0] for name in base_names}
    config = peft_config(
        dataclasses.replace(lora, dropout=0.0 if parameters else lora.dropout),
        modules=short_targets([renamed(path) for path in modules], all_modules, inside),
        parameters=short_targets([renamed(path) for path in parameters], base_names, inside),
        saved=[renamed(path) for path in saved],
        transposed=any(isinstance(layer.get_base_layer(), Conv1D) for layer in layers.values()),
    )
    config.base_model_name_or_path = base_name
    config.inference_mode = True
    for key, value in vars(config).items():
        if isinstance(value, set):  # whose order in the file would differ between processes
            setattr(config, key, sorted(value))
    folder = Path(folder)
    config.save_pretrained(str(folder))
    tensors = {
        _file_key(renamed(name)): _for_each_expert(model, name, tensor).contiguous()
        for name, tensor in state.items()
    }
    save_file(tensors, folder / SAFETENSORS_WEIGHTS_NAME, metadata={"format": "pt"})


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
    adapter = read_adapter(adapter_folder)
    check_writable(Path(out_folder))
    config = read_config(base)
    base = in_own_dtype(base, config)  # the merged model is stored as its base is
    in_file = plain_entries(adapter.file)
    model = load_whole(base, config, seed, cast=False)
    family_of(model)
    if base.base != "none":
        entries = read_back(model, base, seed, base.base)
        fill(model, entries)
    multimodal = multimodal_of(base, model)
    _check_untied(adapter, base, model, multimodal)
    holder = model  # the class that the adapter's names are of
    beside: list[str] = []  # its parameters beside the language model, where the adapter has some
    if multimodal is not None and multimodal.names_any(adapter.factors):
        names = [key.removeprefix(PREFIX) for key in adapter.shapes]
        if any(multimodal.text_name(name) is None for name in names):
            parameters = [name for name, _ in multimodal.model.named_parameters()]
            beside = [name for name in parameters if multimodal.text_name(name) is None]
        values = weights_from_files(multimodal.model, base.path, beside) if beside else ()
        holder = multimodal.around(model, values)
    try:
        with warnings.catch_warnings():
            # PEFT 0.21 uses a name that transformers will drop.
            warnings.simplefilter("ignore", FutureWarning)
            # Of missing keys, which are checked below.
            warnings.simplefilter("ignore", UserWarning)
            adapted = PeftModel.from_pretrained(holder, str(adapter.path))
    except (KeyError, TypeError, ValueError, RuntimeError, SafetensorError) as error:
        raise UserError(
            f"{adapter.path}: these adapters do not fit {base.path} ({str(error)[:200]})"
        ) from None
    wanted = get_peft_model_state_dict(adapted, save_embedding_layers=False).keys()
    # PEFT writes embeddings too where they were adapted or resized.
    read = wanted | get_peft_model_state_dict(adapted, save_embedding_layers=True).keys()
    missing, unread = wanted - in_file, in_file - read
    if missing or unread:
        raise UserError(
            f"{adapter.path}: these adapters do not fit {base.path} "
            f"({len(missing)} of its adapted weights are not in the file, "
            f"{len(unread)} in the file are not in it; {min(missing | unread)})"
        )
    merged = adapted.merge_and_unload()
    state, changed = merged.state_dict(), {}
    if holder is not model:
        assert multimodal is not None
        changed = dict(checkpoint_entries(multimodal.model, ((n, state[n]) for n in beside)))
        inside = {multimodal.text_name(name): tensor for name, tensor in state.items()}
        state = {name: tensor for name, tensor in inside.items() if name is not None}
    state = {n: tensor for n, tensor in state.items() if n not in model.all_tied_weights_keys}
    # Random weights have no files, and so nothing beside the language model.
    whole = multimodal if base.init == "weights" else None
    others = ((key, changed.get(key, tensor)) for key, tensor in other_weights(model, base))
    note = save_model(model, state.items(), out_folder, multimodal=whole, others=others)
    save_for_generation(out_folder, tokenizer, base.path)
    notes = [note] if note else []
    if base.base != "none":
        again, moved = rounding_of_merge(build_meta(base, config), state, base, seed, base.base)
        notes.append(
            f"the adapter has moved the matrices of model.base by {moved:.2%} of their norm; to "
            f"store the merged ones as {base.base} again would move them by {again:.2%}"
        )
    return notes


def _check_untied(
    adapter: AdapterFolder, base: Model, model: PreTrainedModel, multimodal: Multimodal | None
) -> None:
    """Raise UserError where an adapter changes one of two tied weights: a merge has only one."""
    tied = {name for pair in model.all_tied_weights_keys.items() for name in pair}
    changed = [f"{module}.weight" for module in adapter.factors]
    changed += [key.removeprefix(PREFIX) for key in adapter.others]
    for name in changed:
        inside = None if multimodal is None else multimodal.text_name(name)
        if (inside or name) in tied:
            raise UserError(
                f"{adapter.path}: changes {name}, which {base.path} ties to another weight, and a "
                "merged model has one weight for both; load the adapter as it is (--for peft)"
            )


def check_writable(out: Path) -> None:
    """Raise UserError unless a folder can be written here and nothing is in it."""
    existing = next(path for path in (out.absolute(), *out.absolute().parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        reason = "no write permission" if existing.is_dir() else "not a folder"
        raise UserError(f"{out}: cannot be written ({existing}: {reason}); give another place")
    if out.exists() and any(out.iterdir()):
        raise UserError(f"{out} is there already and not an empty folder; give another place")


def short_targets(paths: list[str], all_names: Iterable[str], layers: str) -> list[str]:
    """Return targets for PEFT's config: an end of names where all that have it are meant.

    PEFT matches a target with the end of a name, so that one target stands for all layers.
    `all_names` are those of the class that it will see, `layers` its path to the layers.
    """
    all_names, wanted = list(all_names), set(paths)
    short: dict[str, None] = {}
    for path in paths:
        end = path.removeprefix(f"{layers}.").partition(".")[2]
        is_in_layer = path.startswith(f"{layers}.")
        complete = all(name in wanted for name in all_names if name.endswith(f".{end}"))
        short[end if is_in_layer and complete else path] = None
    return list(short)


def _file_key(name: str) -> str:
    for wrapper in (".modules_to_save.default.", ".default."):
        name = name.replace(wrapper, ".")
    return PREFIX + as_in_file(name)
