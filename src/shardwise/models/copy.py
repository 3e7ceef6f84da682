"""A model folder with the values that `model.base` stores."""

from __future__ import annotations

from pathlib import Path

from shardwise.config import Model
from shardwise.kernels.quantised import Format
from shardwise.models.adapter import check_writable
from shardwise.models.load import build_meta, in_own_dtype, other_weights, read_config
from shardwise.models.multimodal import multimodal_of
from shardwise.models.quantise import read_back
from shardwise.models.save import save_for_generation, save_model


def copy_model(model: Model, fmt: Format, out_folder: str | Path, seed: int = 0) -> list[str]:
    """Write a model whose matrices have the values that this `model.base` stores, in its own dtype.

    One parameter at a time is in memory. Training on this folder computes what a run on the model
    with that `model.base` computes. Return notes for the user. UserError where the folder cannot be
    written.
    """
    check_writable(Path(out_folder))
    config = read_config(model)
    model = in_own_dtype(model, config)
    hf = build_meta(model, config)
    multimodal = multimodal_of(model, hf)
    entries = read_back(hf, model, seed, fmt)
    others = other_weights(hf, model)
    note = save_model(hf, entries, out_folder, multimodal=multimodal, others=others)
    save_for_generation(Path(out_folder), None, model.path)
    return [note] if note else []
