"""The command `shardwise calibrate`."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

from shardwise.commands.command import Command
from shardwise.config import require
from shardwise.launch.local import start_processes


def run(args: Namespace) -> int:
    """Measure this machine, write the file, and print its figures."""
    from rich.console import Console
    from transformers.utils import logging

    from shardwise.planner.calibration import default_path, read
    from shardwise.planner.calibration_view import collectives_table, summary
    from shardwise.planner.measure_machine import calibrate
    from shardwise.process.world import num_cores

    nproc = min(2, num_cores()) if args.nproc is None else args.nproc
    require(
        1 <= nproc <= num_cores(),
        f"--nproc is {nproc}; give 1 to {num_cores()}, as many as this machine has cores",
    )
    path = default_path() if args.out is None else Path(args.out)
    require(not path.is_dir(), f"--out {path} is a folder; give the path of a file")
    logging.set_verbosity_error()
    if code := calibrate(nproc, path, start_processes):
        return code
    calibration = read(path)
    console = Console()
    if calibration.collectives:
        console.print(collectives_table(calibration))
    for line in summary(calibration):
        console.print(line, soft_wrap=True, highlight=False, markup=False)
    print(f"wrote {path}")
    return 0


def _add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--nproc", type=int, metavar="N", help="measure up to N busy processes (default 2)"
    )
    parser.add_argument(
        "-o", "--out", metavar="FILE", help="write the file there, not into the cache"
    )


COMMAND = Command(
    "calibrate",
    "Measure this machine once for the planner. Time matrix products, layers, AdamW, memory and "
    "every collective on its CPU cores, in about two minutes, and keep a file in the cache.",
    _add_arguments,
    run,
)
