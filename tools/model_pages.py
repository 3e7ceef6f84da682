"""Write a page for each listed family, docs/models/: `python -m tools.model_pages [--check]`."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from transformers import CONFIG_MAPPING, AutoConfig

from shardwise.base.words import size
from shardwise.config import Data, Lora, Model, Parallel, RunConfig, Training, UserError, presets
from shardwise.lab.planner.candidates import Question
from shardwise.lab.planner.cluster import cluster_of
from shardwise.lab.planner.exact import explain
from shardwise.models.families import FAMILIES, Family, spec_of
from shardwise.models.families.servers import SERVERS
from shardwise.models.load import build_meta, read_config

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "models"
INDEX = "README.md"
PUBLISHED = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
"""Names under which models of a family are published; by default that of its config."""
ONE, EIGHT = "1xH100-80GB", "8xH100-80GB"
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "LoRA": (ONE, {}),
    "LoRA, `model.base: nf4`": (ONE, {"base": "nf4"}),
    "in full, fsdp2": (EIGHT, {"full": True}),
}
"""Devices and choices of each column of the table of memory."""
LENGTH = 2_048
MOST = 2
"""Shapes of a family in the table of memory: the smallest ones."""
MARKED = ("router", "logits_multiplied_by", "logits_divided_by", "logits_capped_by", "positions")
"""Fields of a family that a reader may want to know, where they are set."""


def page(name: str) -> str:
    """Return the page of a family."""
    family = FAMILIES[name]
    lines = [f"# {names_of(name)}", "", f"*How do I fine-tune {names_of(name)}?*", ""]
    lines += [f"`model_type: {name}` in `config.json`. {' '.join(special(family))}", ""]
    lines += ["## Layers and adapters", "", *layers(name), ""]
    lines += ["## A run", "", *run(name), ""]
    lines += ["## Memory", "", *memory(name), ""]
    lines += ["## Serve it", "", *serving(name), ""]
    lines += ["## Proven layouts", "", *proven(name), "", "---", ""]
    lines += [
        "This page is written by `tools/model_pages.py`. Other models: [index](README.md). More on "
        "families: [models and families](../guides/models.md)."
    ]
    return "\n".join(lines) + "\n"


def index() -> str:
    """Return the page that lists all families."""
    lines = ["# Models", "", "*Which page is about my model?*", ""]
    lines += [
        "Each listed family has a page: its layers, what LoRA adapts, a run file, memory, serving, "
        "proven layouts. `model_type` stands in a model's `config.json`.",
        "",
        "| models | `model_type` | shapes in the package |",
        "|---|---|---|",
    ]
    for name in sorted(FAMILIES, key=lambda name: names_of(name).lower()):
        shapes = ", ".join(f"`{preset}`" for preset in shapes_of(name)) or "–"
        lines.append(f"| [{names_of(name)}]({name}.md) | `{name}` | {shapes} |")
    lines += ["", "This page is written by `tools/model_pages.py`."]
    return "\n".join(lines) + "\n"


def names_of(name: str) -> str:
    """Return the names under which people know models of a family."""
    return PUBLISHED.get(name) or CONFIG_MAPPING[name].__name__.removesuffix("Config")


@cache
def _presets() -> dict[str, list[str]]:
    """Return the presets of published models by family, smallest model first."""
    found: dict[str, list[tuple[int, str]]] = {}
    for preset in presets.preset_names():
        if preset.startswith(("tiny-", "study-", "pipeline-", "demo-")):
            continue
        config = AutoConfig.from_pretrained(presets.MODELS / preset).get_text_config()
        num_numbers = config.num_hidden_layers * config.hidden_size**2
        found.setdefault(config.model_type, []).append((num_numbers, preset))
    return {family: [preset for _, preset in sorted(rows)] for family, rows in found.items()}


def shapes_of(name: str) -> list[str]:
    """Return the presets with the shape of a published model of a family."""
    return _presets().get(name, [])


def special(family: Family) -> Iterator[str]:
    """Yield sentences on what differs from the common shape."""
    start = "shardwise.models.families."
    files = [file for name, file in sorted(sys.modules.items()) if name.startswith(start)]
    files = [file for file in files if family in vars(file).values()]
    own = [f for f in files if family.model_type.startswith(f.__name__.split(".")[-1])]
    files = own or [file for file in files if file.__name__.endswith(".plain")]
    name, _, what = str(files[0].__doc__).split("\n\n")[0].rstrip(".").partition(": ")
    what = " ".join((what if len(name.split()) < 6 else f"{name}: {what}").split())
    yield what[0].upper() + what[1:] + "."
    marked = [field for field in MARKED if getattr(family, field)]
    if "router" in marked:
        yield "`model.router_aux_loss_coef` adds the load-balancing loss."
    if "positions" in marked or not family.keeps_documents_apart:
        yield "`data.packing: isolated` is refused."
    scaled = [getattr(family, field) for field in marked if field.startswith("logits_")]
    if scaled:
        yield f"`{'`, `'.join(scaled)}` of `config.json` changes its logits, here too."


def layers(name: str) -> Iterator[str]:
    """Yield what LoRA adapts in each kind of layer, then how many a published model has."""
    stored = json.loads(presets.FAMILIES.read_text(encoding="utf-8"))["table"]
    (rows,) = [rows for rows in stored["sections"] if rows[0][0] == name]
    yield "| layers | `lora.targets: auto` adapts | `all-linear` adds | isolated |"
    yield "|---|---|---|---|"
    for _, kind, targets, isolated in rows:
        auto, _, more = targets.partition("\n+ ")
        more = f"`{more}`" if more else "–"
        yield f"| {kind} | `{auto}` | {more} | {isolated} |"
    yield ""
    for preset in shapes_of(name):
        config, model = shape(preset)
        counted = Counter(
            layer.kind + (f", {layer.feed_forward}" if layer.feed_forward != "none" else "")
            for layer in spec_of(config, model).layers
        )
        listed = "; ".join(f"{number} × {kind}" for kind, number in counted.items())
        yield f"- `{preset}` ({model.num_parameters() / 1e9:.2f} B parameters): {listed}"
    if not shapes_of(name):
        yield "`shardwise models MODEL` counts the layers of a folder."


@cache
def shape(preset: str) -> tuple[Any, Any]:
    """Return a preset's config and its model on meta."""
    model = Model(str(presets.MODELS / preset), init="random")
    config = read_config(model)
    return config, build_meta(model, config)


