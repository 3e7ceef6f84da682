"""A model folder with the values that `model.base` stores."""

from pathlib import Path

from shardwise.config import Model, require
from shardwise.kernels.quantised import Format
from shardwise.models.adapters.writing import check_writable
from shardwise.models.families import FAMILIES, spec_of
from shardwise.models.load import build_meta, in_own_dtype, other_weights, read_config
from shardwise.models.multimodal import multimodal_of
from shardwise.models.published import base_of
from shardwise.models.quantise import check_blocks, read_back, stored_paths
from shardwise.models.save import save_for_generation, save_model


def copy_model(model: Model, fmt: Format, out_folder: str | Path) -> list[str]:
    """Write a model whose matrices have the values that this `model.base` stores, in its own dtype.

    Of a folder that is quantised so they are its own. One parameter at a time is in memory.
    Training on this folder computes what a run on the model with that `model.base` computes. Return
    notes for the user. UserError where no run stores the model so, or nothing can be written.
    """
    check_writable(Path(out_folder))
    config = read_config(model)
    model = in_own_dtype(model, config)
    hf = build_meta(model, config)
    multimodal = multimodal_of(model, hf)
    form = base_of(config)
    if form != fmt:
        spec = spec_of(config, hf)
        require(
            spec.family in FAMILIES,
            f"--copy {fmt}: {spec.family} is not listed, and no run "
            "stores such a model so; `shardwise models` lists families",
        )
        for name in stored_paths(hf, spec, fmt):
            check_blocks(hf, name, fmt)
    entries = read_back(hf, model, 0, fmt)
    others = other_weights(hf, model)
    note = save_model(hf, entries, out_folder, multimodal=multimodal, others=others)
    save_for_generation(Path(out_folder), None, model.path)
    notes = [] if note is None else [note]
    if form not in (None, fmt):
        notes.append(f"the folder's matrices are in {form}, and here rounded once more to {fmt}")
    return notes
