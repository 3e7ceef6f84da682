"""The section `lora` and PEFT's config: what each says of the other, and values to start from.

With `lora.path` a run starts from the adapter of a folder instead of drawn factors.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from shardwise.config import Lora, Model, RunConfig, UserError
from shardwise.config.keys import facts_of, known_keys
from shardwise.models.adapters.reading import (
    CHANGE_THE_BASE,
    PREFIX,
    AdapterFolder,
    Reading,
    file_name,
    read_adapter,
    read_on,
    reading_of,
)
from shardwise.models.families import family_of
from shardwise.models.multimodal import multimodal_of
from shardwise.models.names import (
    adapter_layers,
    is_adapter,
    is_saved_copy,
    is_wrapper,
    renamed_by_peft,
)
from shardwise.models.weight_files import weights_from_files

if TYPE_CHECKING:
    from peft import LoraConfig
    from peft.tuners.lora import LoraLayer

_READ = re.compile(
    "peft_type|peft_version|task_type|base_model_name_or_path|revision|inference_mode|auto_mapping|"
    "r|lora_alpha|lora_dropout|use_rslora|use_dora|target_modules|target_parameters|exclude_modules|"
    "modules_to_save|fan_in_fan_out|layers_to_transform|layers_pattern|init_lora_weights|"
    "rank_pattern|alpha_pattern|ensure_weight_tying|(eva|corda|lora_ga|loftq)_config"
)
"""Keys of PEFT's config that this library computes, or that only say which weights are adapted or
how their first values were found."""
_BY_FOLDER = [key for key in known_keys("lora") if facts_of(f"lora.{key}").by_adapter]
"""The keys of `lora` that a folder says."""
_MERGED = "write a model with it (shardwise export --merge), and train a new adapter on that"


def section_of(lora: Lora, base: Model, model: PreTrainedModel) -> Lora:
    """Return the section with what the folder of `lora.path` says; without a path as it is.

    `model` is the language model of `base` without adapters. UserError where the folder has no
    adapter that fits it, or one of a kind that is not computed here. Which keys may stand beside it
    say the rules (`contradicted`).
    """
    if lora.path is None:
        return lora
    adapter = read_adapter(lora.path)
    _check_kind(adapter)
    reading = reading_of(adapter, model, multimodal_of(base, model))
    reading.require(f"lora.path {adapter.path}")
    saved = [reading.text_name(name) or name for name in reading.saved]
    _check_untied(reading, base, saved)
    _check_base(reading, base, saved)
    sizes = {target: sizes_of(reading.layers)[name] for name, target in _targets(reading).items()}
    if not sizes:
        raise UserError(f"lora.path {adapter.path}: no factors in the file; give a LoRA adapter")
    rank, alpha = Counter(sizes.values()).most_common(1)[0][0]
    others = {path: None if size == (rank, alpha) else [*size] for path, size in sizes.items()}
    return replace(
        lora,
        r=rank,
        alpha=float(alpha),
        rslora=bool(adapter.config.get("use_rslora")),
        dora=bool(adapter.config.get("use_dora")),
        targets=list(sizes) if not any(others.values()) else others,
        modules_to_save=saved,
        experts="each",
    )


def keys_of_folder(lora: Lora | None) -> dict[str, Any]:
    """Return what the folder of `lora.path` has given, by key: with it a resume needs no folder,
    unless pairs of answers are compared with what it holds.
    """
    return {key: getattr(lora, key) for key in _BY_FOLDER}


def resumed(cfg: RunConfig, saved: Lora | None) -> RunConfig:
    """Return the run with the adapter that a checkpoint has `saved`, in the place of a folder's."""
    if cfg.lora is None or cfg.lora.path is None or saved is None or cfg.reference == "start":
        return cfg
    return replace(cfg, lora=replace(cfg.lora, path=None, **keys_of_folder(saved)))


def contradicted(given: Lora, found: Lora) -> tuple[str, object, object] | None:
    """Return a key that says otherwise than the folder, its value and the folder's; None if none.

    A key at its default says nothing.
    """
    default = Lora()
    for key in _BY_FOLDER:
        value, other = getattr(given, key), getattr(found, key)
        if value not in (other, getattr(default, key)):
            return key, value, "other weights" if key == "targets" else other
    return None


