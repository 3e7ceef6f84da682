"""From a model folder or hub id to a transformers model: its config, its modules on meta, its weights one by one."""

from __future__ import annotations

import copy
import functools
import hashlib
import json
import re
from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)
from transformers.initialization import no_init_weights
from transformers.utils import cached_file

from shardwise.config import Model, UserError
from shardwise.models.hub import ask_hub
from shardwise.models.initialise import initialise_buffers, random_weights
from shardwise.models.names import hf_name, is_adapter
from shardwise.models.notices import quiet_notices
from shardwise.models.sizes import check_parameters, check_read, check_written

INDEX = "model.safetensors.index.json"
PLAIN = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""Dtypes whose numbers are the weights themselves; integers and float8 stand for them only with scales."""


def read_config(model: Model) -> PretrainedConfig:
    """Read `config.json` of a local folder or hub id; UserError if there is none or transformers cannot use it.

    Of a multimodal config the language model's part is returned.
    """
    folder = Path(model.path)
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise UserError(
            f"{folder}: no config.json here; model.path is a folder with one, or a hub id"
        )
    if not folder.is_dir() and (
        folder.is_absolute() or model.path.startswith(".") or model.path.count("/") > 1
    ):
        raise UserError(
            f"{folder}: no such folder; model.path is a folder with a config.json, or a hub id"
        )
    ask_hub(model.path, "config.json")
    if model.tokenizer is not None:  # read by others, who would find out later
        ask_hub(model.tokenizer, "tokenizer_config.json")
    quiet_notices()
    try:
        check_written(model.path, PretrainedConfig.get_config_dict(model.path)[0])
        config = AutoConfig.from_pretrained(model.path, trust_remote_code=model.trust_remote_code)
    except UserError:
        raise
    except RecursionError:
        raise UserError(
            f"{model.path}: config.json is nested too deep to be read; fetch the file again"
        ) from None
    except (
        OSError,
        ValueError,
        TypeError,
        KeyError,
        AttributeError,
        ArithmeticError,
        StrictDataclassError,
    ) as error:
        if "trust_remote_code" in str(error):
            hint = "it comes with Python code of its own; set model.trust_remote_code to true if you trust that"
            raise UserError(f"{model.path}: {hint}") from None
        what = (
            "cannot read config.json"
            if folder.is_dir()
            else "no such folder, nor a model that the hub hands out"
        )
        raise UserError(f"{model.path}: {what} ({str(error)[:200]})") from None
    if getattr(config, "quantization_config", None):
        raise UserError(
            f"{model.path}: the weights are quantised; give a model folder with plain weights"
        )
    text_config = config.get_text_config()
    if not model.trust_remote_code:
        check_read(model.path, text_config)
    return text_config


def check_vocabulary(config: PretrainedConfig, vocabulary: Mapping[str, int]) -> None:
    """UserError if a tokenizer's vocabulary has ids that the model has no embedding for.

    There may be more ids than tokens; under tensor parallelism an id without a row would give 0 and no error.
    """
    largest = max(vocabulary.values())
    if config.vocab_size <= largest:
        raise UserError(
            f"the tokenizer has ids up to {largest} but the model only {config.vocab_size} (config.vocab_size), "
            "counted from 0; give the tokenizer that belongs to the model (model.tokenizer)"
        )


def build_meta(model: Model, hf_config: PretrainedConfig) -> PreTrainedModel:
    """The transformers model with its parameters on meta and its buffers on the CPU with their true values.

    Parameters have `model.dtype`, but for those that the family keeps in float32. Tied parameters are one object; after
    something has replaced parameters module by module (`to_empty`), `tie_weights()` ties them again. Attention is
    torch's scaled dot product; `use_cache` is off. `hf_config` is not changed.
    """
    quiet_notices()
    config = copy.deepcopy(hf_config)
    config.use_cache = False
    dtype = getattr(torch, model.dtype)
    try:
        with torch.device("meta"), no_init_weights():
            built = AutoModelForCausalLM.from_config(
                config,
                dtype=dtype,
                attn_implementation="sdpa",
                trust_remote_code=model.trust_remote_code,
            )
    except (ValueError, TypeError, KeyError, ArithmeticError, RuntimeError) as error:
        raise UserError(
            f"{model.path}: transformers cannot build a causal model of it ({str(error)[:200]})"
        ) from None
    check_parameters(model.path, sum(p.numel() for p in built.parameters()))
    for pattern, kept_dtype in built._get_dtype_plan(dtype).items():
        _cast(built, re.compile(pattern.replace("*", ".*")), kept_dtype)
    initialise_buffers(built)
    built.tie_weights()
    return built


def weights(
    hf_model: PreTrainedModel, model: Model, seed: int, wanted: Container[str] | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (transformers name, full CPU tensor) of every parameter, tied ones once, and every persistent buffer.

    From safetensors, or a function of (seed, module path) where `model.init` is `random`. In the parameter's dtype,
    but for what comes from a file as it is: that has the file's dtype, so that whoever fills a shard casts the shard
    only. One parameter at a time is in memory (while experts are stacked, up to twice their stack). Of `hf_model` only
    the config is used, so it may be sharded, a stage or have adapters. With `wanted`, only entries of these names, and
    no others are read or drawn (but for those that come out of one conversion or one module with them).
    UserError, on the first call of `next` or at the parameter in question, if the files do not fit the model.
    """
    skeleton = build_meta(model, hf_model.config)
    if model.init == "weights":
        yield from _weights_from_files(skeleton, model.path, wanted)
        return
    yield from random_weights(skeleton, seed, wanted)
    for name, tensor in skeleton.state_dict().items():
        if not tensor.is_meta and (wanted is None or name in wanted):  # a persistent buffer
            yield name, tensor


