"""The command `shardwise split`."""

from argparse import ArgumentParser, Namespace
from dataclasses import replace
from pathlib import Path

from shardwise.base.layouts import fewest_ranks
from shardwise.commands.command import Command, add_run_file, show, with_preset
from shardwise.config.run_file import load_config


def run(args: Namespace) -> int:
    """Print where a run's model is cut, and at what costs; `--profile` measures these first."""
    cfg = load_config(args.run, args.overrides)
    if not args.profile:
        cfg = with_preset(cfg)
    from rich.console import Console
    from transformers.utils import logging

    from shardwise.lab.drawing.text_chart import text_chart
    from shardwise.lab.planner.profile import measure
    from shardwise.lab.planner.split_view import (
        FILES,
        make_folder,
        plan,
        stages_table,
        summary,
        write_files,
    )
    from shardwise.launch.local import start_processes

    logging.set_verbosity_error()
    if args.out is not None:
        make_folder(Path(args.out))
    if args.profile:
        # A limit that the guessed costs exceed may be met by the measured ones.
        plan(replace(cfg, parallel=replace(cfg.parallel, memory_limit_gib=None)), args.nproc)
        nproc = args.nproc or fewest_ranks(cfg.parallel)
        if code := measure(cfg, nproc, start_processes):
            return code
    planned = plan(cfg, args.nproc)
    console = Console()
    console.print(stages_table(planned))
    more = [] if args.out is not None else ["-o DIR draws it, and writes it for Perfetto"]
    show(console, [*text_chart(planned.drawn), *more, "", *summary(planned)])
    if args.out is not None:
        write_files(planned, Path(args.out))
        print(f"wrote {', '.join(FILES)} to {args.out}")
    return 0


def _add_arguments(parser: ArgumentParser) -> None:
    add_run_file(parser)
    parser.add_argument(
        "--profile",
        action="store_true",
        help="first measure this model on this machine; later runs use the measurement too",
    )
    parser.add_argument(
        "--nproc", type=int, metavar="N", help="processes of the run (default: the fewest)"
    )
    parser.add_argument(
        "-o", "--out", metavar="DIR", help="write split.json, split.svg and trace.json there"
    )


COMMAND = Command(
    "split",
    "Show where a pipeline's model is cut. Print the stages of a run with parallel.pp, their "
    "predicted time and memory, the bubble, and the gain over other splits; train nothing.",
    _add_arguments,
    run,
)
