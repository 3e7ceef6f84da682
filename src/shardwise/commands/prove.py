"""The command `shardwise prove`."""

import sys
import tempfile
from argparse import ArgumentParser, Namespace
from pathlib import Path

from shardwise.base.process.stop import on_signals
from shardwise.base.safety import check_output, write_output
from shardwise.commands.command import Command, add_run_file, show, with_preset
from shardwise.config.run_file import load_config


def run(args: Namespace) -> int:
    """Compare a layout with one process; return 0 where they are equal, 1 where not."""
    cfg = with_preset(load_config(args.run, args.overrides))
    import torch
    from rich.console import Console
    from transformers.utils import logging

    from shardwise.base.records.record import dumps
    from shardwise.lab.proof.prove import (
        MOST_TENSORS,
        as_data,
        differences_table,
        heading,
        prove,
        wrong_lines,
    )
    from shardwise.lab.proof.small_run import small_run

    logging.set_verbosity_error()
    if args.json is not None:
        check_output(args.json, "--json")
    # Before anything uses torch's pool of threads: a process that has one cannot be forked.
    torch.set_num_threads(1)
    console = Console()

    # A signal ends this process as an exception does, so that the folder is removed.
    with (
        on_signals(lambda number: sys.exit(128 + number)),
        tempfile.TemporaryDirectory(prefix="shardwise-") as folder,
    ):
        small = small_run(cfg, args.nproc, args.precision == "run", Path(folder))
        show(console, heading(small))
        proof = prove(small, Path(folder))
    if isinstance(proof, int):
        return proof
    if args.json is not None:
        write_output(args.json, dumps(as_data(proof), indent=1) + "\n")
    console.print(differences_table(proof))
    show(console, [f"note: {text}" for text in proof.weaknesses[:MOST_TENSORS]])
    if proof.wrong:
        show(console, wrong_lines(proof))
        print("NOT equal: the layout does not compute what one process computes")
        return 1
    print("equal: the layout computes what one process computes")
    return 0


def _add_arguments(parser: ArgumentParser) -> None:
    add_run_file(parser)
    parser.add_argument(
        "--nproc",
        type=int,
        metavar="N",
        help="processes of the layout (default: two along an axis)",
    )
    parser.add_argument(
        "--precision",
        choices=("float32", "run"),
        default="float32",
        help="compare in float32 (default), or in the run's own precision",
    )
    parser.add_argument("--json", metavar="FILE", help="write every difference there")


COMMAND = Command(
    "prove",
    "Prove a layout on this CPU. Make the run's model small, run it under the run's layout and in "
    "one process, and print what differs. The exit code is 0 where they are equal, 1 where not.",
    _add_arguments,
    run,
)
