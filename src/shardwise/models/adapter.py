"""Adapters on disk: in PEFT's format, and merged into the weights."""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from peft import PeftModel
from peft.utils import CONFIG_NAME, SAFETENSORS_WEIGHTS_NAME, get_peft_model_state_dict
from safetensors import SafetensorError
from safetensors.torch import save_file
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.pytorch_utils import Conv1D

from shardwise.config import Lora, Model, UserError
from shardwise.models.families import Family, family_of
from shardwise.models.load import load_whole, plain_entries, read_config
from shardwise.models.lora import adapter_layers, peft_config
from shardwise.models.names import hf_name, is_adapter, is_saved_copy
from shardwise.models.save import save_for_generation, save_model


def save_adapter(
    model: PreTrainedModel,
    lora: Lora,
    state: Mapping[str, torch.Tensor],
    folder: str | Path,
    base_name: str,
) -> None:
    """Write the adapters so that `peft` alone loads them onto the model that `transformers` alone loads.

    `state`: the model's trainable parameters (LoRA factors and copies of modules to save) by name, full CPU tensors. Of
    `model`, which has the adapters, only names are used. `base_name`: where PEFT finds the base model.

    PEFT renames, by model type, targets that look like a checkpoint's per-expert matrices, and so loses linears of MLPs
    (`Family.renamed_by_peft`). Those are listed as parameters (`....weight`) instead of modules, which gives the same
    factors under the same names; PEFT then computes W + BA rather than Wx + BAx, and can't have dropout in the config.
    """
    family = family_of(model)
    names = [
        name for name, _ in model.named_parameters() if is_adapter(name) or is_saved_copy(name)
    ]
    assert state.keys() == set(names), (
        f"not the adapters of this model: {sorted(state.keys() ^ set(names))[:5]}"
    )
    everything = {hf_name(name) for name, _ in model.named_parameters() if not is_adapter(name)}
    modules: list[str] = []
    parameters: list[str] = []
    layers = adapter_layers(model)
    for path in layers:
        if path in everything:
            parameters.append(path)
        elif path.rpartition(".")[2] in family.renamed_by_peft:
            parameters.append(f"{path}.weight")
        else:
            modules.append(path)
    saved = dict.fromkeys(
        hf_name(name.partition(".modules_to_save.")[0]) for name in names if is_saved_copy(name)
    )
    config = peft_config(
        dataclasses.replace(lora, dropout=0.0 if parameters else lora.dropout),
        modules=_short(modules, {name.rpartition(".")[0] for name in everything}, family),
        parameters=_short(parameters, everything, family),
        saved=list(saved),
        transposed=any(isinstance(layer.get_base_layer(), Conv1D) for layer in layers.values()),
    )
    config.base_model_name_or_path = base_name
    config.inference_mode = True
    for key, value in vars(config).items():
        if isinstance(
            value, set
        ):  # PEFT writes a set in an order that differs from process to process
            setattr(config, key, sorted(value))
    folder = Path(folder)
    config.save_pretrained(str(folder))
    tensors = {_file_key(name): tensor.contiguous() for name, tensor in state.items()}
    save_file(tensors, folder / SAFETENSORS_WEIGHTS_NAME, metadata={"format": "pt"})


def merge_adapter(
    base: Model,
    adapter_folder: str | Path,
    out_folder: str | Path,
    seed: int = 0,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> None:
    """Write the model with the adapters added into its weights (W + scale * BA), for `transformers` alone to load.

    Beside it stand the `tokenizer` and the base's generation config.

    `seed` is for a base with `init: random`. The whole model is in memory. UserError if the folder holds no adapters or
    those of another model.
    """
    folder, out = Path(adapter_folder), Path(out_folder)
    for name in (CONFIG_NAME, SAFETENSORS_WEIGHTS_NAME):
        if not (folder / name).is_file():
            raise UserError(f"{folder}: no {name} here; give the folder of a PEFT adapter")
    place = next(path for path in (out.absolute(), *out.absolute().parents) if os.path.exists(path))
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        reason = "no write permission" if place.is_dir() else "not a folder"
        raise UserError(
            f"{out}: cannot be written ({place}: {reason}); give another place for the merged model"
        )
    if out.exists() and any(out.iterdir()):
        raise UserError(
            f"{out} is there already and not an empty folder; give another place for the merged model"
        )
    config = read_config(base)
    if config.dtype in (torch.float32, torch.bfloat16):  # the merged model is stored as its base is
        base = dataclasses.replace(base, dtype=str(config.dtype).removeprefix("torch."))
    found = plain_entries(folder / SAFETENSORS_WEIGHTS_NAME)
    model = load_whole(base, config, seed)
    family_of(model)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore", FutureWarning
            )  # PEFT 0.21 asks transformers by a name it is giving up
            warnings.simplefilter(
                "ignore", UserWarning
            )  # of missing keys: checked here, and said in one line
            adapted = PeftModel.from_pretrained(model, str(folder))
    except (KeyError, TypeError, ValueError, RuntimeError, SafetensorError) as error:
        raise UserError(
            f"{folder}: these adapters do not fit {base.path} ({str(error)[:200]})"
        ) from None
    wanted = set(get_peft_model_state_dict(adapted, save_embedding_layers=False))
    if found != wanted:
        raise UserError(
            f"{folder}: these adapters do not fit {base.path} ({len(wanted - found)} of its adapted weights are not in "
            f"the file, {len(found - wanted)} in the file are not in it; {min(found ^ wanted)})"
        )
    merged = adapted.merge_and_unload()
    state = {
        name: tensor
        for name, tensor in merged.state_dict().items()
        if name not in merged.all_tied_weights_keys
    }
    save_model(merged, state.items(), out_folder)
    save_for_generation(out_folder, tokenizer, base.path)


def _short(paths: list[str], everything: Iterable[str], family: Family) -> list[str]:
    # PEFT takes a target for the end of a name, so one per place in a layer will do where all layers have it.
    short: dict[str, None] = {}
    for path in paths:
        end = path.removeprefix(f"{family.layers}.").partition(".")[2]
        complete = all(name in paths for name in everything if name.endswith(f".{end}"))
        short[end if complete else path] = None
    return list(short)


def _file_key(name: str) -> str:
    return "base_model.model." + name.replace(".modules_to_save.default.", ".").replace(
        ".default.", "."
    )
