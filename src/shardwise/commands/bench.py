"""The command `shardwise bench`."""

import argparse
import os
import sys
from argparse import ArgumentParser, Namespace
from importlib import import_module
from pathlib import Path

from shardwise.commands.command import Command
from shardwise.config import require

LAUNCHERS = {
    "local": "this machine, in rounds (the default)",
    "ray": "a Ray cluster, a task for each cell",
    "slurm": "a Slurm cluster, a job for each cell",
}
"""Where cells may run. Jobs of cells are submitted by the module of that name in `benchmark`.

That of slurm has `script`, what `--dry-run` prints, `run`, which submits the cells and returns the
exit code, and `name_of_job`, what a record says of a job with these environment variables. The
first two take the sweep file, the folder, and the patterns of `--only` and `--rerun`.
"""


def run(args: Namespace) -> int:
    """Run a sweep, or submit its cells, and print its rows.

    Returns 0, 1 where no cell succeeded, or 128 + the signal that ended it.
    """
    if args.on in ("local", "ray"):
        require(args.cell is None, "--cell is for what is submitted; give --on slurm")
        if args.dry_run:
            from shardwise.lab.benchmark.progress import plan_table
            from shardwise.lab.benchmark.runner import select

            sweep, selected, _ = select(args.sweep, Path(args.out), args.only, args.rerun)
            print(plan_table(selected, sweep.record.rounds))
            return 0
        return _run_here(args)
    launcher = import_module(f"shardwise.lab.benchmark.{args.on}")
    what = args.sweep, args.out, args.only, args.rerun
    if args.cell is not None:
        return _run_here(args, launcher.name_of_job(os.environ))
    if args.dry_run:
        print(launcher.script(*what), end="")
        return 0
    return launcher.run(*what)


def _run_here(args: Namespace, job: str | None = None) -> int:
    """Run the selected cells in rounds, or the one cell of a job."""
    from shardwise.lab.benchmark.progress import result_table
    from shardwise.lab.benchmark.runner import Interrupted, run_cell
    from shardwise.lab.benchmark.runner import bench as run_bench

    engine = None
    if args.on == "ray":
        from shardwise.lab.benchmark.ray import on_ray

        engine = on_ray()
    try:
        if job is None:
            records = run_bench(args.sweep, args.out, args.only, args.rerun, engine=engine)
        else:
            records = [run_cell(args.out, args.cell, job)]
    except Interrupted as interrupted:
        command = "the same command without --rerun" if args.rerun else "the same command"
        print(f"{interrupted}; {command} resumes it, with --out {args.out}", file=sys.stderr)
        return 128 + interrupted.number
    print(f"{result_table(records)}\nlosses are compared by: shardwise report {args.out}")
    return 0 if any(record.status == "ok" for record in records) else 1


def _add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "sweep", metavar="SWEEP.yaml", help="the sweep file: a base run and axes that vary it"
    )
    parser.add_argument(
        "--out", required=True, metavar="DIR", help="folder for everything that the bench writes"
    )
    for option, text in (
        ("--only", "run only the cells whose id matches one of these patterns, such as 'ddp-*'"),
        ("--rerun", "discard the results of the matching cells, and run them from scratch"),
    ):
        parser.add_argument(option, nargs="+", action="extend", default=[], metavar="ID", help=text)
    parser.add_argument(
        "--on",
        choices=tuple(LAUNCHERS),
        default="local",
        help="; ".join(f"{name}: {where}" for name, where in LAUNCHERS.items()),
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print the cells and their runs, or what would be submitted, and start nothing",
    )
    parser.add_argument("--cell", help=argparse.SUPPRESS)  # what a job of `--on` runs


COMMAND = Command(
    "bench",
    "Compare strategies, or anything else, on equal work. The cells of the sweep run in "
    "rounds, each run in a process of its own. The same command resumes a bench.",
    _add_arguments,
    run,
)
