"""The command `shardwise train`."""

from argparse import ArgumentParser, Namespace
from dataclasses import replace

from shardwise.commands.command import (
    Command,
    add_resume,
    add_run_file,
    overrides_of,
    show,
    with_preset,
)
from shardwise.config import RunConfig, require
from shardwise.config.run_file import load_config


def run(args: Namespace) -> int:
    """Train."""
    cfg = load_config(args.run, overrides_of(args))
    for option in ("devices", "link"):
        is_given = getattr(args, option) is not None
        require(not is_given or args.dry_run, f"--{option} is for --dry-run; leave it out")
    if args.dry_run:
        require(
            args.devices is None or args.nproc is None,
            "--devices says how many processes a node has; leave --nproc out",
        )
        require(args.nproc is None or args.nproc >= 1, f"--nproc is {args.nproc}; give at least 1")
        return dry_run(cfg, args.devices, args.nproc or 1, args.nodes, args.link)
    from shardwise.commands.library import LOOP
    from shardwise.launch.local import launch

    return launch(cfg, args.nproc, LOOP)


def dry_run(
    cfg: RunConfig, devices: str | None, nproc: int, nodes: int, link: str | None = None
) -> int:
    """Print what the run needs and takes on these devices; return 3 where it does not fit, and 0
    where that is uncertain.

    By default they are processes of this machine, as `shardwise calibrate` has measured it.
    """
    from rich.console import Console
    from transformers.utils import logging

    from shardwise.lab.planner import HERE
    from shardwise.lab.planner.candidates import Question
    from shardwise.lab.planner.cluster import cluster_of
    from shardwise.lab.planner.exact import explain
    from shardwise.lab.planner.plan_page import details

    logging.set_verbosity_error()
    cluster = cluster_of(devices or HERE, nodes, link)
    if devices is None:
        cluster = replace(cluster, per_node=nproc)
    question = Question(with_preset(cfg), cluster)
    choice, subject = explain(question)
    show(Console(), details(choice, question, subject))
    return 3 if choice.fit == "does not fit" else 0


def _add_arguments(parser: ArgumentParser) -> None:
    add_run_file(parser)
    parser.add_argument(
        "--nproc", type=int, metavar="N", help="processes to start on this machine (default 1)"
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print the memory and time of this run, as shardwise plan does, and train nothing; "
        "the exit code is 3 where it does not fit",
    )
    parser.add_argument(
        "--devices", metavar="NxNAME", help="for --dry-run, such as 8xH100-80GB (default: here)"
    )
    parser.add_argument(
        "--nodes", type=int, default=1, metavar="N", help="for --dry-run: nodes of these devices"
    )
    parser.add_argument(
        "--link",
        metavar="NAME",
        help="for --dry-run: between nodes, such as 400Gbps, or within a node, such as PCIe4",
    )
    add_resume(parser)


COMMAND = Command(
    "train",
    "Train as a run file describes. Under torchrun or srun, join the processes that it has "
    "started.",
    _add_arguments,
    run,
)
