"""Base weights in safetensors files: where they lie, and their values under a model's names."""

import copy
import re
import sys
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import PretrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from shardwise.config import UserError
from shardwise.kernels.quantised import Format
from shardwise.models.published import entries_in, plain_keys
from shardwise.models.quantised_entry import QuantisedEntry
from shardwise.models.weight_folder import files_by_key, weight_folder

PLAIN = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""Dtypes whose numbers are the weights; integers and float8 need scales beside them."""

TextName = Callable[[str], str | None]
"""Function from a name in a class to that in the language model's own; None for other parts."""
_BESIDE = (r"rotary_emb\.inv_freq", r"(^|\.)mtp(_\w+)?\.")
"""Names of entries that a class may lack: what it computes, and layers for several tokens."""


def first_dtype(path: str) -> torch.dtype | None:
    """Return the dtype of the first entry of a model folder or hub id that is floating-point."""
    files = files_by_key(weight_folder(path))
    file = min(files.values())
    with ExitStack() as stack:
        read = _Reader(stack, files, {})
        tensors = (read.stored(key) for key in files if files[key] == file)
        return next((tensor.dtype for tensor in tensors if tensor.is_floating_point()), None)


@dataclass
class OwnCodes:
    """Codes and scales of a folder that is quantised in `form`, of the matrix yielded last."""

    form: Format
    wanted: Container[str] = ()
    """Names of matrices of which nothing else is wanted: what is yielded of them is on meta."""
    tensors: Mapping[str, torch.Tensor] | None = None
    """The tensors as `kernels.quantised` has them, with the dims of the parameter; None where the
    matrix is not quantised so."""
    is_own: bool = False
    """Whether the matrix is quantised so, in blocks of any size."""
    is_of_all: bool = False
    """Whether the folder is quantised so, so that a matrix that is not would be rounded."""

    def check(self, name: str) -> None:
        """Raise UserError where a matrix that the folder has in full would be rounded."""
        if self.is_of_all and not self.is_own:
            raise UserError(
                f"{name} is in full in a folder whose quantization_config does not say so, and "
                f"model.base would round it; leave model.base out, or name it there"
            )

    def of(self, name: str) -> Mapping[str, torch.Tensor] | None:
        """Return the tensors; UserError where the matrix has some that no run keeps, or none."""
        self.check(name)
        if self.is_own and self.tensors is None:
            raise UserError(
                f"{name} is in blocks that no run stores, and would be rounded once more; leave "
                "model.base out, or train on plain weights (shardwise export --copy)"
            )
        return self.tensors


def check_quantised(folder: Path, section: Mapping[str, Any]) -> None:
    """Raise UserError unless each quantised weight in the files has its scales; reads headers."""
    entries_in(files_by_key(folder), section)


