"""The type of a command, and the options that several commands share."""

from __future__ import annotations

import json
import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from shardwise.config import RunConfig
from shardwise.config.presets import MODELS, preset_of

if TYPE_CHECKING:
    from rich.console import Console

    from shardwise.lab.drawing.text_table import TextTable

OVERRIDE = "--section.key=value"


class Command(NamedTuple):
    """A subcommand of `shardwise`. Its modules import torch and others inside `run` alone."""

    name: str
    text: str
    """A description. Its first sentence stands in the list of commands."""
    add_arguments: Callable[[ArgumentParser], None]
    run: Callable[[Namespace], int]
    """Run it and return the exit code; UserError for the user's mistake."""

    @property
    def summary(self) -> str:
        """Return the first sentence of the text, without its full stop."""
        return self.text.partition(". ")[0].removesuffix(".")


def add_run_file(parser: ArgumentParser) -> None:
    """Add the argument RUN.yaml; the command then takes overrides too, as `args.overrides`."""
    text = f"the run file; arguments {OVERRIDE} replace its values"
    parser.add_argument("run", metavar="RUN.yaml", help=text)
    if is_completing():
        _add_keys(parser)


def with_preset(cfg: RunConfig) -> RunConfig:
    """Return the run with a preset as its model, where a shape is enough and only the hub has it.

    A line on stderr says so. What was downloaded before is read itself.
    """
    preset = preset_of(cfg.model.path)
    if preset is None or os.path.isdir(cfg.model.path):
        return cfg
    from huggingface_hub import try_to_load_from_cache

    if isinstance(try_to_load_from_cache(cfg.model.path, "config.json"), str):
        return cfg
    print(
        f"note: the shape of {cfg.model.path} is that of the preset {preset}; the hub is not asked",
        file=sys.stderr,
    )
    return replace(cfg, model=replace(cfg.model, path=str(MODELS / preset)))


def add_resume(parser: ArgumentParser) -> None:
    """Add the option --resume, which sets `training.resume`: see `overrides_of`."""
    parser.add_argument(
        "--resume",
        metavar="WHERE",
        help="where to resume: latest, latest-good (the newest undamaged checkpoint), auto (the "
        "same, or from scratch where there is none), or a checkpoint's folder",
    )


def overrides_of(args: Namespace) -> list[str]:
    """Return the overrides of a command, with the one that --resume stands for."""
    if args.resume is None:
        return args.overrides
    return [*args.overrides, f"--training.resume={json.dumps(args.resume)}"]


def show(console: Console, parts: Iterable[str | TextTable]) -> None:
    """Print lines as they are, and tables that have rows."""
    for part in parts:
        if isinstance(part, str):
            console.print(part, soft_wrap=True, highlight=False, markup=False)
        elif part.rows:
            console.print(part.for_terminal())


def is_completing() -> bool:
    """Return whether a shell has started this process to complete a command."""
    return "_ARGCOMPLETE" in os.environ  # set by the code of `shardwise completion`


def _add_keys(parser: ArgumentParser) -> None:
    """Add the keys of the run file as options, which are completed in this form alone."""
    from shardwise.config.keys import known_keys
    from shardwise.config.run_file import json_schema

    schema = json_schema()["$defs"]
    for section in known_keys():
        for key, types in schema[section.capitalize()]["properties"].items():
            option = f"--{section}.{key}"
            # The second form is suggested; after it, the value of the first is completed.
            parser.add_argument(option, f"{option}=", choices=_words(types))


def _words(types: dict[str, Any]) -> list[str] | None:
    """Return the words that a key of the run file may be; None where it may be any text.

    After a key that may be any text, files are suggested.
    """
    words: list[str] = []
    for kind in types.get("anyOf", [types]):
        name = kind.get("type")  # a mapping has a reference in place of it
        fixed = kind.get("enum", [kind["const"]] if "const" in kind else [])
        if name == "string" and not fixed:
            return None
        words += fixed or {"boolean": ["true", "false"], "null": ["null"]}.get(name, [])
    return words