def folder_weights(
    lora: Lora, base: Model, model: PreTrainedModel, wanted: Collection[str]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, full CPU tensor) of the adapters and saved copies in `wanted`, one at a time."""
    assert lora.path is not None
    dtypes = {name: parameter.dtype for name, parameter in model.named_parameters()}
    mine = [name for name in names_of_adapters(model) if name in wanted]
    if not mine:
        return
    reading = read_on(base, lora.path)
    found = {reading.text_name(name.removeprefix(PREFIX)): name for name in reading.sources}
    places = {found[text_key(name)]: name for name in mine}
    for name, value in reading.values(places):
        yield places[name], value.to(dtypes[places[name]])


def section_of_layers(lora: Lora, model: nn.Module) -> Lora:
    """Return the section with rank and scale of the adapters that `model` has."""
    layer: Any = next(iter(adapter_layers(model).values()))
    return replace(
        lora,
        r=layer.r["default"],
        alpha=layer.lora_alpha["default"],
        rslora=layer.use_rslora["default"],
        dora=layer.use_dora["default"],
    )


def _check_kind(adapter: AdapterFolder) -> None:
    from peft import LoraConfig

    config, plain = adapter.config, LoraConfig().to_dict()
    where = f"lora.path {adapter.path}"
    for key, value in config.items():
        if value and value != plain.get(key) and not _READ.fullmatch(key):
            raise UserError(
                f"{where}: its config has {key}, a kind of LoRA that is not computed here; give an "
                f"adapter of plain LoRA, or {_MERGED}"
            )
    init = str(config.get("init_lora_weights")).lower()
    if init == "mica":
        raise UserError(
            f"{where}: init_lora_weights is mica, which trains A alone, and a run trains both "
            "factors; set it to true in adapter_config.json if that is what you want"
        )
    if init.startswith(CHANGE_THE_BASE):
        raise UserError(
            f"{where}: init_lora_weights is {init}, which changes the base too; convert it to "
            "plain LoRA with PEFT's save_pretrained"
        )


def _check_untied(reading: Reading, base: Model, saved: list[str]) -> None:
    tied = {name for pair in reading.text.all_tied_weights_keys.items() for name in pair}
    for module in saved:
        if f"{module}.weight" in tied:
            raise UserError(
                f"lora.path {reading.folder.path}: it trains {module} in full, which {base.path} "
                f"ties to another weight; {_MERGED}"
            )


def _targets(reading: Reading) -> dict[str, str]:
    """Return the path of each linear and stack of experts with factors, by PEFT's name of it."""
    head, bypassed = reading.text.get_output_embeddings(), family_of(reading.text).named("bypassed")
    targets: dict[str, str] = {}
    for name, layer in reading.layers.items():
        path = reading.text_name(name)
        module = None if path is None else _module_of(reading.text, path)
        if path is None:
            problem = "which is not of the language model"
        elif module is head:
            problem = "the head, which takes no adapter here"
        elif isinstance(module, nn.Embedding):
            problem = "the embedding, which takes no adapter here"
        elif path.endswith(bypassed):
            problem = "whose weight its layer reads past the adapter"
        elif isinstance(module, (nn.Linear, Conv1D)):
            targets[name] = path.removesuffix(".weight")
            continue
        elif is_wrapper(layer) and not name.endswith(".weight"):
            targets[name] = path
            continue
        else:
            problem = f"a {type(module).__name__}, which takes no adapter here"
        raise UserError(f"lora.path {reading.folder.path}: it adapts {name}, {problem}; {_MERGED}")
    return targets


def _module_of(text: PreTrainedModel, path: str) -> nn.Module:
    """Return the module that a path names, or the parameter of which."""
    modules = dict(text.named_modules())
    return modules.get(path) or modules[path.rpartition(".")[0]]


def _check_base(reading: Reading, base: Model, saved: list[str]) -> None:
    """Raise UserError where a base weight that stands in the file is not that of `base`.

    PEFT writes them beside an embedding that was resized. Of modules that are trained in full it
    then writes copies too, which it does not compute with.
    """
    text, tied = reading.text, reading.text.all_tied_weights_keys
    trained = tuple(f"{module}." for module in saved)
    parameters = dict(text.named_parameters(remove_duplicate=False))
    inside = {name: str(reading.text_name(name.removeprefix(PREFIX))) for name in reading.others}
    names = [
        name
        for name, own_name in inside.items()
        if own_name in parameters and not own_name.startswith(trained)
    ]
    for name, value in reading.values(names):
        own_name = tied.get(inside[name], inside[name])
        has_files = base.init == "weights"
        weights = weights_from_files(text, base.path, {own_name}) if has_files else ()
        if not any(torch.equal(weight, value.to(weight.dtype)) for _, weight in weights):
            raise UserError(
                f"lora.path {reading.folder.path}: the file has another {own_name} than "
                f"{base.path}, as of a model with more tokens; give that model as model.path"
            )