def fill(hf_model: PreTrainedModel, values: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Replace every parameter and persistent buffer of an unsharded model by `values`, and tie what is tied.

    Names are transformers names (both copies of a module in `modules_to_save` take the same value, each its own) or,
    for LoRA factors, the model's. An assert fails if a name is unknown or a parameter is left on meta.
    """
    places: dict[str, list[tuple[nn.Module, str]]] = {}
    for path, module in hf_model.named_modules(remove_duplicate=False):
        for leaf in (*module._parameters, *module._buffers):
            name = f"{path}.{leaf}" if path else leaf
            places.setdefault(name if is_adapter(name) else hf_name(name), []).append(
                (module, leaf)
            )
    for name, value in values:
        for module, leaf in places[name]:
            if leaf in module._parameters:
                grad = module.get_parameter(leaf).requires_grad
                like = module.get_parameter(leaf)
                module._parameters[leaf] = nn.Parameter(
                    value.to(like.dtype, copy=True), requires_grad=grad
                )
            else:
                module._buffers[leaf] = value.clone()
    hf_model.tie_weights()
    left = [name for name, parameter in hf_model.named_parameters() if parameter.is_meta]
    assert not left, f"no value for {left[:5]}"


def fingerprint(model: Model, weights: bool) -> dict[str, str]:
    """A checksum by file name: of `config.json`, of code that may run, and with `weights` of a sample of those files.

    The sample is the file's size, its header, and up to 4 KiB from the middle of each tensor: some MB of a model of
    100 GB, and other weights differ everywhere. Random weights need none. UserError if the files cannot be read.
    """
    if weights and model.init == "weights":
        folder = _weight_folder(model.path)
        files = sorted(set(_files_by_key(folder).values()))
    else:
        folder, files = Path(str(cached_file(model.path, "config.json"))).parent, []
    whole = [
        folder / "config.json",
        *(sorted(folder.glob("*.py")) if model.trust_remote_code else ()),
    ]
    read = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in whole}
    return {**read, **{str(file.relative_to(folder)): _sample(file) for file in files}}


def _sample(file: Path) -> str:
    _keys_in(file)  # its header is right, then
    with file.open("rb") as opened:
        begin = 8 + int.from_bytes(opened.read(8), "little")
        header = opened.read(begin - 8)
        digest = hashlib.sha256(header + str(file.stat().st_size).encode())
        for name, entry in json.loads(header).items():
            if name != "__metadata__":
                first, last = entry["data_offsets"]
                opened.seek(begin + max(first, (first + last) // 2 - 2048))
                digest.update(opened.read(min(4096, last - first)))
    return digest.hexdigest()


def load_whole(model: Model, hf_config: PretrainedConfig, seed: int = 0) -> PreTrainedModel:
    """The whole model with its weights on the CPU, in eval mode: for export and tests, not for training at scale."""
    built = build_meta(model, hf_config)
    fill(built, weights(built, model, seed))
    return built.eval()


@dataclass(frozen=True)
class _Source:
    """What one entry of the model is made of: keys of the files with the converter's patterns they match."""

    keys: tuple[tuple[str, str], ...]
    converter: WeightConverter | None  # None: the one key's tensor as it is


def _weights_from_files(
    skeleton: PreTrainedModel, path: str, wanted: Container[str] | None
) -> Iterator[tuple[str, torch.Tensor]]:
    files = _files_by_key(_weight_folder(path))
    state = skeleton.state_dict()
    tied = skeleton.all_tied_weights_keys
    sources = _plan(skeleton, state, files, path)
    with ExitStack() as stack:
        read = _Reader(stack, files)
        for first, source in sources.items():
            if wanted is not None and not any(
                tied.get(name, name) in wanted for name in _targets(first, source)
            ):
                continue
            if first in tied and tied[first] in sources:
                _check_equal(read, sources[first], sources[tied[first]], first, tied[first], path)
                continue
            for name, tensor in _convert(skeleton, state, first, source, read, path).items():
                if tensor.shape != state[name].shape:
                    raise UserError(
                        f"{path}: {name} has the shape {list(tensor.shape)} (from {source.keys[0][0]}), but by "
                        f"config.json it is {list(state[name].shape)}; the config does not belong to these weights"
                    )
                if wanted is None or tied.get(name, name) in wanted:
                    yield tied.get(name, name), tensor.contiguous()


def _plan(
    skeleton: PreTrainedModel, state: dict[str, torch.Tensor], files: dict[str, Path], path: str
) -> dict[str, _Source]:
    # transformers' own rules for names and layouts that differ between a checkpoint and the module: a key is renamed,
    # then at most one converter collects it, with others, under the name of the converter's first target.
    transforms = get_model_conversion_mapping(skeleton)
    renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
    converters = [t for t in transforms if isinstance(t, WeightConverter)]
    by_pattern = {
        pattern: converter for converter in converters for pattern in converter.source_patterns
    }
    ignored = [*(skeleton._keys_to_ignore_on_load_unexpected or ()), r"rotary_emb\.inv_freq"]
    sources: dict[str, _Source] = {}
    unexpected: list[str] = []
    for key in sorted(files, key=dot_natural_key):
        name, pattern = rename_source_key(
            key, renamings, converters, skeleton.base_model_prefix, state
        )
        if name not in state and key in state:
            name, pattern = key, None
        if name not in state:
            unexpected += [] if any(re.search(rule, name) for rule in ignored) else [key]
            continue
        converter = None if pattern is None else by_pattern[pattern]
        keys = sources[name].keys if name in sources else ()
        sources[name] = _Source((*keys, (key, pattern or key)), converter)
    found = {target for name, source in sources.items() for target in _targets(name, source)}
    found |= {other for one, other in skeleton.all_tied_weights_keys.items() if one in found}
    missing = [
        name for name in state if name not in found and name not in skeleton.all_tied_weights_keys
    ]
    for names, what in (
        (missing, "without weights in the files"),
        (unexpected, "that the model has no place for"),
    ):
        if names:
            raise UserError(
                f"{path}: {len(names)} entries {what}, such as {', '.join(names[:3])}; "
                "config.json does not belong to these weights"
            )
    return sources


def _targets(name: str, source: _Source) -> list[str]:
    if source.converter is None:
        return [name]
    first, *others = source.converter.target_patterns
    return [name, *(name.replace(first, other) for other in others)]


class _Reader:
    """Reads tensors by key; a file is opened when its first key is asked for and stays so until the stack closes."""

    def __init__(self, stack: ExitStack, files: dict[str, Path]) -> None:
        self.stack, self.files = stack, files
        self.opened: dict[Path, Any] = {}

    def __call__(self, key: str, dtype: torch.dtype) -> torch.Tensor:
        """The tensor of a key, as it is in the file: UserError if that cannot stand for numbers of `dtype`."""
        file = self.files[key]
        try:
            if file not in self.opened:
                self.opened[file] = self.stack.enter_context(safe_open(file, framework="pt"))
            tensor = self.opened[file].get_tensor(key)
        except (SafetensorError, OSError) as error:
            raise UserError(
                f"{file}: cannot read {key} ({str(error)[:200]}); fetch the file again"
            ) from None
        if dtype.is_floating_point:
            _check_plain(file, key, tensor.dtype)
        return tensor


def _convert(
    skeleton: PreTrainedModel,
    state: dict[str, torch.Tensor],
    name: str,
    source: _Source,
    read: _Reader,
    path: str,
) -> dict[str, torch.Tensor]:
    dtype = state[name].dtype
    if source.converter is None:
        (key, _), *more = source.keys
        if more:
            raise UserError(f"{path}: {key} and {more[0][0]} are both {name}; remove one of them")
        return {
            name: read(key, dtype)
        }  # mapped from the file; a cast here would take memory for the whole of it
    converter: Any = copy.deepcopy(
        source.converter
    )  # it collects what reads its tensors, so each name has its own
    for key, pattern in source.keys:
        converter.add_tensor(name, key, pattern, functools.partial(_cast_to, read, key, dtype))
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


def _cast_to(read: _Reader, key: str, dtype: torch.dtype) -> torch.Tensor:
    return read(key, dtype).to(dtype)


def _check_equal(
    read: _Reader, one: _Source, other: _Source, name: str, tied_to: str, path: str
) -> None:
    first, second = (read(source.keys[0][0], torch.float32) for source in (one, other))
    if not torch.equal(first, second):
        raise UserError(
            f"{path}: {name} and {tied_to} differ in the files, but config.json ties them; "
            "set tie_word_embeddings to false there"
        )


def plain_entries(file: Path) -> set[str]:
    """The names in a safetensors file; UserError if it cannot be read, or not all entries are plain weights."""
    names = set(_keys_in(file))
    with safe_open(file, framework="pt") as opened:
        for name in names:
            _check_plain(file, name, opened.get_tensor(name).dtype)
    return names


def fetch(model: Model) -> None:
    """Have the files that `weights` reads on this machine; UserError if the hub does not hand them out."""
    if model.init == "weights":
        _weight_folder(model.path)


def _weight_folder(path: str) -> Path:
    if Path(path).is_dir():
        return Path(path)
    try:
        return Path(snapshot_download(path, allow_patterns=["*.json", "*.safetensors"]))
    except (OSError, ValueError) as error:
        raise UserError(
            f"{path}: cannot fetch the weights from the hub ({str(error)[:200]})"
        ) from None


def _files_by_key(folder: Path) -> dict[str, Path]:
    index, single = folder / INDEX, folder / "model.safetensors"
    if index.is_file():
        try:
            names = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            files = {key: folder / name for key, name in names.items()}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise UserError(f"{index}: not a safetensors index; fetch the file again") from None
        for name in names.values():
            # By its words: in the hub's cache every file is a link to another folder.
            if PurePath(name).is_absolute() or ".." in PurePath(name).parts:
                raise UserError(
                    f"{index}: names {name}, which is not in its folder; fetch the model again"
                )
        for file in sorted(set(files.values())):
            if not file.is_file():
                raise UserError(f"{file}: named in {INDEX} but not there; fetch the file")
        return files
    if not single.is_file():
        raise UserError(
            f"{folder}: no model.safetensors and no {INDEX} here; give a folder with safetensors weights, "
            "or start from random ones (model.init: random)"
        )
    return dict.fromkeys(_keys_in(single), single)


def _keys_in(file: Path) -> list[str]:
    try:
        with safe_open(file, framework="pt") as opened:
            return list(opened.keys())
    except (SafetensorError, OSError) as error:
        raise UserError(
            f"{file}: not a whole safetensors file ({str(error)[:200]}); fetch it again"
        ) from None


def _check_plain(file: Path, key: str, dtype: torch.dtype) -> None:
    if dtype not in PLAIN:
        raise UserError(
            f"{file}: {key} is {str(dtype).removeprefix('torch.')}, which are no plain weights; give the model's "
            "weights in bfloat16, float16 or float32"
        )


def _cast(built: PreTrainedModel, pattern: re.Pattern[str], dtype: torch.dtype) -> None:
    for path, module in built.named_modules():
        for tensors in (module._parameters, module._buffers):
            for leaf, tensor in tensors.items():
                if (
                    tensor is not None
                    and tensor.is_floating_point()
                    and pattern.search(f"{path}.{leaf}")
                ):
                    cast = tensor.to(dtype)
                    tensors[leaf] = nn.Parameter(cast) if isinstance(tensor, nn.Parameter) else cast
