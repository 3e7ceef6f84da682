"""The command `shardwise schema`."""

from argparse import ArgumentParser, Namespace

from shardwise.base.safety import write_output
from shardwise.commands.command import Command
from shardwise.config.presets.compose import schema_text


def run(args: Namespace) -> int:
    """Print the JSON schema of a run file, or write it to a file."""
    if args.out is None:
        print(schema_text(), end="")
        return 0
    write_output(args.out, schema_text())
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
