"""The command `shardwise bench`."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from shardwise.commands.command import Command

if TYPE_CHECKING:
    from shardwise.benchmark.runner import Engine


def run(args: Namespace) -> int:
    """Run a sweep and print its rows.

    Returns 0, 1 where no cell succeeded, or 128 + the signal that ended it.
    """
    from shardwise.benchmark.progress import result_table
    from shardwise.benchmark.runner import Interrupted
    from shardwise.benchmark.runner import bench as run_bench

    try:
        records = run_bench(args.sweep, args.out, args.only, args.rerun, engine=ON[args.on]())
    except Interrupted as interrupted:
        command = "the same command without --rerun" if args.rerun else "the same command"
        print(f"{interrupted}; {command} resumes it, with --out {args.out}", file=sys.stderr)
        return 128 + interrupted.number
    print(f"{result_table(records)}\nlosses are compared by: shardwise report {args.out}")
    return 0 if any(record.status == "ok" for record in records) else 1


def _ray() -> AbstractContextManager[Engine]:
    from shardwise.benchmark.ray import on_ray

    return on_ray()


ON: dict[str, Callable[[], AbstractContextManager[Engine] | None]] = {
    "local": lambda: None,
    "ray": _ray,
}
"""What `--on` may be, and what runs the cells there."""


def _add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "sweep", metavar="SWEEP.yaml", help="the sweep file: a base run and axes that vary it"
    )
    parser.add_argument(
        "--out", required=True, metavar="DIR", help="folder for everything that the bench writes"
    )
    parser.add_argument(
        "--on",
        choices=tuple(ON),
        default="local",
        help="run the cells one after another on this machine (the default), or as tasks of a Ray "
        "cluster",
    )
    for option, text in (
        ("--only", "run only the cells whose id matches one of these patterns, such as 'ddp-*'"),
        ("--rerun", "discard the results of the matching cells, and run them from scratch"),
    ):
        parser.add_argument(option, nargs="+", action="extend", default=[], metavar="ID", help=text)


COMMAND = Command(
    "bench",
    "Compare strategies, or anything else, on equal work. The cells of the sweep run in "
    "rounds, each run in a process of its own. The same command resumes a bench.",
    _add_arguments,
    run,
)