def run(name: str) -> Iterator[str]:
    """Yield a run file, and the recipes of its models."""
    recipes = [
        recipe for recipe in presets.recipes().items() if recipe[1].preset in shapes_of(name)
    ]
    path = recipes[0][1].path if recipes else "MODEL"
    sections = presets.sections_of("fine_tuning")
    lora, training = sections["lora"], sections["training"]
    yield "```yaml"
    yield f"model: {{path: {path}, dtype: {sections['model']['dtype']}}}"
    yield f"lora: {{r: {lora['r']}, alpha: {lora['alpha']}, targets: {lora['targets']}}}"
    yield f"data: {{train: corpus/*.jsonl, sequence_length: {sections['data']['sequence_length']}}}"
    yield (
        f"training: {{output_dir: runs/{name}, precision: {training['precision']}, "
        f"checkpointing: {training['checkpointing']}}}"
    )
    yield "```"
    if recipes:
        yield ""
        yield "Recipes with more keys, for one GPU or several:"
        yield ""
        yield "```bash"
        for preset in dict.fromkeys(recipe.preset for _, recipe in recipes):
            first = next(name for name, recipe in recipes if recipe.preset == preset)
            yield f"shardwise init --recipe {first} --data corpus/*.jsonl"
        yield "```"


def memory(name: str) -> Iterator[str]:
    """Yield what the planner says of each published shape, by method."""
    if not shapes_of(name):
        yield "No shape of a published model comes with the package; ask for a folder:"
        yield ""
        yield "```bash"
        yield f"shardwise plan MODEL --devices {EIGHT}"
        yield "```"
        return
    yield (
        f"Planned peaks on a GPU: rows of {LENGTH:,} tokens, one at a time, all layers recomputed. "
        "In full: weights and AdamW in float32, on 8 GPUs; the others on one."
    )
    yield ""
    yield f"| | {' | '.join(METHODS)} |"
    yield f"|---|{'---:|' * len(METHODS)}"
    for preset in shapes_of(name)[:MOST]:
        cells = [_peak(preset, devices, **choices) for devices, choices in METHODS.values()]
        yield f"| `{preset}` | {' | '.join(cells)} |"
    yield ""
    yield "```bash"
    yield f"shardwise plan {shapes_of(name)[-1]} --devices {EIGHT}    # the best layout there"
    yield "```"


