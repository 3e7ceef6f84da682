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
from shardwise.models.load import load_whole, read_config
from shardwise.models.lora import adapter_layers, peft_config
from shardwise.models.names import hf_name, is_adapter, is_saved_copy
from shardwise.models.save import save_for_generation, save_model
from shardwise.models.weight_files import plain_entries


def save_adapter(
    model: PreTrainedModel,
    lora: Lora,
    state: Mapping[str, torch.Tensor],
    folder: str | Path,
    base_name: str,
) -> None:
    """Write the adapters so that `peft` alone loads them onto the model that `transformers` loads.

    `state`: the model's trainable parameters (LoRA factors and copies of modules to save) by name,
    full CPU tensors. Of `model`, which has the adapters, only names are used. `base_name`: where
    PEFT finds the base model.

    PEFT renames, by model type, targets that look like a checkpoint's per-expert matrices, and so
    loses linears of MLPs (`Family.renamed_by_peft`). Those are listed as parameters (`....weight`)
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
    base_names = {hf_name(name) for name, _ in model.named_parameters() if not is_adapter(name)}
    modules: list[str] = []
    parameters: list[str] = []
    layers = adapter_layers(model)
    for path in layers:
        if path in base_names:
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
        modules=_short(modules, {name.rpartition(".")[0] for name in base_names}, family),
        parameters=_short(parameters, base_names, family),
        saved=list(saved),
        transposed=any(isinstance(layer.get_base_layer(), Conv1D) for layer in layers.values()),
    )
    config.base_model_name_or_path = base_name
    config.inference_mode = True
    for key, value in vars(config).items():
        if isinstance(value, set):  # whose order in the file would differ between processes
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
    """Write the model with the adapters added into its weights: W + scale * BA.

    `transformers` alone loads it. Beside it stand the `tokenizer` and the base's generation config.
    `seed` is for a base with `init: random`. All of the model is in memory. UserError if the folder
    holds no adapters, or those of another model.
    """
    folder, out = Path(adapter_folder), Path(out_folder)
    for name in (CONFIG_NAME, SAFETENSORS_WEIGHTS_NAME):
        if not (folder / name).is_file():
            raise UserError(f"{folder}: no {name} here; give the folder of a PEFT adapter")
    _check_writable(out)
    config = read_config(base)
    if config.dtype in (torch.float32, torch.bfloat16):  # the merged model is stored as its base is
        base = dataclasses.replace(base, dtype=str(config.dtype).removeprefix("torch."))
    in_file = plain_entries(folder / SAFETENSORS_WEIGHTS_NAME)
    model = load_whole(base, config, seed)
    family_of(model)
    try:
        with warnings.catch_warnings():
            # PEFT 0.21 uses a name that transformers will drop.
            warnings.simplefilter("ignore", FutureWarning)
            # Of missing keys, which are checked below.
            warnings.simplefilter("ignore", UserWarning)
            adapted = PeftModel.from_pretrained(model, str(folder))
    except (KeyError, TypeError, ValueError, RuntimeError, SafetensorError) as error:
        raise UserError(
            f"{folder}: these adapters do not fit {base.path} ({str(error)[:200]})"
        ) from None
    adapted_names = set(get_peft_model_state_dict(adapted, save_embedding_layers=False))
    if in_file != adapted_names:
        raise UserError(
            f"{folder}: these adapters do not fit {base.path} "
            f"({len(adapted_names - in_file)} of its adapted weights are not in the file, "
            f"{len(in_file - adapted_names)} in the file are not in it; "
            f"{min(in_file ^ adapted_names)})"
        )
    merged = adapted.merge_and_unload()
    state = {
        name: tensor
        for name, tensor in merged.state_dict().items()
        if name not in merged.all_tied_weights_keys
    }
    save_model(merged, state.items(), out_folder)
    save_for_generation(out_folder, tokenizer, base.path)


def _check_writable(out: Path) -> None:
    existing = next(path for path in (out.absolute(), *out.absolute().parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        reason = "no write permission" if existing.is_dir() else "not a folder"
        raise UserError(
            f"{out}: cannot be written ({existing}: {reason}); give another place for the merged "
            "model"
        )
    if out.exists() and any(out.iterdir()):
        raise UserError(
            f"{out} is there already and not an empty folder; give another place for the merged "
            "model"
        )


def _short(paths: list[str], all_names: Iterable[str], family: Family) -> list[str]:
    # PEFT matches a target with the end of a name: one target stands for all layers that have it.
    short: dict[str, None] = {}
    for path in paths:
        end = path.removeprefix(f"{family.layers}.").partition(".")[2]
        complete = all(name in paths for name in all_names if name.endswith(f".{end}"))
        short[end if complete else path] = None
    return list(short)


def _file_key(name: str) -> str:
    for wrapper in (".modules_to_save.default.", ".default."):
        name = name.replace(wrapper, ".")
    return f"base_model.model.{name}"
