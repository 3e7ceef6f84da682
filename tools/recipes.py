"""Write docs/guides/recipes.md from the recipes: `python -m tools.recipes`; `--check` compares."""

from __future__ import annotations

import itertools
import sys
from itertools import groupby
from pathlib import Path

from shardwise.assembly.describe import describe
from shardwise.config import Model, RunConfig
from shardwise.config.presets import MODELS, Recipe, recipes, sections_of
from shardwise.config.run_file import parse_config
from shardwise.lab.planner.memory import state_bytes
from shardwise.lab.planner.share import boundaries_of, share_of
from shardwise.models.load import build_meta, read_config

PAGE = Path(__file__).parents[1] / "docs" / "guides" / "recipes.md"
HEAD = """\
# Recipes

*Is there a run file for my model?*

This page lists the published models for which `shardwise init` writes a run file, and what each
layout needs. A recipe is named by its model and its layout:

```bash
shardwise init --recipe qwen3_5-2b-fsdp2 --data texts/*.jsonl    # writes run.yaml
shardwise init --recipe qwen3_5-2b-fsdp2 small.yaml --model /models/Qwen3.5-2B
shardwise init --list
```

Without `--data` a few sentences are written too, on which the run can be tried. `--data` finds the
[format](data.md) of files by itself. `shardwise plan`, `prove`, `split` and `train --dry-run` take
the shape of a recipe's model from the package, so they need neither weights nor a network.

All recipes fine-tune with LoRA of rank 16, on weights in bfloat16 and rows of 2,048 tokens. Each
key in the file has its description above it, and the first lines give the command that trains.

The table gives the GPUs of a recipe, and the GiB of weights, gradients and optimizer states on the
GPU that holds most. These follow from [formulas](../../src/shardwise/lab/planner/memory.py) and the
published shape of the model. **Activations come on top**: they grow with `data.sequence_length` and
`training.micro_batch_size`. A layout is left out where the states alone exceed a GPU of 80 GB.

"""
TAIL = """
Every layout is [proven](../concepts/parity.md) for the model's family at a small size, and
[`shardwise prove`](proving.md) is run on every recipe with the published shape made small. No
recipe has been run on GPUs at its full size, so treat batch sizes and learning rates as a start.

This page is written by `tools/recipes.py` from `src/shardwise/config/presets/recipes.yaml`.
"""
LAYOUTS = ("one-gpu", "fsdp2", "tp", "pp")


def page() -> str:
    """Return the whole page."""
    lines = [
        "| model | weights | parameters | `one-gpu` | `fsdp2` | `tp` | `pp` |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for preset, group in groupby(recipes().values(), key=lambda recipe: recipe.preset):
        by_layout = {recipe.layout: recipe for recipe in group}
        path = next(iter(by_layout.values())).path
        cells = [cell(by_layout[name]) if name in by_layout else "–" for name in LAYOUTS]
        count = f"{num_parameters(preset) / 1e9:.2f} B"
        lines.append(f"| `{preset}` | {path} | {count} | {' | '.join(cells)} |")
    pairs = [f"`{name}` ({cell(one)})" for name, one in recipes().items() if one.layout == "dpo"]
    lines += ["", f"Two learn from [pairs of answers](preferences.md): {' and '.join(pairs)}."]
    return HEAD + "\n".join(lines) + "\n" + TAIL


def cell(recipe: Recipe) -> str:
    """Return the GPUs of a recipe, and the GiB of states on one of them."""
    return f"{recipe.num_gpus} × {recipe.gib:.1f}"


def config_of(recipe: Recipe) -> RunConfig:
    """Return the run of a recipe with its preset's shape in place of the model, and no data."""
    sections = sections_of("fine_tuning")
    sections["model"]["path"] = str(MODELS / recipe.preset)
    sections["data"]["train"] = sections["training"]["output_dir"] = "unused"
    return parse_config({**sections, "parallel": recipe.parallel})


def gib_of(recipe: Recipe) -> float:
    """Return the GiB of weights, gradients and optimizer states on the rank with the most."""
    return round(most_state_bytes(config_of(recipe), recipe.num_gpus) / 2**30, 1)


def most_state_bytes(cfg: RunConfig, num_ranks: int) -> int:
    """Return the bytes of weights, gradients and optimizer states on the rank with the most."""
    run = describe(cfg, num_ranks)
    boundaries, most = boundaries_of(cfg, run), 0
    for place in itertools.product(*map(range, run.sizes.values())):
        coordinates = dict(zip(run.sizes, place, strict=True))
        share = share_of(cfg, run, coordinates, boundaries)
        most = max(most, sum(state_bytes(cfg, share, run.sizes, coordinates).values()))
    return most


def num_parameters(preset: str) -> int:
    """Return the number of parameters of a preset."""
    model = Model(str(MODELS / preset), init="random")
    return build_meta(model, read_config(model)).num_parameters()


def main() -> None:
    """Write the page, or say whether it is up to date."""
    if "--check" not in sys.argv:
        PAGE.write_text(page(), encoding="utf-8")
        print(PAGE)
    elif wrong := [name for name, one in recipes().items() if one.gib != gib_of(one)]:
        sys.exit(f"recipes.yaml: gib of {', '.join(wrong)} is not what the formulas say")
    elif PAGE.read_text(encoding="utf-8") != page():
        sys.exit(f"{PAGE} is out of date; run python -m tools.recipes")


if __name__ == "__main__":
    main()