def weights_from_files(
    skeleton: PreTrainedModel,
    path: str,
    wanted: Container[str] | None,
    own: OwnCodes | None = None,
    text_name: TextName = str,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (transformers name, full CPU tensor) from a model folder or hub id: see `load.weights`.

    `skeleton`: the model on meta, or a multimodal one, whose language model is yielded. Unless
    transformers converts a tensor, it has the file's dtype; a quantised one is float32.
    """
    in_files = files_by_key(weight_folder(path))
    files, entries = plain_keys(in_files, skeleton, path)
    state = skeleton.state_dict()
    tied = skeleton.all_tied_weights_keys
    sources = _sources(skeleton, state, files, path, text_name)

    def is_wanted(name: str) -> bool:
        inside = text_name(tied.get(name, name))
        return inside is not None and (wanted is None or inside in wanted)

    with ExitStack() as stack:
        read = _Reader(stack, in_files | files, entries)
        for first, source in sources.items():
            if not any(is_wanted(name) for name in source.targets(first)):
                continue
            if first in tied and tied[first] in sources:
                _check_equal(read, sources[first], sources[tied[first]], first, tied[first], path)
                continue
            codes = {} if own is None else _own_codes(skeleton, first, source, read, path, own)
            if (
                own is not None
                and codes
                and all(str(text_name(name)) in own.wanted for name in codes)
            ):
                tensors = {name: state[name] for name in codes}
            else:
                tensors = _convert(skeleton, state[first].dtype, first, source, read, path)
            for name, tensor in tensors.items():
                if tensor.shape != state[name].shape:
                    raise UserError(
                        f"{path}: {name} has the shape {list(tensor.shape)} (from "
                        f"{source.keys[0][0]}), but by config.json it is "
                        f"{list(state[name].shape)}; the config does not belong to these weights"
                    )
                if is_wanted(name):
                    if own is not None:
                        own.tensors, own.is_own = codes.get(name), _is_own(source, read, own)
                    yield str(text_name(tied.get(name, name))), tensor.contiguous()


def other_keys(skeleton: PreTrainedModel, text_name: TextName, path: str) -> list[str]:
    """Return the keys of entries in the files that the language model on meta is not made of.

    These are layers that predict several tokens, the vision tower of a multimodal folder, and
    others.
    """
    files, _ = plain_keys(files_by_key(weight_folder(path)), skeleton, path)
    sources = _sources(skeleton, skeleton.state_dict(), files, path, text_name)
    inside = [source for name, source in sources.items() if text_name(name) is not None]
    return sorted(files.keys() - {key for source in inside for key, _ in source.keys})


def in_words(keys: list[str], model: PreTrainedModel) -> str:
    """Return the words for entries that a model does not load, such as "3 tensors that X ..."."""
    # Of `model.layers.46.mlp.up_proj.weight` a reader wants `model.layers.46`, of `mtp.fc` `mtp`.
    places = [re.match(r"(model\.)?[^.]+(\.\d+(?=\.))?", key) for key in keys]
    short = list(dict.fromkeys(key if p is None else p[0] for key, p in zip(keys, places)))
    return (
        f"{len(keys)} tensors that {type(model).__name__} does not load ({', '.join(short[:3])}"
        f"{', ...' * (len(short) > 3)})"
    )


def other_entries(
    skeleton: PreTrainedModel, text_name: TextName, path: str
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (key, tensor) of `other_keys` as stored, quantised ones in the dtype of the config."""
    in_files = files_by_key(weight_folder(path))
    files, entries = plain_keys(in_files, skeleton, path)
    with ExitStack() as stack:
        read = _Reader(stack, in_files | files, entries)
        for key in other_keys(skeleton, text_name, path):
            yield key, read(key).to(skeleton.dtype) if key in entries else read(key)


@dataclass(frozen=True)
class _Source:
    """Source of one entry of the model."""

    keys: tuple[tuple[str, str], ...]
    """Keys of the files, each with the converter's pattern that it matches."""
    converter: WeightConverter | None
    """None: the one key's tensor is the entry."""

    def targets(self, name: str) -> list[str]:
        """Return the entries that come out of the conversion whose first one is `name`."""
        if self.converter is None:
            return [name]
        first, *others = self.converter.target_patterns
        return [name, *(name.replace(first, other) for other in others)]


def _sources(
    skeleton: PreTrainedModel,
    state: dict[str, torch.Tensor],
    files: dict[str, Path],
    path: str,
    text_name: TextName,
) -> dict[str, _Source]:
    # transformers' own rules for names and layouts that differ between a checkpoint and the module:
    # a key is renamed, then at most one converter collects it, with others, under the name of the
    # converter's first target.
    transforms = get_model_conversion_mapping(skeleton)
    renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
    converters = [t for t in transforms if isinstance(t, WeightConverter)]
    by_pattern = {pattern: c for c in converters for pattern in c.source_patterns}
    ignored = [*(skeleton._keys_to_ignore_on_load_unexpected or ()), *_BESIDE]
    past = _layers_past_the_last(skeleton)
    sources: dict[str, _Source] = {}
    unexpected: list[str] = []
    for key in sorted(files, key=dot_natural_key):
        name, pattern = rename_source_key(
            key, renamings, converters, skeleton.base_model_prefix, state
        )
        if name not in state and key in state:
            name, pattern = key, None
        if name not in state:
            is_inside = text_name(name) is not None
            if is_inside and not (past(key) or any(re.search(rule, name) for rule in ignored)):
                unexpected.append(key)
            continue
        converter = None if pattern is None else by_pattern[pattern]
        keys = sources[name].keys if name in sources else ()
        sources[name] = _Source((*keys, (key, pattern or key)), converter)
    provided = {target for name, source in sources.items() for target in source.targets(name)}
    tied = skeleton.all_tied_weights_keys
    provided |= {other for name, other in tied.items() if name in provided}
    inside = [name for name in state if text_name(name) is not None]
    missing = [name for name in inside if name not in provided and name not in tied]
    reason = "config.json does not belong to these weights"
    _check_none(path, missing, "without weights in the files", reason)
    if unexpected and all(past(key, sys.maxsize) for key in unexpected):
        reason = (
            f"num_hidden_layers of config.json is {_text(skeleton).num_hidden_layers}; if layers "
            "after these predict further tokens, give their number there (num_nextn_predict_layers)"
        )
    _check_none(path, unexpected, "that the model has no place for", reason)
    return sources


def _layers_past_the_last(skeleton: PreTrainedModel) -> Callable[..., bool]:
    """Return whether a key is of one of the layers that predict several tokens, by default as many
    as the config has, which are counted on from the last one.
    """
    config = _text(skeleton)
    first = getattr(config, "num_hidden_layers", 0)
    listed = getattr(config, "num_nextn_predict_layers", None) or 0

    def is_past(key: str, num: int = listed) -> bool:
        index = re.search(r"(?:^|\.)layers\.(\d{1,9})\.", key)
        return index is not None and first <= int(index[1]) < first + num

    return is_past


def _text(skeleton: PreTrainedModel) -> PretrainedConfig:
    return skeleton.config.get_text_config()


def _check_none(path: str, names: list[str], what: str, reason: str) -> None:
    if names:
        raise UserError(
            f"{path}: {len(names)} entries {what}, such as {', '.join(names[:3])}; {reason}"
        )


class _Reader:
    """Reads tensors by key; a file is opened with its first key, and closed with the stack."""

    def __init__(
        self, stack: ExitStack, files: dict[str, Path], entries: dict[str, QuantisedEntry]
    ) -> None:
        self._stack, self._files, self.entries = stack, files, entries
        self._opened: dict[Path, Any] = {}

    def __call__(self, key: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return the tensor of a key, in the file's dtype; it is mapped from the file.

        A quantised one is new memory, float32. UserError if it cannot be read, or cannot stand for
        numbers of `dtype`, where one is given.
        """
        if key in self.entries:
            return self.entries[key].values(self.stored)
        tensor = self.stored(key)
        if dtype is not None and dtype.is_floating_point:
            _check_plain(self._files[key], key, tensor.dtype)
        return tensor

    def stored(self, key: str) -> torch.Tensor:
        """Return a tensor as it is in the file."""
        file = self._files[key]
        try:
            if file not in self._opened:
                self._opened[file] = self._stack.enter_context(safe_open(file, framework="pt"))
            return self._opened[file].get_tensor(key)
        except (SafetensorError, OSError) as error:
            raise UserError(
                f"{file}: cannot read {key} ({str(error)[:200]}); fetch the file again"
            ) from None


def _own_codes(
    skeleton: PreTrainedModel, name: str, source: _Source, read: _Reader, path: str, own: OwnCodes
) -> dict[str, dict[str, torch.Tensor]]:
    """Return the codes and scales of what a source gives, by name: they are converted as the values
    are.
    """
    if not _is_own(source, read, own):
        return {}
    stored = {key: read.entries[key].stored(read.stored) for key, _ in source.keys}
    codes: dict[str, dict[str, torch.Tensor]] = {}
    for part in next(iter(stored.values())) or ():
        parts = {key: tensors[part] for key, tensors in stored.items() if tensors is not None}
        if len(parts) < len(stored):
            return {}
        if part == "groups":
            if len(parts) > 1:
                raise UserError(
                    f"{path}: {name} is made of several matrices, each with an order of its inputs "
                    "(desc_act), which no run stores; leave model.base out"
                )
            codes[name][part] = next(iter(parts.values()))
            continue
        dtype = next(iter(parts.values())).dtype
        converted = _convert(skeleton, dtype, name, source, lambda key, _, p=parts: p[key], path)
        for target, tensor in converted.items():
            codes.setdefault(target, {})[part] = tensor
    return codes


def _is_own(source: _Source, read: _Reader, own: OwnCodes) -> bool:
    entries = [read.entries.get(key) for key, _ in source.keys]
    return all(entry is not None and entry.form == own.form for entry in entries)


def _convert(
    skeleton: PreTrainedModel,
    dtype: torch.dtype,
    name: str,
    source: _Source,
    read: Callable[[str, torch.dtype], Any],
    path: str,
) -> dict[str, torch.Tensor]:
    """Return the entries that one source gives, by name."""
    if source.converter is None:
        (key, _), *more = source.keys
        if more:
            raise UserError(f"{path}: {key} and {more[0][0]} are both {name}; remove one of them")
        return {name: read(key, dtype)}  # a cast here would take memory for all of it
    # A converter collects what reads its tensors, so each name has its own.
    converter: Any = copy.deepcopy(source.converter)
    entries = read.entries if isinstance(read, _Reader) else {}
    # Values of quantised ones stay in float32, so that they can be stored as they were.
    as_dtype = torch.float32 if any(key in entries for key, _ in source.keys) else dtype
    for key, pattern in source.keys:
        converter.add_tensor(name, key, pattern, lambda key=key: read(key, dtype).to(as_dtype))
    try:
        converted = converter.convert(name, model=skeleton, config=skeleton.config)
    except UserError:
        raise
    except (RuntimeError, ValueError, KeyError) as error:
        keys = ", ".join(key for key, _ in source.keys[:3])
        raise UserError(
            f"{path}: cannot make {name} from {keys}, ... ({str(error)[:200]})"
        ) from None
    return {
        target: value[0] if isinstance(value, list) else value
        for target, value in converted.items()
    }


def _check_equal(
    read: _Reader, one: _Source, other: _Source, name: str, tied_to: str, path: str
) -> None:
    first, second = (read(source.keys[0][0], torch.float32) for source in (one, other))
    if not torch.equal(first, second):
        raise UserError(
            f"{path}: {name} and {tied_to} differ in the files, but config.json ties them; "
            "set tie_word_embeddings to false there"
        )


def _check_plain(file: Path, key: str, dtype: torch.dtype) -> None:
    if dtype not in PLAIN:
        raise UserError(
            f"{file}: {key} is {str(dtype).removeprefix('torch.')}, which are no plain weights; "
            "give the model's weights in bfloat16, float16 or float32"
        )
