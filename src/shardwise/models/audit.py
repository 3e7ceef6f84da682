"""What `shardwise check` finds in a PEFT adapter: what of it would do nothing on its model."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from peft import LoraConfig, get_peft_model
from peft.utils import get_peft_model_state_dict
from rich.box import SIMPLE
from rich.table import Table
from safetensors import safe_open
from transformers import PreTrainedModel

from shardwise.config import Model
from shardwise.models.adapter_folder import PREFIX, AdapterFolder, read_adapter
from shardwise.models.families import family_of, spec_of
from shardwise.models.load import build_meta, read_config
from shardwise.models.lora import CoverageRow, adapter_layers, coverage
from shardwise.models.multimodal import Multimodal, multimodal_of


@dataclass(frozen=True)
class Audit:
    """The result of a check."""

    adapter: AdapterFolder
    num_matched: int
    """Modules with factors in the file that the model has."""
    rows: tuple[CoverageRow, ...]
    """By kind of layer, the linears with and without factors."""
    findings: tuple[str, ...]
    """What would do nothing, or does not load; empty for a sound adapter."""

    def table(self) -> Table:
        """Return the kinds of layers with what of them the adapter reaches."""
        config, num = self.adapter.config, len(self.adapter.factors)
        table = Table(title_justify="left", box=SIMPLE, padding=(0, 1, 0, 0))
        table.title = (
            f"rank {self.adapter.rank}, alpha {config['lora_alpha']:g}, scale "
            f"{self.adapter.scale:.4g}; {self.num_matched} of {num} adapted modules are the model's"
        )
        for column in ("layers", "number", "linears", "adapted", "without an adapter"):
            table.add_column(column, overflow="fold")
        for row in self.rows:
            counts = (str(row.layers), str(row.weights), str(row.adapted))
            table.add_row(row.kind, *counts, ", ".join(row.frozen) or "-")
        return table


def audit(adapter_folder: str, model: Model) -> Audit:
    """Check a PEFT adapter, whoever wrote it, against its model, of which no weights are read.

    PEFT puts its config's adapters on the model on meta, which shows what it would look for in the
    file. One factor at a time is in memory. UserError if one of the two cannot be read.
    """
    adapter = read_adapter(adapter_folder)
    text = build_meta(model, read_config(model))
    multimodal = multimodal_of(model, text)
    matched = {n: path for n, path in adapter.text_names(text, multimodal).items() if path}
    named_after: PreTrainedModel = text
    if multimodal is not None and _paths(multimodal.model, adapter.factors) - set(
        _paths(text, adapter.factors)
    ):
        named_after = multimodal.model
    there = _paths(named_after, adapter.factors)
    findings = [
        *_unmatched(adapter, there | matched.keys()),
        *_of_the_text_class(there, matched, named_after, multimodal, text),
        *_targets_without_modules(adapter, named_after),
        *_as_peft_loads(adapter, there, named_after),
        *_bypassed(matched, text),
        *_values(adapter),
    ]
    adapted = set(matched.values()) | set(_stacks(adapter, matched, text))
    rows = coverage(text, spec_of(text.config, text), adapted).rows
    return Audit(adapter, len(there | matched.keys()), rows, tuple(findings))


def _paths(model: PreTrainedModel, names: Iterable[str]) -> set[str]:
    """Return those of the names that are modules of the model."""
    modules = {name for name, _ in model.named_modules()}
    return {name for name in names if name.replace(".base_layer", "") in modules}


def _unmatched(adapter: AdapterFolder, there: Container[str]) -> Iterator[str]:
    unknown = [name for name in adapter.factors if name not in there]
    if not adapter.factors:
        yield "the file has no LoRA factors"
    if unknown:
        yield f"factors of modules that the model does not have: {_some(unknown)}"


def _of_the_text_class(
    there: set[str],
    matched: Mapping[str, str],
    named_after: PreTrainedModel,
    multimodal: Multimodal | None,
    text: PreTrainedModel,
) -> Iterator[str]:
    if multimodal is None:
        return
    lost = sorted(matched if named_after is text else matched.keys() - there)
    if lost:
        yield (
            f"names of {type(text).__name__}: {type(multimodal.model).__name__}, which config.json "
            f"names, loads none of them; shardwise export --for peft renames them: {_some(lost)}"
        )


def _targets_without_modules(adapter: AdapterFolder, named_after: PreTrainedModel) -> Iterator[str]:
    modules = [name for name, _ in named_after.named_modules()]
    parameters = [name for name, _ in named_after.named_parameters()]
    for key, all_names in (
        ("target_modules", modules),
        ("target_parameters", parameters),
        ("modules_to_save", modules),
    ):
        entries = adapter.patterns(key)
        lost = [entry for entry in entries if not any(_is_end(entry, n) for n in all_names)]
        if lost:
            yield f"{key} of the config that the model does not have: {_some(lost)}"


def _as_peft_loads(
    adapter: AdapterFolder, there: set[str], named_after: PreTrainedModel
) -> Iterator[str]:
    """Yield what PEFT would not read of the file, would miss in it, or could not load."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            config = LoraConfig.from_pretrained(str(adapter.path))
            # Rules for first values, some of which compute with the base's weights.
            config.init_lora_weights = False
            peft_model = get_peft_model(copy.deepcopy(named_after), config, low_cpu_mem_usage=True)
            wanted = get_peft_model_state_dict(peft_model, save_embedding_layers=False)
            # PEFT writes embeddings too where they were adapted or resized.
            read = wanted | get_peft_model_state_dict(peft_model, save_embedding_layers=True)
    except Exception as error:  # the config may hold anything, and PEFT raises as many errors
        yield f"PEFT does not take its config: {type(error).__name__}: {_line(error)}"
        return
    absent_modules = [name for name in adapter.factors if name not in there]
    explained = tuple(f"{PREFIX}{name}.lora_" for name in absent_modules)
    unread = [key for key in adapter.shapes if key not in read and not key.startswith(explained)]
    if unread:
        yield f"keys of the file that PEFT does not read with this config: {_some(unread)}"
    missing = sorted(wanted.keys() - adapter.shapes.keys())
    if missing:
        yield f"weights that the config promises and the file lacks: {_some(missing)}"
    odd = [
        f"{key} {list(shape)} instead of {list(read[key].shape)}"
        for key, shape in adapter.shapes.items()
        if key in read and tuple(read[key].shape) != shape
    ]
    if odd:
        yield f"shapes that do not fit the module or the config's rank: {_some(odd)}"
    scales = {name: layer.scaling["default"] for name, layer in adapter_layers(peft_model).items()}
    useless = [name for name, scale in scales.items() if scale == 0 or not math.isfinite(scale)]
    if useless:
        scale = scales[useless[0]]
        yield f"the scale is {scale:g} in {len(useless)} modules: {_some(useless)}"


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


