"""What a command is, and the options that several commands share."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from typing import NamedTuple

OVERRIDE = "--section.key=value"


class Command(NamedTuple):
    """A subcommand of `shardwise`. Its modules import torch and others inside `run` alone."""

    name: str
    text: str
    """What it does. The first sentence stands in the list of commands."""
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