def names_of_adapters(model: nn.Module) -> list[str]:
    """Return the names of factors, magnitudes and copies of modules to save."""
    names = (name for name, _ in model.named_parameters())
    return [name for name in names if is_adapter(name) or is_saved_copy(name)]


def text_key(name: str) -> str:
    """Return a parameter's name in a file, without the prefix, as the text class has it."""
    return file_name(name.replace(".modules_to_save.default.", "."))


def peft_config(
    lora: Lora, modules: list[str], parameters: list[str], saved: list[str], transposed: bool
) -> LoraConfig:
    """Return PEFT's config for adapters on `modules` (linears) and `parameters` (stacks).

    `transposed`: the linears are transformers' Conv1D, which keep their weight as [in, out].
    """
    from peft import LoraConfig

    return LoraConfig(
        task_type="CAUSAL_LM",
        r=lora.r,
        lora_alpha=lora.alpha,  # ty: ignore[invalid-argument-type]  # used as any number
        lora_dropout=lora.dropout,
        use_rslora=lora.rslora,
        use_dora=lora.dora,
        fan_in_fan_out=transposed,
        target_modules=modules,
        target_parameters=parameters or None,
        modules_to_save=saved or None,
    )


@dataclass(frozen=True)
class Seen:
    """The class that PEFT will see, without adapters."""

    names: frozenset[str]
    """The names of its parameters."""
    model_type: str
    layers: str
    """The path to its layers."""

    @property
    def _modules(self) -> set[str]:
        return {name.rpartition(".")[0] for name in self.names}

    def targets(self, layers: Mapping[str, LoraLayer]) -> tuple[list[str], list[str]]:
        """Return `target_modules` and `target_parameters` for PEFT's layers, by their names here.

        PEFT renames, by model type, targets that look like a checkpoint's per-expert matrices, and
        so loses linears of MLPs (`names.renamed_by_peft`). Those are listed as parameters
        (`....weight`) instead of modules, which gives the same factors under the same names. PEFT
        then computes W + BA rather than Wx + BAx, and the config must not have dropout.
        """
        modules: list[str] = []
        parameters: list[str] = []
        for path, layer in layers.items():
            name = self._peft_name(path, layer)
            is_module = name == path and not is_wrapper(layer)
            (modules if is_module else parameters).append(name)
        return (
            short_targets(modules, self._modules, self.layers),
            short_targets(parameters, self.names, self.layers),
        )

    def sizes(self, layers: Mapping[str, LoraLayer]) -> dict[str, tuple[int, float]]:
        """Return rank and alpha of PEFT's layers by the names that its patterns match."""
        sizes = sizes_of(layers)
        return {self._peft_name(path, layer): sizes[path] for path, layer in layers.items()}

    def _peft_name(self, path: str, layer: LoraLayer) -> str:
        """Return the name of what PEFT adapts: of a module, or of a parameter where it renames."""
        is_renamed = path.rpartition(".")[2] in renamed_by_peft(self.model_type)
        return f"{path}.weight" if is_renamed and not is_wrapper(layer) else path

    def patterns(
        self, sizes: Mapping[str, tuple[int, float]], r: int, alpha: float
    ) -> dict[str, dict[str, Any]]:
        """Return `rank_pattern` and `alpha_pattern` for adapters of these ranks and alphas.

        PEFT takes the first entry that matches; no two match one weight, so order means nothing.
        """
        patterns: dict[str, dict[str, Any]] = {}
        all_names = self._modules | self.names
        for place, (key, default) in enumerate((("rank_pattern", r), ("alpha_pattern", alpha))):
            entries = patterns[key] = {}
            for value in dict.fromkeys(size[place] for size in sizes.values()):
                paths = [path for path, size in sizes.items() if size[place] == value]
                if value != default:
                    entries |= dict.fromkeys(short_targets(paths, all_names, self.layers), value)
        return patterns


def sizes_of(layers: Mapping[str, LoraLayer]) -> dict[str, tuple[int, float]]:
    """Return rank and alpha of PEFT's layers."""
    return {name: (x.r["default"], x.lora_alpha["default"]) for name, x in layers.items()}


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
