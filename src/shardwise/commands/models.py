"""The command `shardwise models`."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace

from shardwise.commands.command import Command
from shardwise.config import Model


def run(args: Namespace) -> int:
    """Print the families that are proven, or the layers of one model."""
    from rich.console import Console
    from transformers.utils import logging

    from shardwise.models.catalogue import families_table, model_table

    logging.set_verbosity_error()  # its advice is on training
    # A file or a pipe has no width: names stay whole there, so that grep finds them.
    console = Console(width=None if sys.stdout.isatty() else 1_000)
    console.print(families_table() if args.path is None else model_table(Model(args.path)))
    return 0


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
