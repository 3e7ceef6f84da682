"""A recipe runs a published model: its size, its layout's rules, proof and memory are checked."""

from __future__ import annotations

import json
import re
import runpy
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from shardwise.base.layouts import layout_of
from shardwise.commands import cli
from shardwise.config.presets import MODELS, STARTER, preset_names, recipes
from shardwise.config.run_file import load_config
from tests.command import run_command
from tests.left_out import some_now

ROOT = Path(__file__).parents[2]
PRESETS = list(dict.fromkeys(recipe.preset for recipe in recipes().values()))
IN_EVERY_TEST_RUN = ("lfm2-1.2b-tp", "nemotron-3-nano-30b-a3b-fsdp2", "llama-3.1-8b-dpo")
"""A recipe of each of two layouts, one of a mixture, one of pairs."""
LAYOUTS = {"one-gpu": "single", "dpo": "fsdp2"}
"""Where a recipe's is named otherwise."""
BILLIONS = {"phi-4": 14.7, "granite-4.0-h-tiny": 7}
"""Published sizes that do not stand in a model's name."""


@cache
def tool() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "tools" / "recipes.py"))


@cache
def proven() -> set[tuple[str, str]]:
    """Families and layouts whose LoRA cells are ok."""
    results = json.loads((ROOT / "results" / "parity.json").read_text(encoding="utf-8"))
    cells = [cell for cell in results["cells"] if cell["adapter"] == "lora"]
    failed = {(cell["family"], cell["layout"]) for cell in cells if cell["status"] != "ok"}
    return {(cell["family"], cell["layout"]) for cell in cells} - failed


@pytest.mark.parametrize("name", recipes())
def test_the_layout_of_a_recipe_is_proven_for_its_family(name):
    recipe = recipes()[name]
    config = json.loads((MODELS / recipe.preset / "config.json").read_text(encoding="utf-8"))
    layout = layout_of(tool()["config_of"](recipe).parallel)
    assert layout == LAYOUTS.get(recipe.layout, recipe.layout)
    # One process is what the others are compared with.
    assert layout == "single" or (config["model_type"], layout) in proven()


@pytest.mark.parametrize("name", some_now(recipes(), IN_EVERY_TEST_RUN))
def test_a_recipe_is_proven_and_states_its_memory(name, tmp_path, monkeypatch):
    """What `init` writes is what `prove` takes, with the published shape and no weights."""
    monkeypatch.chdir(tmp_path)
    recipe = recipes()[name]
    assert cli.main(["init", "--recipe", name]) == 0
    text = Path("run.yaml").read_text(encoding="utf-8")
    (gib,) = re.findall(r"^# A GPU holds at most ([\d.]+) GiB of", text, re.M)
    assert float(gib) == tool()["gib_of"](recipe)
    # Ranks of `tp` may share key/value heads, which fewer of them do not.
    options = [f"--nproc={recipe.num_gpus}"] if recipe.layout == "tp" else []
    done = run_command(["prove", "run.yaml", "--json", "out.json", *options])
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr.startswith(f"note: the shape of {recipe.path} is that of the preset")
    proof = json.loads(Path("out.json").read_text())
    assert proof["equal"]
    assert proof["notes"] == []


@pytest.mark.parametrize("name", [name for name in recipes() if name.endswith("-dpo")])
def test_a_plan_says_that_a_recipe_of_pairs_fits(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["init", "--recipe", name]) == 0
    assert load_config("run.yaml").reference == "base"
    capsys.readouterr()
    device = f"--devices={recipes()[name].num_gpus}xA100-40GB"
    assert cli.main(["plan", "run.yaml", device, "--explain=fsdp2", "--json"]) == 0
    (layout,) = json.loads(capsys.readouterr().out)["choices"]
    assert (layout["layout"], layout["fit"]) == ("fsdp2", "fits")


@pytest.mark.parametrize("preset", some_now(PRESETS, PRESETS[::3]))
def test_a_recipe_fits_the_published_model(preset):
    """The layout's rules hold at its size, and the page has the bytes of the formula."""
    count = tool()["num_parameters"](preset) / 1e9
    named = re.search(r"-([\d.]+)b", preset)
    billions = BILLIONS.get(preset) or float(named[1]) if named else BILLIONS[preset]
    assert count == pytest.approx(billions, rel=0.08)
    (row,) = (line for line in page().splitlines() if line.startswith(f"| `{preset}` |"))
    cells = [cell.strip() for cell in row.split("|")[1:-1]]
    assert cells[2] == f"{count:.2f} B"
    recipe = recipes()[f"{preset}-fsdp2"]
    assert cells[4] == tool()["cell"](recipe)
    assert recipe.gib == tool()["gib_of"](recipe)
    assert len(cells) == 3 + len(tool()["LAYOUTS"])


def page() -> str:
    return tool()["PAGE"].read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_page_of_recipes_is_what_the_formulas_say():
    assert page() == tool()["page"](), "run python -m tools.recipes"


def test_one_tokenizer_suits_every_preset():
    tokenizer = json.loads((STARTER / "tokenizer.json").read_text(encoding="utf-8"))
    for name in preset_names():
        config = json.loads((MODELS / name / "config.json").read_text(encoding="utf-8"))
        assert config["vocab_size"] > max(tokenizer["model"]["vocab"].values())
