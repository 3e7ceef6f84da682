"""The command `shardwise plan`."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from dataclasses import replace
from pathlib import Path

from shardwise.base.safety import check_output, write_output
from shardwise.commands.command import OVERRIDE, Command, show
from shardwise.commands.plan_request import (
    not_taken,
    question_of,
    sections_of,
    wanted_layout,
    with_published,
    write_run_file,
)
from shardwise.config import UserError, require


def run(args: Namespace) -> int:
    """Print the layouts that fit and train fastest, or the arithmetic of one."""
    args = with_published(args)
    require(args.top >= 1, f"--top is {args.top}; give at least 1")
    for option in ("write", "html"):
        check_can_write(option, getattr(args, option))
    sections, fixed = sections_of(args)
    from rich.console import Console
    from transformers.utils import logging

    from shardwise.base.words import size
    from shardwise.lab.planner import plan_page
    from shardwise.lab.planner.cluster import cluster_of
    from shardwise.lab.planner.exact import usable_bytes
    from shardwise.lab.planner.search import search, with_smaller_base

    cluster = cluster_of(args.devices, args.nodes, args.link)
    logging.set_verbosity_error()
    question = question_of(sections, fixed, cluster, args.run)
    if args.explain is not None:
        question = replace(question, wanted=wanted_layout(args.explain))
    if args.html is not None:
        check_output(args.html, "--html")
    answer = search(question, args.top)
    # With --json nothing else goes to standard output.
    console = Console(stderr=args.json)
    if args.explain is not None:
        fixed |= {f"parallel.{key}" for key in sections.get("parallel") or {}}
    if Path(args.run).is_file() and (keys := not_taken(sections, fixed)):
        devices = f"--devices {args.devices}" + f" --nodes {args.nodes}" * (args.nodes > 1)
        line = (
            f"searched, not taken from {args.run}: {', '.join(keys)}; give one as "
            f"--{keys[0]}=VALUE to keep it, or plan the file as it stands with shardwise train "
            f"{args.run} --dry-run {devices}"
        )
        show(console, [line])
    if args.json:
        from shardwise.base.records.record import dumps

        print(dumps(plan_page.as_data(answer), indent=1))
    elif args.explain is None:
        show(console, plan_page.overview(answer))
    elif (choice := answer.explained) is not None:
        show(console, plan_page.details(choice, question, answer.subject))
    if args.html is not None:
        from shardwise.lab.report.plan import page

        write_output(args.html, page(plan_page.page_data(answer)))
        show(console, [f"wrote {args.html}"])
    if not answer.choices:
        if (least := answer.explained) is None:  # the last refusal is of a whole run
            raise UserError(["no layout of this run was found", *answer.refused.values()][-1])
        ways = ["more --devices", "a shorter --sequence"]
        if "training.checkpointing" in fixed and question.cfg.training.checkpointing == "none":
            ways.insert(0, "--training.checkpointing=full")
        if question.cfg.lora is None:
            ways.append("--lora in place of --full")
        advice = f"give {', '.join(ways[:-1])}, or {ways[-1]}"
        if (smaller := with_smaller_base(question)) is not None:
            needed = size(smaller.best.memory.total)
            option = f"--model.base={smaller.question.cfg.model.base}"
            advice = f"with {option} {smaller.best.title} fits in {needed}; or {advice}"
        raise UserError(
            f"nothing fits on {cluster.num_devices} x {cluster.device.name}: the least that was "
            f"found is {least.title} ({least.details}), which "
            f"{plan_page.needs(least.memory.total, usable_bytes(question))}; {advice}"
        )
    if args.write is not None:
        for path in write_run_file(Path(args.write), args.run, sections, answer):
            show(console, [f"wrote {path}"])
    return 0


def check_can_write(option: str, name: str | None) -> None:
    """Raise UserError where a file cannot be written: it is written after the search."""
    if name is None:
        return
    path = Path(name)
    require(path.parent.is_dir(), f"--{option} {name}: no folder {path.parent}; make it first")
    require(not path.is_dir(), f"--{option} {name} is a folder; name a file")
    if option == "write":
        require(not path.exists(), f"--write {name} exists; it is kept; give another FILE")


def _add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "run",
        metavar="MODEL|RUN.yaml",
        help="a folder with config.json, a preset, a hub id, a run file, or published:NAME for a "
        f"layout of others (docs/guides/published-layouts.md); arguments {OVERRIDE} replace "
        "values, and a layout's key that they set is not searched",
    )
    parser.add_argument(
        "--devices", metavar="NxNAME", help="devices of a node, such as 8xH100-80GB"
    )
    parser.add_argument("--nodes", type=int, metavar="N", help="number of nodes (default 1)")
    parser.add_argument(
        "--link",
        metavar="NAME",
        help="between nodes, such as 400Gbps, or within a node, such as PCIe4",
    )
    parser.add_argument("--sequence", metavar="TOKENS", help="tokens in a row, such as 32K")
    parser.add_argument(
        "--tokens-per-step", metavar="TOKENS", help="tokens of a global batch, such as 1M (2^20)"
    )
    parser.add_argument("--lora", metavar="r=N", help="train adapters of this rank (default 16)")
    parser.add_argument("--full", action="store_true", help="train all weights")
    parser.add_argument("--precision", choices=("float32", "bfloat16"), help="dtype of products")
    parser.add_argument("--top", type=int, default=5, metavar="N", help="layouts shown (default 5)")
    parser.add_argument("--explain", metavar="LAYOUT", help="only this layout, e.g. fsdp2-tp:8-sp")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.add_argument("--write", metavar="FILE", help="write the best layout as a run file")
    parser.add_argument("--html", metavar="FILE", help="draw everything on one page")


COMMAND = Command(
    "plan",
    "Say beforehand which layout to take. Print the memory, time and MFU of the best layouts of a "
    "model on some devices, and why others are worse; needs no weights and no GPU.",
    _add_arguments,
    run,
)
