"""The command `shardwise check`."""

from argparse import ArgumentParser, Namespace

from shardwise.commands.command import Command, show
from shardwise.config import Model


def run(args: Namespace) -> int:
    """Print what an adapter reaches and what of it would do nothing; return 1 if anything would."""
    from rich.console import Console
    from transformers.utils import logging

    from shardwise.models.adapters.coverage import audit

    logging.set_verbosity_error()
    result = audit(args.adapter, Model(path=args.model))
    console = Console()
    console.print(result.table())
    lines = [*(result.findings or ["all of it takes effect"]), *result.notes]
    show(console, [f"- {line}" for line in lines])
    return 1 if result.findings else 0


def _add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("adapter", metavar="ADAPTER", help="the folder of a PEFT adapter")
    parser.add_argument("model", metavar="MODEL", help="its model: a folder or hub id")


COMMAND = Command(
    "check",
    "Check a PEFT adapter against its model. Print the kinds of layers that it reaches and what of "
    "it would do nothing: names that match nothing, factors of zeros, a scale of 0. The exit code "
    "is then 1.",
    _add_arguments,
    run,
)
