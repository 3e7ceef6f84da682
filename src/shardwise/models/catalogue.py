"""Tables of `shardwise models`, as plain data: the listed families, or one model, built on meta.

A table has a title, a caption, the names of its columns, and sections of rows.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import chain, groupby
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from shardwise.base.layouts import ALONE, shortened
from shardwise.config import Model
from shardwise.config.rules import offered_layouts, refusals_of
from shardwise.models.adapters.lora import reach
from shardwise.models.counts import count_model
from shardwise.models.facts import facts_of
from shardwise.models.families import FAMILIES, every_kind, family_of, spec_of, unproven_note
from shardwise.models.load import build_meta, read_config
from shardwise.models.spec import ModelSpec

_LEGEND = (
    "3-D: experts stacked in one parameter; "
    "isolated: `data.packing: isolated` is proven to keep documents apart\n"
)
STACKED = " (3-D)"
"""Marks a stack of experts."""
_LORA = "LoRA auto (+ what all-linear adds)"


@dataclass(frozen=True)
class LayerFacts:
    """Parts of one decoder layer."""

    number: int
    kind: str
    feed_forward: str
    parameters: int
    auto: tuple[str, ...]
    """Targets of `lora.targets: auto`, as a list of targets could name them."""
    all_linear: tuple[str, ...]
    """Targets that `all-linear` adds; a stack of experts is marked."""
    isolated: bool
    """Whether `data.packing: isolated` keeps documents apart in it."""


def layer_facts(model: PreTrainedModel) -> list[LayerFacts]:
    """Return the facts of every layer of a model without adapters, on any device, in order."""
    family, spec = family_of(model), spec_of(model.config, model)
    auto, everything = reach(model, spec, "auto"), reach(model, spec, "all-linear")
    more = [path for path in everything if path not in set(auto)]

    def within(layer: str, paths: list[str]) -> tuple[str, ...]:
        names = [path.removeprefix(f"{layer}.") for path in paths if path.startswith(f"{layer}.")]
        return tuple(
            name.partition(".")[2] + (STACKED if name in family.named("experts") else "")
            for name in names
        )

    return [
        LayerFacts(
            number=number,
            kind=layer.kind,
            feed_forward=layer.feed_forward,
            parameters=sum(p.numel() for p in model.get_submodule(layer.name).parameters()),
            auto=within(layer.name, auto),
            all_linear=within(layer.name, more),
            isolated=layer.keeps_documents_apart,
        )
        for number, layer in enumerate(spec.layers)
    ]


def families_table() -> dict[str, Any]:
    """Return the table of all listed families, a section for each, a row for each layer kind."""
    sections = []
    for name, family in FAMILIES.items():
        facts = layer_facts(build_meta(Model(name, init="random"), every_kind(family)))
        section = []
        for kind in dict.fromkeys(row.kind for row in facts):
            rows = [row for row in facts if row.kind == kind]
            after = "/".join(dict.fromkeys(row.feed_forward for row in rows))
            section.append(
                [
                    name if kind == facts[0].kind else "",
                    _layer(kind, after),
                    _reached(
                        chain.from_iterable(row.auto for row in rows),
                        chain.from_iterable(row.all_linear for row in rows),
                    ),
                    "yes" if rows[0].isolated else "no",
                ]
            )
        sections.append(section)
    layouts = _lines(offered_layouts())
    return {
        "title": None,
        "caption": f"{_LEGEND}each family may run under (-ep: where it has experts){layouts}",
        "columns": ["family", "layers", _LORA, "isolated"],
        "sections": sections,
    }


def _active(built: PreTrainedModel, spec: ModelSpec) -> str:
    """Return how many parameters a token meets, where those are not all; "" where it is unknown."""
    if spec.family not in FAMILIES:
        return ""
    counts = count_model(built, spec)
    is_sparse = counts.active_parameters < counts.parameters
    return f", of which a token meets {counts.active_parameters:,}" if is_sparse else ""


def model_table(model: Model) -> dict[str, Any]:
    """Return the table of one model's layers in order, equal neighbours in one row.

    `model.path` may also be a listed family: what transformers makes of its config. Raises
    UserError if the model cannot be read.
    """
    listed = model.path in FAMILIES and not Path(model.path).is_dir()
    built = build_meta(model, every_kind(FAMILIES[model.path]) if listed else read_config(model))
    spec = spec_of(built.config, built)
    facts = facts_of(built, spec, family_of(built))
    tied = ", tied embeddings" if spec.tied else ""
    sizes = f"{built.num_parameters():,} parameters{_active(built, spec)}"
    offered = offered_layouts(facts)
    layouts = _lines(offered) if offered else f" no layout: {refusals_of(ALONE, facts)[0]}"
    caption = f"{_LEGEND}may run under{layouts}"
    if not facts.is_listed:
        caption += f"\nnote: {unproven_note(spec.family)}"
    rows = []
    for alike, group in groupby(layer_facts(built), key=lambda row: replace(row, number=0)):
        numbers = [row.number for row in group]
        rows.append(
            [
                "-".join(dict.fromkeys(str(number) for number in (numbers[0], numbers[-1]))),
                _layer(alike.kind, alike.feed_forward),
                _reached(alike.auto, alike.all_linear),
                "yes" if alike.isolated else "no",
                f"{alike.parameters:,}",
            ]
        )
    return {
        "title": f"{spec.family}, {sizes}{tied}",
        "caption": caption,
        "columns": ["number", "layers", _LORA, "isolated", "parameters"],
        "sections": [rows],
    }


def _lines(layouts: Iterable[str]) -> str:
    return "".join(f"\n  {line}" for line in shortened(layouts))


def _layer(kind: str, feed_forward: str) -> str:
    return kind if feed_forward == "none" else f"{kind}, {feed_forward}"


def _reached(auto: Iterable[str], all_linear: Iterable[str]) -> str:
    more = _braced(all_linear)
    return _braced(auto) + (f"\n+ {more}" if more else "")


def _braced(targets: Iterable[str]) -> str:
    """Return names without repetition, those that differ in one part as one: `{up,down}_layer`."""
    names = list(dict.fromkeys(targets))
    counts = Counter(form for name in names for form, _ in _forms(name))
    groups: dict[str, list[str]] = {}
    for name in names:
        form, part = max(_forms(name), key=lambda pair: counts[pair[0]])
        groups.setdefault(form, []).append(part)
    return " ".join(
        form.replace("%s", parts[0] if len(parts) == 1 else f"{{{','.join(parts)}}}")
        for form, parts in groups.items()
    )


def _forms(target: str) -> list[tuple[str, str]]:
    """Return the ways to write a name as a form with a gap, `%s`, and the part that fills it."""
    name, mark, _ = target.partition(STACKED)
    start, dot, last = name.rpartition(".")
    first, underscore, end = last.rpartition("_")
    if underscore:
        return [(f"{start}{dot}%s_{end}{mark}", first), (f"{start}{dot}{first}_%s{mark}", end)]
    return [(f"{start}.%s{mark}", last) if dot else (target, "")]
