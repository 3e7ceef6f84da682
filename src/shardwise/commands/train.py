"""The command `shardwise train`."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace

from shardwise.commands.command import Command, add_run_file
from shardwise.launch.local import launch
from shardwise.run_file import load_config


def run(args: Namespace) -> int:
    """Train."""
    overrides = args.overrides
    if args.resume is not None:
        overrides = [*overrides, f"--training.resume={json.dumps(args.resume)}"]
    return launch(load_config(args.run, overrides), args.nproc)


def _add_arguments(parser: ArgumentParser) -> None:
    add_run_file(parser)
    parser.add_argument(
        "--nproc", type=int, metavar="N", help="processes to start on this machine (default 1)"
    )
    parser.add_argument(
        "--resume",
        metavar="WHERE",
        help="where to resume: latest, latest-good (the newest undamaged checkpoint), auto (the "
        "same, or from scratch where there is none), or a checkpoint's folder",
    )


COMMAND = Command(
    "train",
    "Train as a run file describes. Under torchrun or srun, join the processes that it has "
    "started.",
    _add_arguments,
    run,
)
