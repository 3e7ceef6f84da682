"""Weights that adapters reach: of a run, and of a PEFT adapter, with what `check` finds in it."""

import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.box import SIMPLE
from rich.table import Table
from torch import nn
from transformers.pytorch_utils import Conv1D

from shardwise.config import Model
from shardwise.models.adapters.reading import PREFIX, Reading, bypassed, read_on, some
from shardwise.models.families import spec_of
from shardwise.models.multimodal import Multimodal
from shardwise.models.weights import WeightRow, adaptable, ends_with


@dataclass(frozen=True)
class CoverageRow:
    """The weights that an adapter could be on, over all layers of one kind."""

    kind: str
    layers: int
    weights: int  # linears, and stacks of experts
    adapted: int
    frozen: tuple[str, ...]  # linears without an adapter, by their name in the layer


@dataclass(frozen=True)
class Coverage:
    """Linears that LoRA trains: printed at the start of a run and kept in its record."""

    rows: tuple[CoverageRow, ...]
    trainable: int  # parameters
    total: int  # parameters, adapters included

    @property
    def percent(self) -> float:
        """Trainable parameters in percent of all."""
        return 100.0 * self.trainable / self.total

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data, for record.json."""
        return {**asdict(self), "percent": self.percent}

    def __str__(self) -> str:
        head = ("layers", "count", "weights", "adapted", "left frozen")
        body = [
            (row.kind, row.layers, row.weights, row.adapted, ", ".join(row.frozen) or "-")
            for row in self.rows
        ]
        table = [[str(cell) for cell in row] for row in (head, *body)]
        name, *numbers, _ = [max(map(len, column)) for column in zip(*table)]
        lines = []
        for kind, *counts, frozen in table:
            right = [count.rjust(width) for count, width in zip(counts, numbers)]
            lines.append("  ".join([kind.ljust(name), *right, frozen]))
        lines.append(
            f"trainable: {self.trainable:,} of {self.total:,} parameters ({self.percent:.2f} %)"
        )
        return "\n".join(lines)


def coverage(model: nn.Module, weights: list[WeightRow], adapted: set[str]) -> Coverage:
    """Return what adapters on these paths cover of the weights that could have one."""
    rows = []
    for kind in dict.fromkeys(weight.layer.kind for weight in weights if weight.layer):
        same_kind = [w for w in weights if w.layer and w.layer.kind == kind]
        frozen = [weight.in_layer for weight in same_kind if weight.target not in adapted]
        rows.append(
            CoverageRow(
                kind=kind,
                layers=len({weight.layer.name for weight in same_kind if weight.layer}),
                weights=len(same_kind),
                adapted=len(same_kind) - len(frozen),
                frozen=tuple(dict.fromkeys(frozen)),
            )
        )
    # A copy in `modules_to_save` replaces its original, which does not count.
    parameters = [p for name, p in model.named_parameters() if ".original_module." not in name]
    return Coverage(
        rows=tuple(rows),
        trainable=sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
        total=sum(parameter.numel() for parameter in parameters),
    )


def with_rest(report: Coverage, whole: Multimodal) -> Coverage:
    """Return a report with a row for each part of a multimodal class beside the language model,
    such as its vision tower, of which nothing is adapted.
    """
    linears = [
        name
        for name, module in whole.model.named_modules()
        if isinstance(module, (nn.Linear, Conv1D)) and whole.text_name(name) is None
    ]
    rows = list(report.rows)
    for part in dict.fromkeys(".".join(name.split(".")[:2]) for name in linears):
        inside = [name for name in linears if f"{name}.".startswith(f"{part}.")]
        layers = {found[0] for name in inside if (found := re.match(r".*?\.\d+\.", name))}
        leaves = [re.sub(r"^.*?\.\d+\.", "", name).removeprefix(f"{part}.") for name in inside]
        rows.append(CoverageRow(part, len(layers), len(inside), 0, tuple(dict.fromkeys(leaves))))
    return replace(report, rows=tuple(rows))


@dataclass(frozen=True)
class Audit:
    """The result of a check."""

    reading: Reading
    rows: tuple[CoverageRow, ...]
    """Linears with and without factors, by kind of layer."""
    findings: tuple[str, ...]
    """Parts that would do nothing or do not load; empty for a sound adapter."""
    notes: tuple[str, ...]
    """A line for each thing that PEFT reads in one way, though another may be meant."""

    @property
    def num_matched(self) -> int:
        """Linears and parameters of the model that have factors in the file."""
        return len(_matched(self.reading))

    def table(self) -> Table:
        """Return the kinds of layers with what of them the adapter reaches."""
        config, layers = self.reading.folder.config, self.reading.layers.values()
        ranks = sorted({layer.r["default"] for layer in layers}) or [config["r"]]
        alphas = sorted({layer.lora_alpha["default"] for layer in layers}) or [config["lora_alpha"]]
        scales = sorted({layer.scaling["default"] for layer in layers})
        table = Table(title_justify="left", box=SIMPLE, padding=(0, 1, 0, 0))
        table.title = (
            f"rank {_listed(ranks)}, alpha {_listed(alphas)}, scale {_listed(scales)}; "
            f"{self.num_matched} of {len(layers)} adapted modules have their factors"
        )
        for column in ("layers", "number", "linears", "adapted", "without an adapter"):
            table.add_column(column, overflow="fold")
        for row in self.rows:
            counts = (str(row.layers), str(row.weights), str(row.adapted))
            table.add_row(row.kind, *counts, ", ".join(row.frozen) or "-")
        return table


def audit(adapter_folder: str, model: Model) -> Audit:
    """Check a PEFT adapter, whoever wrote it, against its model, of which no weights are read.

    UserError if one of the two cannot be read.
    """
    reading = read_on(model, adapter_folder)
    text = reading.text
    matched = {name: reading.text_name(name) for name in _matched(reading)}
    findings = [
        *reading.faults,
        *_of_the_text_class(reading, [name for name, path in matched.items() if path]),
        *_targets_without_modules(reading),
        *_useless(reading),
        *_bypassed(reading),
        *_values(reading),
    ]
    inside = {path.removesuffix(".weight") for path in matched.values() if path}
    rows = coverage(text, adaptable(text, spec_of(text.config, text)), inside).rows
    return Audit(reading, rows, tuple(findings), tuple(_ambiguous(reading)))


def _listed(values: list[float]) -> str:
    return ", ".join(f"{value:.4g}" for value in values) or "-"


def _matched(reading: Reading) -> list[str]:
    paths = reading.modules
    return [
        name
        for name, layer in reading.layers.items()
        if any(f"{paths[layer]}.lora_{end}" in reading.sources for end in _ENDS)
    ]


_ENDS = ("A.weight", "B.weight", "embedding_A", "embedding_B")


def _of_the_text_class(reading: Reading, matched: list[str]) -> Iterator[str]:
    whole = reading.multimodal
    if whole is not None and reading.holder is reading.text and matched:
        yield (
            f"names of {type(reading.text).__name__}: {type(whole.model).__name__}, which "
            "config.json names, loads none of them; shardwise export --for peft renames them: "
            f"{some(matched)}"
        )


def _targets_without_modules(reading: Reading) -> Iterator[str]:
    if reading.adapted is None:
        return
    modules = [name for name, _ in reading.holder.named_modules()]
    parameters = [name for name, _ in reading.holder.named_parameters()]
    # PEFT has replaced the names of experts' linears by those of their stacks.
    kept = reading.config.target_modules or ()
    for key, all_names in (
        ("target_modules", modules),
        ("target_parameters", parameters),
        ("modules_to_save", modules),
    ):
        lost = [
            entry
            for entry in reading.folder.patterns(key)
            if not any(ends_with(name, entry) for name in all_names)
            and (key != "target_modules" or entry in kept)
        ]
        if lost:
            yield f"{key} of the config that the model does not have: {some(lost)}"


def _useless(reading: Reading) -> Iterator[str]:
    useless = [name for name, layer in reading.layers.items() if not layer.scaling["default"]]
    if useless:
        yield f"the scale is 0 in {len(useless)} modules: {some(useless)}"


def _bypassed(reading: Reading) -> Iterator[str]:
    if unread := bypassed(reading):
        yield f"adapters on weights that their layer reads past the adapter: {some(unread)}"


def _values(reading: Reading) -> Iterator[str]:
    zeros, not_finite = [], []
    for name, value in reading.tensors(reading.sources):
        module, factor, _ = name.partition(".lora_")
        if not value.isfinite().all():
            not_finite.append(reading.sources[name] or name)
        elif factor and not value.any():
            zeros.append(module.removeprefix(PREFIX))
    if zeros:
        yield f"modules with a factor of zeros only: {some(zeros)}"
    if not_finite:
        yield f"tensors with numbers that are not finite: {some(not_finite)}"


def _ambiguous(reading: Reading) -> Iterator[str]:
    """Yield a note where two entries of a pattern match one module with different values."""
    for key in ("rank_pattern", "alpha_pattern"):
        entries = reading.folder.config.get(key) or {}
        twice = {}
        for name in reading.layers:
            matches = [entry for entry in entries if re.match(rf"(.*\.)?({entry})$", name)]
            if len({entries[entry] for entry in matches}) > 1:
                twice[name] = matches
        if twice:
            name, matches = next(iter(twice.items()))
            yield (
                f"{key} has two entries for {len(twice)} modules, and PEFT takes the first in the "
                f"file, which its own save sorts: {matches[0]} before {matches[1]} for {name}"
            )
