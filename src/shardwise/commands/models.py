"""The command `shardwise models`."""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING, Any

from shardwise.commands.command import Command
from shardwise.commands.kept import kept, version_of
from shardwise.config import Model
from shardwise.config.presets import FAMILIES

if TYPE_CHECKING:
    from rich.table import Table


def run(args: Namespace) -> int:
    """Print the families that are proven, or the layers of one model."""
    from rich.console import Console

    path = args.path
    if path is not None:
        answer = kept(["models", path], [path], lambda: computed(path))
    else:
        stored = json.loads(FAMILIES.read_text(encoding="utf-8"))
        answer = stored["table"]
        if any(version_of(name) != version for name, version in stored["versions"].items()):
            answer = kept(["models"], [], computed)
    # A file or a pipe has no width: names stay whole there, so that grep finds them.
    console = Console(width=None if sys.stdout.isatty() else 1_000)
    console.print(drawn(**answer))
    return 0


def computed(path: str | None = None) -> dict[str, Any]:
    """Return the table of a model or, without one, of all families, by building them on meta."""
    from transformers.utils import logging

    from shardwise.models.catalogue import families_table, model_table

    logging.set_verbosity_error()  # its advice is on training
    return families_table() if path is None else model_table(Model(path))


def drawn(
    title: str | None, caption: str, columns: list[str], sections: list[list[list[str]]]
) -> Table:
    """Return a table of `models/catalogue.py` as rich prints it."""
    from rich.box import SIMPLE
    from rich.table import Table

    table = Table(
        title=title,
        caption=caption,
        title_justify="left",
        caption_justify="left",
        box=SIMPLE,
        padding=(0, 1, 0, 0),
    )
    for column in columns:
        table.add_column(column, no_wrap=not column.startswith("LoRA"), overflow="fold")
    for rows in sections:
        for row in rows:
            table.add_row(*row)
        if len(sections) > 1:
            table.add_section()
    return table


def _add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "path", nargs="?", metavar="MODEL", help="a model folder, a hub id, or one of the families"
    )


COMMAND = Command(
    "models",
    "List the proven families, or show one model. Print the kinds of layers, what LoRA "
    "reaches, and the layouts that are proven.",
    _add_arguments,
    run,
)
