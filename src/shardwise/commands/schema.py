"""The command `shardwise schema`."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

from shardwise.commands.command import Command
from shardwise.config import UserError
from shardwise.presets.compose import schema_text


def run(args: Namespace) -> int:
    """Print the JSON schema of a run file, or write it to a file."""
    if args.out is None:
        print(schema_text(), end="")
        return 0
    try:
        Path(args.out).write_text(schema_text(), encoding="utf-8")
    except (OSError, ValueError) as error:  # a null byte in a name raises ValueError
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(
            f"{args.out}: cannot be written ({reason}); give the path of a file"
        ) from None
    print(f"wrote {args.out}")
    return 0


def _add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "-o", "--out", metavar="FILE", help="write the schema there, in place of what is there"
    )


COMMAND = Command(
    "schema",
    "Print the JSON schema of a run file. An editor completes and checks run files with it.",
    _add_arguments,
    run,
)
