"""The command `shardwise report`."""

from argparse import ArgumentParser, Namespace

from shardwise.commands.command import Command
from shardwise.config import UserError


def run(args: Namespace) -> int:
    """Write a bench's report and print where it is, or print two benches side by side."""
    from rich.console import Console

    from shardwise.lab.report.compare import compare
    from shardwise.lab.report.page import write_report

    if (args.folder is None) == (args.compare is None):
        raise UserError("give one bench folder, or --compare A B; see shardwise report --help")
    if args.compare is None:
        print(write_report(args.folder, args.out))
        return 0
    if args.out is not None:
        raise UserError("--compare prints to the terminal; leave --out out")
    Console().print(compare(*args.compare), soft_wrap=True)
    return 0


def _add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "folder", nargs="?", metavar="DIR", help="the folder of a bench, finished or not"
    )
    parser.add_argument(
        "-o", "--out", metavar="PAGE.html", help="where to write it (default DIR/report.html)"
    )
    parser.add_argument(
        "--compare", nargs=2, metavar=("A", "B"), help="print B against A, regressions first"
    )


COMMAND = Command(
    "report",
    "Show what a bench measured. Write one self-contained HTML page, with report.md and "
    "figures/ beside it, or compare two benches.",
    _add_arguments,
    run,
)