def _bypassed(matched: Mapping[str, str], text: PreTrainedModel) -> Iterator[str]:
    bypassed = family_of(text).bypassed
    unread = [name for name, path in matched.items() if path.endswith(bypassed)]
    if bypassed and unread:
        yield f"adapters on weights that their layer reads past the adapter: {_some(unread)}"


def _values(adapter: AdapterFolder) -> Iterator[str]:
    zeros, not_finite = [], []
    with safe_open(adapter.file, framework="pt") as opened:
        for name, pair in adapter.factors.items():
            for factor in pair.values():
                value = opened.get_tensor(factor.key).to(torch.float32)
                if not value.isfinite().all():
                    not_finite.append(factor.key)
                elif not value.any():
                    zeros.append(name)
    if zeros:
        yield f"modules with a factor of zeros only: {_some(zeros)}"
    if not_finite:
        yield f"factors with numbers that are not finite: {_some(not_finite)}"


def _stacks(
    adapter: AdapterFolder, matched: Mapping[str, str], text: PreTrainedModel
) -> Iterator[str]:
    """Yield the stacked experts' parameters that have factors."""
    modules = {path.replace(".base_layer", "") for path in matched.values()}
    targets = adapter.patterns("target_parameters")
    for name, _ in text.named_parameters():
        is_meant = any(_is_end(target, name) for target in targets)
        if is_meant and name.rpartition(".")[0] in modules:
            yield name


def _is_end(target: str, name: str) -> bool:
    return name == target or name.endswith(f".{target}")


def _some(names: Iterable[str]) -> str:
    names = list(names)
    more = f" and {len(names) - 2} more" if len(names) > 2 else ""
    return ", ".join(names[:2]) + more
