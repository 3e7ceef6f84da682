"""The command: parse, call, print."""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from shardwise import __version__
from shardwise.config import Model, RunConfig, UserError, known_keys
from shardwise.launch.local import launch, start_processes
from shardwise.process.ending import guarded
from shardwise.run_file import load_config

OVERRIDE = "--section.key=value"


class Parser(argparse.ArgumentParser):
    """argparse, but a mistake is one line, told where every other mistake is."""

    def error(self, message: str) -> NoReturn:
        """Raise UserError with what argparse found."""
        raise UserError(f"{message}; see {self.prog} --help")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line (default: this process's) and return its exit code.

    0 ok; 2 the user's mistake, one line on stderr; 3 out of memory; 130 Ctrl-C; 1 anything else, with its traceback.
    """
    # Before torch is imported: measuring memory makes its CPU allocator warn of blocks that are accounted for.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    try:
        return guarded(lambda: run(list(sys.argv[1:] if arguments is None else arguments)))
    finally:
        if (
            arguments is None
        ):  # the process ends, which would look through all modules for garbage: a second or more
            gc.freeze()


def run(arguments: list[str]) -> int:
    """As `main`, but what goes wrong is raised."""
    # Overrides are taken out first: argparse takes one whose value has a space in it for a positional argument.
    overrides = [argument for argument in arguments if _is_override(argument)]
    args, unknown = build_parser().parse_known_args([a for a in arguments if a not in overrides])
    if args.command not in ("train", "split"):
        unknown += overrides
    if unknown:
        raise UserError(
            f"unknown argument {unknown[0]}; see shardwise --help (an override is written {OVERRIDE})"
        )
    if args.command == "train":
        if args.resume is not None:
            overrides.append(f"--training.resume={json.dumps(args.resume)}")
        return launch(load_config(args.run, overrides), args.nproc)
    if args.command == "split":
        return split(load_config(args.run, overrides), args.nproc, args.profile, args.out)
    if args.command == "models":
        return models(args.path)
    if args.command == "bench":
        return bench(args.sweep, args.out, args.only, args.rerun)
    if args.command == "report":
        return report(args.folder, args.out, args.compare)
    return merge(*args.merge)


def _is_override(argument: str) -> bool:
    """Whether an argument names a key of a run file, or a whole section. `--foo=1` does neither."""
    key, equals, _ = argument.partition("=")
    return key.startswith("--") and bool(equals) and ("." in key or key[2:] in known_keys())


def models(path: str | None) -> int:
    """Print the families that are proven, or the layers of one model."""
    from rich.console import Console
    from transformers.utils import logging

    from shardwise.models.catalogue import families_table, model_table

    logging.set_verbosity_error()  # nothing is trained here, so no advice on that
    Console().print(families_table() if path is None else model_table(Model(path)))
    return 0


def split(cfg: RunConfig, nproc: int | None, profiled: bool, out: str | None) -> int:
    """Print where a run's model is cut and what that is predicted to cost, measured before if asked."""
    from rich.console import Console
    from transformers.utils import logging

    from shardwise.drawing.text_chart import text_chart
    from shardwise.planner.profile import measure
    from shardwise.planner.split_view import (
        FILES,
        make_folder,
        plan,
        stages_table,
        summary,
        write_files,
    )

    logging.set_verbosity_error()
    if out is not None:
        make_folder(Path(out))
    if profiled:
        anyhow = replace(
            cfg, parallel=replace(cfg.parallel, memory_limit_gib=None)
        )  # measured, it may be met
        plan(anyhow, nproc)
        if code := measure(cfg, nproc or cfg.parallel.pp * cfg.parallel.tp, start_processes):
            return code
    planned = plan(cfg, nproc)
    console = Console()
    console.print(stages_table(planned))
    more = [] if out is not None else ["-o DIR draws it, and writes it for Perfetto"]
    for line in (*text_chart(planned.drawn), *more, "", *summary(planned)):
        console.print(line, soft_wrap=True, highlight=False, markup=False)
    if out is not None:
        write_files(planned, Path(out))
        print(f"wrote {', '.join(FILES)} to {out}")
    return 0


def report(folder: str | None, out: str | None, compared: list[str] | None) -> int:
    """Write a bench's report and print where it is, or print two benches side by side."""
    from rich.console import Console

    from shardwise.report.compare import compare
    from shardwise.report.page import write_report

    if (folder is None) == (compared is None):
        raise UserError("give one bench folder, or --compare A B; see shardwise report --help")
    if compared is not None:
        if out is not None:
            raise UserError("--compare prints to the terminal; leave --out away")
        Console().print(compare(*compared), soft_wrap=True)
    elif folder is not None:
        print(write_report(folder, out))
    return 0


def merge(model: str, adapter: str, out: str) -> int:
    """Merge an adapter into its model; write a folder that transformers loads, with the tokenizer of either."""
    from shardwise.data.tokenizer import find_tokenizer
    from shardwise.models.adapter import merge_adapter

    tokenizer = find_tokenizer(adapter, model) if Path(adapter).is_dir() else None  # refused below
    merge_adapter(Model(path=model), adapter, out, tokenizer=tokenizer)
    without = (
        "" if tokenizer else f"; without a tokenizer, as neither {adapter} nor {model} has one"
    )
    print(f"merged {adapter} into {model}: {out}{without}")
    return 0


def bench(sweep: str, out: str, only: Sequence[str], rerun: Sequence[str]) -> int:
    """Run a sweep and print its rows: 0, or 1 where no cell went well; 128 + the signal that ended it."""
    from shardwise.benchmark.progress import result_table
    from shardwise.benchmark.runner import Interrupted
    from shardwise.benchmark.runner import bench as run_bench

    try:
        records = run_bench(sweep, out, only, rerun)
    except Interrupted as interrupted:
        same = "the same command without --rerun" if rerun else "the same command"
        print(f"{interrupted}; {same} goes on, with --out {out}", file=sys.stderr)
        return 128 + interrupted.number
    print(f"{result_table(records)}\nlosses are compared by: shardwise report {out}")
    return 0 if any(record.status == "ok" for record in records) else 1


def build_parser() -> Parser:
    """The subcommands and their options."""
    parser = Parser(
        prog="shardwise",
        description="Fine-tune hybrid-attention language models.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"shardwise {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    train = commands.add_parser(
        "train",
        help="train as a run file says",
        usage=f"shardwise train RUN.yaml [--nproc N] [--resume WHERE] [{OVERRIDE} ...]",
        description="Train as RUN.yaml says. Under torchrun or srun, join the processes that it started.",
        allow_abbrev=False,
    )
    train.add_argument(
        "run", metavar="RUN.yaml", help=f"the run file; {OVERRIDE} replaces a value of it"
    )
    train.add_argument(
        "--nproc", type=int, metavar="N", help="processes to start on this machine (default 1)"
    )

    train.add_argument(
        "--resume",
        metavar="WHERE",
        help="resume: latest, latest-good (the newest that is whole), auto (or from scratch), or a checkpoint's folder",
    )

    bench = commands.add_parser(
        "bench",
        help="compare strategies, or anything else, on equal work",
        description="Run the cells of a sweep file in rounds, each in a process of its own. Started again with the "
        "same sweep and folder, it goes on.",
        allow_abbrev=False,
    )
    bench.add_argument(
        "sweep", metavar="SWEEP.yaml", help="the sweep file: a base run and axes that vary it"
    )
    bench.add_argument(
        "--out", required=True, metavar="DIR", help="folder for everything the bench leaves"
    )
    for option, told in (
        ("--only", "run only the cells whose id matches one of these patterns, such as 'ddp-*'"),
        ("--rerun", "forget what the matching cells have done, and run them from scratch"),
    ):
        bench.add_argument(option, nargs="+", action="extend", default=[], metavar="ID", help=told)

    split = commands.add_parser(
        "split",
        help="show where a pipeline's model is cut, and what that costs",
        usage=f"shardwise split RUN.yaml [--profile] [--nproc N] [-o DIR] [{OVERRIDE} ...]",
        description="Show the stages of a run with parallel.pp, their predicted time and memory, the bubble, and the "
        "gain over other splits. Nothing is trained.",
        allow_abbrev=False,
    )
    split.add_argument(
        "run", metavar="RUN.yaml", help=f"the run file; {OVERRIDE} replaces a value of it"
    )
    split.add_argument(
        "--profile",
        action="store_true",
        help="measure this model on this machine first; kept for later runs",
    )
    split.add_argument(
        "--nproc",
        type=int,
        metavar="N",
        help="processes of the run (default parallel.pp x parallel.tp)",
    )
    split.add_argument(
        "-o", "--out", metavar="DIR", help="write split.json, split.svg and trace.json there"
    )

    models = commands.add_parser(
        "models",
        help="list the proven families, or show a model's layers, and which tests prove it",
        description="List the proven families: their layer kinds, what LoRA reaches, the layouts and the tests that "
        "prove them. Or show one model.",
        allow_abbrev=False,
    )
    models.add_argument(
        "path", nargs="?", metavar="MODEL", help="a model folder, a hub id, or one of the families"
    )

    report = commands.add_parser(
        "report",
        help="show what a bench measured: one HTML page, figures, a Markdown table",
        usage="shardwise report DIR [-o PAGE.html] | --compare A B",
        description="Write one self-contained page on the bench in DIR, with report.md and figures/ beside it.",
        allow_abbrev=False,
    )
    report.add_argument(
        "folder", nargs="?", metavar="DIR", help="what shardwise bench wrote, finished or not"
    )
    report.add_argument(
        "-o", "--out", metavar="PAGE.html", help="where to write it (default DIR/report.html)"
    )
    report.add_argument(
        "--compare", nargs=2, metavar=("A", "B"), help="print B against A, regressions first"
    )

    export = commands.add_parser(
        "export", help="write a trained model in another form", allow_abbrev=False
    )
    export.add_argument(
        "--merge",
        nargs=3,
        required=True,
        metavar=("MODEL", "ADAPTER", "OUT"),
        help="add a LoRA adapter's weights to its model's and write a model folder",
    )
    return parser
