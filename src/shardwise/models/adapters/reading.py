"""Reader of an adapter's folder as PEFT reads it on its model, whoever wrote it.

Every command asks this one. PEFT puts the config's adapters on the model on meta, and gives the
file's names those that it looks for: of one file with a pair of factors for each expert, those of
the stack. Names are PEFT's, as in a file that it writes:
`base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight`.
"""

from __future__ import annotations

import copy
import json
import math
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import PreTrainedModel

from shardwise.base.safety import check_no_pipes
from shardwise.config import Model, UserError
from shardwise.models.families import family_of
from shardwise.models.load import build_meta, read_config
from shardwise.models.multimodal import Multimodal, multimodal_of
from shardwise.models.names import adapter_layers, is_copied

if TYPE_CHECKING:
    from peft import LoraConfig, PeftModel
    from peft.tuners.lora import LoraLayer

CONFIG_NAME, SAFETENSORS_WEIGHTS_NAME = "adapter_config.json", "adapter_model.safetensors"
"""PEFT's names of its files."""
PREFIX = "base_model.model."
"""Prefix that PEFT puts before the name of a module."""
_FACTOR_IN_FILE = re.compile(r"(.+)\.lora_(?:[AB](?:\.[^.]+)?\.weight|embedding_[AB](?:\.[^.]+)?)")
_FLOATING = ("F64", "F32", "BF16", "F16")
"""Dtypes of a file whose numbers are the weights."""


@dataclass(frozen=True)
class AdapterFolder:
    """Facts that a folder states of its adapter; no factor is in memory."""

    path: Path
    config: Mapping[str, Any]
    """`adapter_config.json`."""
    factors: tuple[str, ...]
    """Names of the modules that have a factor, A or B, in the file."""
    shapes: Mapping[str, tuple[int, ...]]
    """The shape of every entry of the file by its key."""

    @property
    def file(self) -> Path:
        """The file with the factors."""
        return self.path / SAFETENSORS_WEIGHTS_NAME

    def patterns(self, key: str) -> tuple[str, ...]:
        """Return a list of the config as it is, empty where there is none or a pattern instead."""
        value = self.config.get(key) or ()
        return () if isinstance(value, str) else tuple(value)


def file_name(name: str) -> str:
    """Return a parameter's name as PEFT's files have it: without the adapter's, and in which
    magnitudes are no modules.
    """
    name = name.replace(".default.", ".").removesuffix(".default")
    module, magnitude, _ = name.partition(".lora_magnitude_vector")
    return module + magnitude if magnitude else name


def read_adapter(folder: str | Path) -> AdapterFolder:
    """Read a folder's config and the header of its factors; UserError where it has no adapter.

    Nothing is unpickled: `adapter_model.bin` is refused.
    """
    path = Path(folder)
    check_no_pipes(path)
    config, file = path / CONFIG_NAME, path / SAFETENSORS_WEIGHTS_NAME
    if not config.is_file():
        raise UserError(f"{path}: no {CONFIG_NAME} here; give the folder of a PEFT adapter")
    if not file.is_file():
        way_out = "give the folder of a PEFT adapter"
        if (path / "adapter_model.bin").is_file():
            way_out = "adapter_model.bin is a pickle, which is never read: save it as safetensors"
        raise UserError(f"{path}: no {SAFETENSORS_WEIGHTS_NAME} here; {way_out}")
    try:
        with safe_open(file, framework="pt") as opened:
            slices = {key: opened.get_slice(key) for key in list(opened.keys())}
            shapes = {key: tuple(part.get_shape()) for key, part in slices.items()}
            dtypes = {key: part.get_dtype() for key, part in slices.items()}
    except (SafetensorError, OSError) as error:
        raise UserError(
            f"{file}: not a whole safetensors file ({str(error)[:200]}); fetch it again"
        ) from None
    for key, dtype in dtypes.items():
        if dtype not in _FLOATING:
            raise UserError(
                f"{file}: {key} is {dtype}, which are no plain weights; save the adapter in "
                "float32, bfloat16 or float16"
            )
    matches = (_FACTOR_IN_FILE.fullmatch(key.removeprefix(PREFIX)) for key in sorted(shapes))
    factors = dict.fromkeys(match[1] for match in matches if match)
    return AdapterFolder(path, _read_config(config), tuple(factors), shapes)


