"""The command: parse the arguments, call, print."""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from shardwise import __version__
from shardwise.config import Model, UserError
from shardwise.keys import known_keys
from shardwise.launch.local import launch, start_processes
from shardwise.process.ending import report_error
from shardwise.run_file import load_config

OVERRIDE = "--section.key=value"


class Parser(argparse.ArgumentParser):
    """argparse's parser, whose errors are reported as every other mistake of the user is."""

    def error(self, message: str) -> NoReturn:
        """Raise UserError with the message of argparse."""
        raise UserError(f"{message}; see {self.prog} --help")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line (default: this process's) and return its exit code.

    0 success; 2 the user's mistake, one line on stderr; 3 out of memory; 130 Ctrl-C; 1 anything
    else, with its traceback.
    """
    # Before torch is imported: its CPU allocator else warns when the memory of a run is measured.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    try:
        args = parse(list(sys.argv[1:] if arguments is None else arguments))
        return args.call(args)
    except BaseException as error:  # torch has errors that are no Exception
        return report_error(error)
    finally:
        if arguments is None:
            # The process ends here, and Python would look for garbage in all modules: a second.
            gc.freeze()


def parse(arguments: list[str]) -> Namespace:
    """Return the options, with `overrides` and, as `call`, the function of the command.

    Raises UserError for an argument that the command does not take.
    """
    # Overrides are taken out first: to argparse, a value with a space in it is positional.
    overrides = [argument for argument in arguments if _is_override(argument)]
    options = [argument for argument in arguments if argument not in overrides]
    args, unknown = build_parser().parse_known_args(options)
    if "run" in args:  # the commands that read a run file
        args.overrides = overrides
    else:
        unknown += overrides
    if unknown:
        raise UserError(
            f"unknown argument {unknown[0]}; see shardwise --help (an override is written "
            f"{OVERRIDE})"
        )
    return args


def _is_override(argument: str) -> bool:
    """Return whether an argument sets a key or a whole section of a run file; not `--foo=1`."""
    key, equals, _ = argument.partition("=")
    return key.startswith("--") and bool(equals) and ("." in key or key[2:] in known_keys())


def train(args: Namespace) -> int:
    """Train."""
    overrides = args.overrides
    if args.resume is not None:
        overrides = [*overrides, f"--training.resume={json.dumps(args.resume)}"]
    return launch(load_config(args.run, overrides), args.nproc)


def models(args: Namespace) -> int:
    """Print the families that are proven, or the layers of one model."""
    from rich.console import Console
    from transformers.utils import logging

    from shardwise.models.catalogue import families_table, model_table

    logging.set_verbosity_error()  # its advice is on training
    Console().print(families_table() if args.path is None else model_table(Model(args.path)))
    return 0


def split(args: Namespace) -> int:
    """Print where a run's model is cut, and at what costs; `--profile` measures these first."""
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

    cfg = load_config(args.run, args.overrides)
    logging.set_verbosity_error()
    if args.out is not None:
        make_folder(Path(args.out))
    if args.profile:
        # A limit that the guessed costs exceed may be met by the measured ones.
        plan(replace(cfg, parallel=replace(cfg.parallel, memory_limit_gib=None)), args.nproc)
        nproc = args.nproc or cfg.parallel.pp * cfg.parallel.tp
        if code := measure(cfg, nproc, start_processes):
            return code
    planned = plan(cfg, args.nproc)
    console = Console()
    console.print(stages_table(planned))
    more = [] if args.out is not None else ["-o DIR draws it, and writes it for Perfetto"]
    for line in (*text_chart(planned.drawn), *more, "", *summary(planned)):
        console.print(line, soft_wrap=True, highlight=False, markup=False)
    if args.out is not None:
        write_files(planned, Path(args.out))
        print(f"wrote {', '.join(FILES)} to {args.out}")
    return 0


def report(args: Namespace) -> int:
    """Write a bench's report and print where it is, or print two benches side by side."""
    from rich.console import Console

    from shardwise.report.compare import compare
    from shardwise.report.page import write_report

    if (args.folder is None) == (args.compare is None):
        raise UserError("give one bench folder, or --compare A B; see shardwise report --help")
    if args.compare is None:
        print(write_report(args.folder, args.out))
        return 0
    if args.out is not None:
        raise UserError("--compare prints to the terminal; leave --out out")
    Console().print(compare(*args.compare), soft_wrap=True)
    return 0


def export(args: Namespace) -> int:
    """Merge an adapter into its model; write a folder that transformers loads, with a tokenizer."""
    from shardwise.data.tokenizer import find_tokenizer
    from shardwise.models.adapter import merge_adapter

    model, adapter, out = args.merge
    # An adapter that is no folder is refused by `merge_adapter`.
    tokenizer = find_tokenizer(adapter, model) if Path(adapter).is_dir() else None
    merge_adapter(Model(path=model), adapter, out, tokenizer=tokenizer)
    note = (
        "" if tokenizer else f"; without a tokenizer, since neither {adapter} nor {model} has one"
    )
    print(f"merged {adapter} into {model}: {out}{note}")
    return 0


def bench(args: Namespace) -> int:
    """Run a sweep and print its rows.

    Returns 0, 1 where no cell succeeded, or 128 + the signal that ended it.
    """
    from shardwise.benchmark.progress import result_table
    from shardwise.benchmark.runner import Interrupted
    from shardwise.benchmark.runner import bench as run_bench

    try:
        records = run_bench(args.sweep, args.out, args.only, args.rerun)
    except Interrupted as interrupted:
        command = "the same command without --rerun" if args.rerun else "the same command"
        print(f"{interrupted}; {command} resumes it, with --out {args.out}", file=sys.stderr)
        return 128 + interrupted.number
    print(f"{result_table(records)}\nlosses are compared by: shardwise report {args.out}")
    return 0 if any(record.status == "ok" for record in records) else 1


def build_parser() -> Parser:
    """Return the parser of the subcommands and their options."""
    parser = Parser(
        prog="shardwise",
        description="Fine-tune hybrid-attention language models.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"shardwise {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(call: Callable[[Namespace], int], name: str, text: str) -> Parser:
        summary = text.partition(". ")[0].removesuffix(".")
        command = commands.add_parser(name, help=summary, description=text, allow_abbrev=False)
        command.set_defaults(call=call)
        return command

    def add_run_file(command: Parser) -> None:
        text = f"the run file; arguments {OVERRIDE} replace its values"
        command.add_argument("run", metavar="RUN.yaml", help=text)

    command = add(
        train,
        "train",
        "Train as a run file describes. Under torchrun or srun, join the processes that it has "
        "started.",
    )
    add_run_file(command)
    command.add_argument(
        "--nproc", type=int, metavar="N", help="processes to start on this machine (default 1)"
    )
    command.add_argument(
        "--resume",
        metavar="WHERE",
        help="where to resume: latest, latest-good (the newest undamaged checkpoint), auto (the "
        "same, or from scratch where there is none), or a checkpoint's folder",
    )

    command = add(
        bench,
        "bench",
        "Compare strategies, or anything else, on equal work. The cells of the sweep run in "
        "rounds, each run in a process of its own. The same command resumes a bench.",
    )
    command.add_argument(
        "sweep", metavar="SWEEP.yaml", help="the sweep file: a base run and axes that vary it"
    )
    command.add_argument(
        "--out", required=True, metavar="DIR", help="folder for everything that the bench writes"
    )
    for option, text in (
        ("--only", "run only the cells whose id matches one of these patterns, such as 'ddp-*'"),
        ("--rerun", "discard the results of the matching cells, and run them from scratch"),
    ):
        command.add_argument(
            option, nargs="+", action="extend", default=[], metavar="ID", help=text
        )

    command = add(
        split,
        "split",
        "Show where a pipeline's model is cut. Print the stages of a run with parallel.pp, their "
        "predicted time and memory, the bubble, and the gain over other splits; train nothing.",
    )
    add_run_file(command)
    command.add_argument(
        "--profile",
        action="store_true",
        help="first measure this model on this machine; later runs use the measurement too",
    )
    command.add_argument(
        "--nproc", type=int, metavar="N", help="processes of the run (default pp x tp)"
    )
    command.add_argument(
        "-o", "--out", metavar="DIR", help="write split.json, split.svg and trace.json there"
    )

    command = add(
        models,
        "models",
        "List the proven families, or show one model. Print the kinds of layers, what LoRA "
        "reaches, the layouts, and the tests that prove them.",
    )
    command.add_argument(
        "path", nargs="?", metavar="MODEL", help="a model folder, a hub id, or one of the families"
    )

    command = add(
        report,
        "report",
        "Show what a bench measured. Write one self-contained HTML page, with report.md and "
        "figures/ beside it, or compare two benches.",
    )
    command.add_argument(
        "folder", nargs="?", metavar="DIR", help="the folder of a bench, finished or not"
    )
    command.add_argument(
        "-o", "--out", metavar="PAGE.html", help="where to write it (default DIR/report.html)"
    )
    command.add_argument(
        "--compare", nargs=2, metavar=("A", "B"), help="print B against A, regressions first"
    )

    command = add(export, "export", "Write a trained model in another form.")
    command.add_argument(
        "--merge",
        nargs=3,
        required=True,
        metavar=("MODEL", "ADAPTER", "OUT"),
        help="add the weights of a LoRA adapter to its model and write a model folder",
    )
    return parser
