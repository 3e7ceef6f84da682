"""The command `shardwise plan`."""

from __future__ import annotations

import gc
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.base.safety import check_output, write_output
from shardwise.commands.command import OVERRIDE, Command, show
from shardwise.commands.kept import kept
from shardwise.commands.plan_request import (
    folders_of,
    not_taken,
    question_of,
    sections_of,
    wanted_layout,
    with_published,
    write_run_file,
)
from shardwise.config import UserError, require
from shardwise.lab.drawing.text_table import TextTable

if TYPE_CHECKING:
    from shardwise.lab.planner.search import Answer

OPTIONS = ("devices", "nodes", "link", "top", "explain", "json", "all")
"""The options that an answer depends on, beside the run."""


def run(args: Namespace) -> int:
    """Print the layouts that fit and train fastest, or the arithmetic of one."""
    args = with_published(args)
    require(args.top >= 1, f"--top is {args.top}; give at least 1")
    for option in ("write", "html"):
        check_can_write(option, getattr(args, option))
    if args.html is not None:
        check_output(args.html, "--html")
    sections, fixed = sections_of(args)
    found: Answer | None = None

    def computed() -> list[Any]:
        nonlocal found
        gc.freeze()  # Python's collector would look through all that is imported, many times
        found = searched(args, sections, fixed)
        return [*said(args, fixed, found)]

    read = folders_of(sections, args.devices)
    if read and args.write is None and args.html is None:
        options = [getattr(args, name) for name in OPTIONS]
        parts = kept(["plan", sections, sorted(fixed), options, args.run], read, computed)
    else:
        parts = computed()
    from rich.console import Console

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
    problem, *parts = parts
    if args.json:
        print(*parts)
    else:
        show(console, (x if isinstance(x, str) else TextTable(*x) for x in parts))
    if args.html is not None and found is not None:
        from shardwise.lab.planner import plan_page
        from shardwise.lab.report.plan import page

        write_output(args.html, page(plan_page.page_data(found)))
        show(console, [f"wrote {args.html}"])
    if problem is not None:
        raise UserError(problem)
    if args.write is not None and found is not None:
        for path in write_run_file(Path(args.write), args.run, sections, found):
            show(console, [f"wrote {path}"])
    return 0


def searched(args: Namespace, sections: Mapping[str, Any], fixed: frozenset[str]) -> Answer:
    """Search the layouts of the run of these sections."""
    from transformers.utils import logging

    from shardwise.lab.planner.cluster import cluster_of
    from shardwise.lab.planner.search import search

    cluster = cluster_of(args.devices, args.nodes, args.link)
    logging.set_verbosity_error()
    question = question_of(sections, fixed, cluster, args.run)
    if args.explain is not None:
        question = replace(question, wanted=wanted_layout(args.explain))
    return search(question, args.top)


def said(args: Namespace, fixed: frozenset[str], answer: Answer) -> Iterator[Any]:
    """Yield why nothing fits, None where something does; then what is printed: lines and tables, or
    with --json its text.
    """
    from shardwise.base.records.record import dumps
    from shardwise.lab.planner import plan_page, plan_screen

    choice = answer.explained
    is_tried = args.explain is not None and choice is not None and choice.fit == "uncertain"
    yield None if answer.choices or is_tried else _why_nothing_fits(fixed, answer)
    if args.json:
        yield dumps(plan_page.as_data(answer), indent=1)
    elif args.explain is None and answer.choices and not args.all:
        yield from plan_screen.screen(answer)
    elif args.explain is None:
        yield from plan_page.overview(answer)
    elif choice is not None:
        yield from plan_page.details(choice, answer.question, answer.subject)


def _why_nothing_fits(fixed: frozenset[str], answer: Answer) -> str:
    from shardwise.base.words import size
    from shardwise.lab.planner.exact import usable_bytes
    from shardwise.lab.planner.plan_page import needs
    from shardwise.lab.planner.search import with_smaller_base

    question = answer.question
    if (least := answer.explained) is None:  # the last refusal is of a whole run
        return ["no layout of this run was found", *answer.refused.values()][-1]
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
    return (
        f"nothing fits on {question.num_ranks} x {question.cluster.device.name}: the least that "
        f"was found is {least.title} ({least.details}), which "
        f"{needs(least.memory.total, usable_bytes(question))}; {advice}"
    )


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
    parser.add_argument(
        "--all", action="store_true", help="print the best layouts, changes and simpler ones, too"
    )
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