def _read_config(file: Path) -> Mapping[str, Any]:
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError):
        config = None
    if not isinstance(config, dict):
        raise UserError(f"{file}: not the config of a LoRA adapter; fetch the file again")
    if config.get("peft_type") != "LORA":
        raise UserError(
            f"{file}: peft_type is {_shown(config.get('peft_type'))}; give the folder of a LoRA "
            "adapter"
        )
    for key, is_valid, wanted in _TYPES:
        if not is_valid(config.get(key, _DEFAULTS.get(key))):
            raise UserError(
                f"{file}: {key} is {_shown(config.get(key))} instead of {wanted}; save the adapter "
                "again with PEFT, or correct the file"
            )
    return config


def _are_names(value: Any) -> bool:
    if isinstance(value, list):
        return all(isinstance(name, str) for name in value)
    return value is None or isinstance(value, str)


def _is_init(value: Any) -> bool:
    known = r"(?i:gaussian|olora|mica)|pissa(_niter_\d+)?|corda|eva|loftq|lora_ga|orthogonal"
    return value is None or type(value) is bool or bool(re.fullmatch(known, str(value)))


def _shown(value: Any) -> str:
    return json.dumps(value)[:100]


_DEFAULTS = {"use_rslora": False, "use_dora": False}
_TYPES: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    # True is an int too.
    ("r", lambda value: type(value) is int and value >= 1, "a whole number of at least 1"),
    (
        "lora_alpha",
        lambda value: type(value) in (int, float) and 0 < abs(value) < math.inf,
        "a finite number other than 0",
    ),
    *((key, lambda value: type(value) is bool, "true or false") for key in _DEFAULTS),
    *(
        (key, _are_names, "a list of names or a pattern")
        for key in ("target_modules", "target_parameters", "modules_to_save")
    ),
    ("init_lora_weights", _is_init, "one of PEFT's initialisations"),
)
"""Keys that are computed with, what their JSON must be, and that in words."""


NOT_REPEATED = ("lora_ga", "corda", "pissa_niter_")
"""Beginnings of `init_lora_weights` with which PEFT changes the base, but not so when it loads."""
CHANGE_THE_BASE = ("pissa", "olora", "loftq", *NOT_REPEATED)
"""Values of `init_lora_weights` with which PEFT changes the base model's weights."""
_NOT_ON_META = re.compile(r"\.lora_monteclora_sampler\.")
"""Keys of a file that PEFT reads, though on meta it does not make their modules."""


