"""What `shardwise check` finds in a PEFT adapter: what of it would do nothing on its model."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from rich.box import SIMPLE
from rich.table import Table
from safetensors import safe_open
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from shardwise.config import Model
from shardwise.models.adapter_folder import AdapterFolder, Factor, read_adapter
from shardwise.models.families import family_of, spec_of
from shardwise.models.load import build_meta, read_config
from shardwise.models.lora import CoverageRow, coverage
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

    One factor at a time is in memory. UserError if one of the two cannot be read.
    """
    adapter = read_adapter(adapter_folder)
    text = build_meta(model, read_config(model))
    multimodal = multimodal_of(model, text)
    names = adapter.text_names(text, multimodal)
    matched = {name: path for name, path in names.items() if path is not None}
    is_whole = multimodal is not None and multimodal.names_any(adapter.factors)
    named_after = multimodal.model if multimodal is not None and is_whole else text
    findings = [
        *_unmatched(names, multimodal, is_whole, text),
        *_targets_without_modules(adapter, named_after),
        *_targets_without_factors(adapter, named_after),
        *_bypassed(matched, text),
        *_shapes(adapter, matched, text),
        *_values(adapter),
    ]
    adapted = set(matched.values()) | set(_stacks(adapter, matched, text))
    rows = coverage(text, spec_of(text.config, text), adapted).rows
    return Audit(adapter, len(matched), rows, tuple(findings))


def _unmatched(
    names: Mapping[str, str | None],
    multimodal: Multimodal | None,
    is_whole: bool,
    text: PreTrainedModel,
) -> Iterator[str]:
    unknown = [name for name, path in names.items() if path is None]
    if not names:
        yield "the file has no LoRA factors"
    if unknown:
        yield f"factors of modules that the model does not have: {_some(unknown)}"
    if multimodal is not None and not is_whole and len(unknown) < len(names):
        yield (
            f"its names are those of {type(text).__name__}: {type(multimodal.model).__name__}, "
            "which config.json names, loads none of them; shardwise export --for peft renames them"
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
    pattern = adapter.config.get("target_modules")
    is_pattern = isinstance(pattern, str) and pattern != "all-linear"
    if is_pattern and not any(re.fullmatch(str(pattern), name) for name in modules):
        yield f"target_modules of the config matches no module: {pattern}"


def _targets_without_factors(adapter: AdapterFolder, named_after: PreTrainedModel) -> Iterator[str]:
    if any(adapter.config.get(key) for key in ("layers_to_transform", "exclude_modules")):
        return  # which of the targets are meant, PEFT alone knows
    targets = adapter.patterns("target_modules")
    without = [
        name
        for name, module in named_after.named_modules()
        if isinstance(module, (nn.Linear, Conv1D))
        and name not in adapter.factors
        and any(_is_end(target, name) for target in targets)
    ]
    if without:
        yield f"linears that target_modules names and that have no factors: {_some(without)}"


def _bypassed(matched: Mapping[str, str], text: PreTrainedModel) -> Iterator[str]:
    bypassed = family_of(text).bypassed
    unread = [name for name, path in matched.items() if path.endswith(bypassed)]
    if bypassed and unread:
        yield f"adapters on weights that their layer reads past the adapter: {_some(unread)}"


def _shapes(
    adapter: AdapterFolder, matched: Mapping[str, str], text: PreTrainedModel
) -> Iterator[str]:
    incomplete = [name for name, pair in adapter.factors.items() if len(pair) < 2]
    if incomplete:
        yield f"modules with one factor of two: {_some(incomplete)}"
    odd = []
    for name, pair in adapter.factors.items():
        if name in matched and len(pair) == 2:
            module = text.get_submodule(matched[name].replace(".base_layer", ""))
            if not _fits(pair["A"], pair["B"], module, adapter):
                odd.append(name)
    if odd:
        yield f"factors whose shapes do not fit the linear or the rank: {_some(odd)}"


def _fits(a: Factor, b: Factor, module: nn.Module, adapter: AdapterFolder) -> bool:
    if isinstance(module, nn.Linear):
        size = (module.in_features, module.out_features)
    elif isinstance(module, Conv1D):
        size = (module.nx, module.nf)
    else:  # a stack of experts, or an embedding
        return True
    has_rank = a.shape[0] == adapter.rank or bool(adapter.config.get("rank_pattern"))
    return a.shape[0] == b.shape[1] and (a.shape[1], b.shape[0]) == size and has_rank


def _values(adapter: AdapterFolder) -> Iterator[str]:
    if adapter.scale == 0 or not math.isfinite(adapter.scale):
        yield f"the scale is {adapter.scale:g}"
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
