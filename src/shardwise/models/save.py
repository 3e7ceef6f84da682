"""Write a model in Hugging Face format: safetensors, config and generation config."""

import copy
import json
import shutil
import stat
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    apply_converters,
    revert_weight_conversion,
)
from transformers.utils import (
    GENERATION_CONFIG_NAME,
    IMAGE_PROCESSOR_NAME,
    PROCESSOR_NAME,
    VIDEO_PROCESSOR_NAME,
    cached_file,
)

from shardwise.config import UserError
from shardwise.models.multimodal import Multimodal
from shardwise.models.names import hf_name, is_adapter
from shardwise.models.published import method_of
from shardwise.models.weight_files import in_words
from shardwise.models.weight_folder import INDEX

SHARD_BYTES = 5 * 2**30
_COPIED = (GENERATION_CONFIG_NAME, PROCESSOR_NAME, IMAGE_PROCESSOR_NAME, VIDEO_PROCESSOR_NAME)


def save_model(
    hf_model: PreTrainedModel,
    state: Iterable[tuple[str, torch.Tensor]],
    folder: str | Path,
    shard_bytes: int = SHARD_BYTES,
    multimodal: Multimodal | None = None,
    others: Iterable[tuple[str, torch.Tensor]] = (),
) -> str | None:
    """Write `state` so that `transformers` alone loads it from `folder`.

    `state` yields (transformers name, full CPU tensor) of every parameter, tied ones once, and
    every persistent buffer, as `load.weights` does. At most `shard_bytes` and one parameter are in
    memory at a time. Of `hf_model` the names and the config are used, so it may be on meta or
    sharded or have adapters. Weights that were in `folder` are replaced.

    `others`: (key, tensor) of all else in the base's files, which is written as it is; a line that
    names it is returned. With `multimodal` the folder is one of that class: its names, its config.
    """
    folder = Path(folder)
    saved, state = hf_model, _each_once(hf_model, state)
    if multimodal is not None:
        saved = multimodal.model
        state = ((multimodal.name_of(name), tensor) for name, tensor in state)
    entries = checkpoint_entries(saved, state)
    carried: list[str] = []
    others = ((carried.append(key), (key, tensor))[1] for key, tensor in others)
    write_shards(chain(entries, others), folder, shard_bytes)
    if multimodal is None:
        config = copy.deepcopy(hf_model.config)
        config.architectures = [type(hf_model).__name__]
        config.use_cache = True  # which build_meta turns off for training; generating needs it
    else:
        config = copy.deepcopy(multimodal.model.config)
        config.dtype = config.get_text_config().dtype = hf_model.config.dtype
    for holder in (config, config.get_text_config()):  # that of the folder that was read
        holder.__dict__.pop("quantization_config", None)
    config.save_pretrained(folder)
    if hf_model.can_generate():
        hf_model.generation_config.save_pretrained(folder)
    if not carried:
        return None
    form = ""
    if method_of(hf_model.config) is not None:
        form = f", but quantised ones in {str(hf_model.config.dtype).removeprefix('torch.')}"
    text = in_words(carried, hf_model)
    return f"{text} are carried over from the base's files as they are{form}"


def save_for_generation(
    folder: str | Path, tokenizer: PreTrainedTokenizerBase | None, base_path: str | None = None
) -> None:
    """Write beside weights what generating needs: the tokenizer with its chat template, if given.

    `base_path`: the folder or hub id of the trained model, whose generation config is copied, and
    how it prepares images, if it has them.
    """
    if tokenizer is not None:
        tokenizer.save_pretrained(str(folder))
    if base_path is not None:
        # Copied as a file: transformers refuses to write some of the configs that the hub has.
        config = Path(str(cached_file(base_path, "config.json")))
        for name in _COPIED:
            if config.with_name(name).is_file():
                shutil.copyfile(config.with_name(name), Path(folder) / name)


def checkpoint_entries(
    model: PreTrainedModel, state: Iterable[tuple[str, torch.Tensor]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (key, tensor) of a checkpoint of `model` for each (transformers name, tensor)."""
    # One parameter at a time is converted back to the checkpoint's names and layout. That is right
    # as long as no entry of a checkpoint is made of several parameters: some of towers are.
    joining = [
        joined
        for transform in get_model_conversion_mapping(model, add_legacy=False)
        if len(transform.target_patterns) > 1
        and isinstance(joined := transform.reverse_transform(), WeightConverter)
    ]
    for name, tensor in state:
        if apply_converters(name, joining)[1] is not None:
            raise UserError(
                f"{name} is one of several parts of an entry in the files of {type(model).__name__}"
                ", of which no part is written alone; leave it as it is in the base"
            )
        yield from revert_weight_conversion(model, {name: tensor}).items()


def _each_once(
    hf_model: PreTrainedModel, state: Iterable[tuple[str, torch.Tensor]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield `state`; an assert fails unless it has every parameter and persistent buffer once."""
    names = [name for name in hf_model.state_dict() if not is_adapter(name)]
    expected = {hf_name(name) for name in names} - hf_model.all_tied_weights_keys.keys()
    for name, tensor in state:
        assert name in expected, f"{name} is given twice, tied to another or not of this model"
        expected.remove(name)
        yield name, tensor
    assert not expected, f"no value for {sorted(expected)[:5]}"


def write_tensors(tensors: dict[str, torch.Tensor], path: Path) -> None:
    """Write a safetensors file with the permissions of any new file, by the process's umask.

    safetensors itself lets nobody else read it.
    """
    path.touch()
    mode = path.stat().st_mode
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(stat.S_IMODE(mode))


def write_shards(
    entries: Iterable[tuple[str, torch.Tensor]], folder: Path, shard_bytes: int = SHARD_BYTES
) -> None:
    """Write (name, full CPU tensor) to safetensors files of at most `shard_bytes` each.

    The folder is made, or its weights are replaced; `model.safetensors` is the only file, or there
    is an index.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for old in [*folder.glob("model*.safetensors"), folder / INDEX]:
        old.unlink(missing_ok=True)
    shards: list[Path] = []
    shard_of: dict[str, int] = {}
    total_bytes, pending_bytes = 0, 0
    pending: dict[str, torch.Tensor] = {}

    def flush() -> None:
        shards.append(folder / f"model-part-{len(shards) + 1:05d}.safetensors")
        write_tensors(pending, shards[-1])
        pending.clear()

    for key, tensor in entries:
        if pending and pending_bytes + tensor.nbytes > shard_bytes:
            flush()
            pending_bytes = 0
        assert key not in shard_of, f"{key} is written twice"
        pending[key] = tensor.contiguous()
        shard_of[key] = len(shards)
        pending_bytes += tensor.nbytes
        total_bytes += tensor.nbytes
    flush()
    # transformers wants the number of shards in their names, and it is known only now.
    if len(shards) == 1:
        shards[0].rename(folder / "model.safetensors")
        return
    names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    for shard, name in zip(shards, names):
        shard.rename(folder / name)
    index = {
        "metadata": {"total_size": total_bytes},
        "weight_map": {key: names[i] for key, i in shard_of.items()},
    }
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