def _peak(preset: str, devices: str, base: Any = "none", full: bool = False) -> str:
    cfg = RunConfig(
        Model(
            str(presets.MODELS / preset),
            init="random",
            dtype="float32" if full else "bfloat16",
            base=base,
        ),
        Data("any", sequence_length=LENGTH),
        Training(
            "any",
            global_batch_size=8,
            micro_batch_size=1,
            precision="bfloat16",
            checkpointing="full",
        ),
        parallel=Parallel("fsdp2" if full else "single"),
        lora=None if full else Lora(r=16, alpha=32),
    )
    try:
        choice, _ = explain(Question(cfg, cluster_of(devices, 1, None)))
    except UserError:
        return "refused"
    return size(choice.memory.total) + ("" if choice.fits else ", does not fit")


def serving(name: str) -> Iterator[str]:
    """Yield which servers read an adapter, and what to do for all others."""
    for server in SERVERS.values():
        if linears := server.linears.get(name):
            ends = dict.fromkeys(linear.rpartition(".")[2] for linear in linears)
            yield (
                f"- `export --for {server.name}` writes adapters for {server.name} "
                f"{server.version}, which reads them on `{'`, `'.join(ends)}`."
            )
    yield "- `export --merge` writes a model folder, which whatever serves the base can load."
    yield ""
    yield "See [serving](../guides/serving.md)."


def proven(name: str) -> Iterator[str]:
    """Yield the layouts that the committed matrix has proven."""
    cells = json.loads((ROOT / "results" / "parity.json").read_text(encoding="utf-8"))["cells"]
    own = [cell for cell in cells if cell["family"] == name and cell["status"] == "ok"]
    lora, full = (
        {cell["layout"] for cell in own if cell["adapter"] == kind} for kind in ("lora", "full")
    )
    yield "In the [parity matrix](../concepts/parity.md) these layouts equal one process:"
    for words, layouts in (
        ("with LoRA and in full", lora & full),
        ("with LoRA", lora - full),
        ("in full", full - lora),
    ):
        if layouts:
            yield f"- {words}: `{'`, `'.join(sorted(layouts))}`"


def pages() -> Iterator[tuple[Path, str]]:
    """Yield each page's file and its text."""
    yield FOLDER / INDEX, index()
    for name in FAMILIES:
        yield FOLDER / f"{name}.md", page(name)


def main() -> int:
    """Write the pages, or with --check return 1 where one is not what the code says."""
    new = dict(pages())
    old = {path: path.read_text(encoding="utf-8") for path in FOLDER.glob("*.md")}
    stale = sorted(path.name for path in old.keys() | new.keys() if old.get(path) != new.get(path))
    if "--check" not in sys.argv:
        for path, text in new.items():
            path.write_text(text, encoding="utf-8")
        for path in old.keys() - new.keys():
            path.unlink()
    if stale:
        print(f"changed: {', '.join(stale)}")
    return int("--check" in sys.argv and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