@dataclass(frozen=True)
class Reading:
    """An adapter's folder as PEFT reads it onto a class of its model; no factor is in memory."""

    folder: AdapterFolder
    text: PreTrainedModel
    """The language model on meta, without adapters."""
    multimodal: Multimodal | None
    """The class that the model's folder names, where the language model is a part of it."""
    holder: PreTrainedModel
    """The one of these two classes that the adapter's names are of."""
    adapted: PeftModel | None
    """`holder` with the adapters, on meta; None where PEFT refuses the config."""
    sources: Mapping[str, str | None]
    """The file's key by PEFT's name of each tensor that PEFT reads; None: made of several."""
    faults: tuple[str, ...]
    """A line for each thing that PEFT would not read, would miss or could not load."""

    @property
    def config(self) -> LoraConfig:
        """PEFT's config, whose targets PEFT has changed to those of today's classes."""
        from peft import LoraConfig

        assert self.adapted is not None, "asked where there are no faults"
        config = self.adapted.peft_config["default"]
        assert isinstance(config, LoraConfig)
        return config

    @property
    def layers(self) -> dict[str, LoraLayer]:
        """PEFT's layers by the name of the linear or parameter that each adapts."""
        return {} if self.adapted is None else adapter_layers(self.adapted.get_base_model())

    @property
    def saved(self) -> list[str]:
        """Modules of which the file has a copy that was trained in full."""
        modules = [] if self.adapted is None else self.adapted.get_base_model().named_modules()
        return [name for name, module in modules if is_copied(module)]

    @property
    def modules(self) -> dict[Any, str]:
        """PEFT's name of each module, by the module."""
        return {} if self.adapted is None else {m: n for n, m in self.adapted.named_modules()}

    @property
    def others(self) -> list[str]:
        """PEFT's names of the tensors that are no factors: magnitudes, copies, biases."""
        return [name for name in self.sources if not _FACTOR.search(name)]

    def text_name(self, name: str) -> str | None:
        """Return the name in the text class; None for what is not of the language model."""
        if self.multimodal is not None and self.holder is self.multimodal.model:
            return self.multimodal.text_name(name)
        return name

    def require(self, error: str, way_out: str = "see shardwise check") -> None:
        """Raise UserError, which begins with `error`, where PEFT would not read all of it."""
        if self.faults:
            raise UserError(f"{error}: {self.faults[0]}; {way_out}")
        if self.folder.config.get("layer_replication"):
            raise UserError(
                f"{self.folder.path}: layer_replication gives several layers one weight, which "
                "only PEFT builds; load the adapter with PEFT as it is"
            )

    def values(self, names: Iterable[str] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (PEFT's name, CPU tensor), all or some; stacks of a layer's experts at a time.

        UserError at a tensor with a number that is not finite.
        """
        for name, value in self.tensors(self.sources if names is None else names):
            if not value.isfinite().all():
                raise UserError(
                    f"{self.folder.path}: {self.sources[name] or name} has numbers that are not "
                    "finite; train it again, or fetch it again"
                )
            yield name, value

    def tensors(self, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield as `values` does, whatever the numbers are."""
        names = set(names)
        used = set(self.sources.values())
        with safe_open(self.folder.file, framework="pt") as opened:
            for name, key in self.sources.items():
                if key is not None and name in names:
                    yield name, opened.get_tensor(key)
            wanted = [name for name in names if self.sources[name] is None]
            if not wanted:
                return
            assert self.adapted is not None, "there are no names where PEFT refuses the config"
            several = sorted((key for key in self.folder.shapes if key not in used), key=_layer_of)
            for _, keys in groupby(several, _layer_of):
                stacks = _renamed(self.adapted, {key: opened.get_tensor(key) for key in keys})
                yield from ((n, stack.contiguous()) for n, stack in stacks.items() if n in wanted)


_FACTOR = re.compile(r"\.lora_(?:[AB]\.weight|embedding_[AB])$")


def read_on(base: Model, folder: str | Path) -> Reading:
    """Read an adapter as PEFT does, on the class of its model that its names are of.

    Of the model only the config is read, of the factors the header. UserError where one of the two
    folders has none.
    """
    adapter = read_adapter(folder)
    text = build_meta(base, read_config(base))
    return reading_of(adapter, text, multimodal_of(base, text))


def reading_of(
    adapter: AdapterFolder, text: PreTrainedModel, multimodal: Multimodal | None
) -> Reading:
    """Return what PEFT reads of an adapter on `text`, the language model on meta."""
    from peft import LoraConfig, get_peft_model, get_peft_model_state_dict

    holder = text
    if multimodal is not None and multimodal.names_any(adapter.factors):
        holder = multimodal.model
    shapes = {key: nn.Parameter(torch.empty(s, device="meta")) for key, s in adapter.shapes.items()}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            config = LoraConfig.from_pretrained(str(adapter.path))
            # Rules for first values, some of which compute with the base's weights.
            config.init_lora_weights = False
            adapted = get_peft_model(copy.deepcopy(holder), config, low_cpu_mem_usage=True)
            promised = get_peft_model_state_dict(adapted, save_embedding_layers=False)
            # PEFT writes embeddings too where they were adapted or resized.
            read = promised | get_peft_model_state_dict(adapted, save_embedding_layers=True)
    except Exception as error:  # the config may hold anything, and PEFT raises as many errors
        fault = f"PEFT does not take its config: {type(error).__name__}: {_line(error)}"
        return Reading(adapter, text, multimodal, holder, None, {}, (fault,))
    for name, parameter in adapted.state_dict().items():  # a weight of the base, or a named adapter
        read.setdefault(file_name(name), parameter)
    try:
        tensors = _renamed(adapted, shapes)
    except Exception as error:  # as many, of a file that does not belong to the config
        fault = f"PEFT cannot stack its experts' factors: {type(error).__name__}: {_line(error)}"
        return Reading(adapter, text, multimodal, holder, adapted, {}, (fault,))
    keys = {id(tensor): key for key, tensor in shapes.items()}
    for name, tensor in tensors.items():
        if _NOT_ON_META.search(name):
            read.setdefault(name, tensor)
    sources = {name: keys.get(id(t)) for name, t in tensors.items() if name in read}
    unread = [keys.get(id(t), name) for name, t in tensors.items() if name not in read]
    odd = [
        f"{sources[name] or name} {list(tensors[name].shape)} instead of {list(read[name].shape)}"
        for name in sources
        if tensors[name].shape != read[name].shape
    ]
    faults = [
        *_unread(adapter, unread, holder),
        *_some("weights that the config promises and the file lacks", promised.keys() - tensors),
        *_some("shapes that do not fit the module or the config's rank", odd),
        *_base_changed(adapter),
        *_endless(adapted),
    ]
    return Reading(adapter, text, multimodal, holder, adapted, sources, tuple(faults))


def bypassed(reading: Reading) -> list[str]:
    """Return the modules whose layer reads the weight past the adapter, which then does nothing."""
    ends = family_of(reading.text).named("bypassed")
    return [name for name in reading.folder.factors if ends and name.endswith(ends)]


def some(names: Iterable[str]) -> str:
    """Return two of the names, and how many more there are."""
    names = list(names)
    more = f" and {len(names) - 2} more" if len(names) > 2 else ""
    return ", ".join(names[:2]) + more


def _some(what: str, names: Iterable[str]) -> Iterator[str]:
    if names := sorted(names):
        yield f"{what}: {some(names)}"


def _renamed(adapted: PeftModel, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return tensors of a file by the names that PEFT writes today, with experts stacked."""
    from peft.utils.transformers_weight_conversion import (
        convert_peft_adapter_state_dict_for_transformers as convert,
    )

    today = convert(adapted, adapted.peft_config["default"], dict(tensors))
    return {file_name(name): tensor for name, tensor in today.items()}


def _layer_of(key: str) -> str:
    numbered = re.match(r".*?\.\d+(?=\.)", key)
    return numbered[0] if numbered else ""


def _unread(adapter: AdapterFolder, keys: list[str], holder: PreTrainedModel) -> Iterator[str]:
    modules = {name for name, _ in holder.named_modules()}
    absent = [name for name in adapter.factors if name.replace(".base_layer", "") not in modules]
    owners = tuple(f"{PREFIX}{name}.lora_" for name in absent)
    lost = [key for key in keys if key.startswith(owners)] if owners else []
    if not adapter.factors:
        yield "the file has no LoRA factors"
    names = dict.fromkeys(key.removeprefix(PREFIX).partition(".lora_")[0] for key in lost)
    yield from _some("factors of modules that the model does not have", names)
    yield from _some("keys of the file that PEFT does not read with this config", {*keys} - {*lost})


def _base_changed(adapter: AdapterFolder) -> Iterator[str]:
    init = adapter.config.get("init_lora_weights")
    if isinstance(init, str) and init.lower().startswith(NOT_REPEATED):
        yield (
            f"init_lora_weights is {init}, which changed the base too when training began, and "
            "PEFT cannot do that again when it loads the file: with this model it is another; save "
            "it with path_initial_model_for_weight_conversion"
        )


def _endless(adapted: PeftModel) -> Iterator[str]:
    scales = {name: layer.scaling["default"] for name, layer in adapter_layers(adapted).items()}
    wrong = [name for name, scale in scales.items() if not math.isfinite(scale)]
    yield from _some("a scale that is not finite in the modules", wrong)


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
