"""The command `shardwise data`."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING, Any

from shardwise.base.safety import is_hub_name
from shardwise.base.words import percent
from shardwise.commands.command import Command, add_run_file
from shardwise.config import UserError
from shardwise.config.run_file import load_config

if TYPE_CHECKING:
    import numpy as np
    from rich.console import Console
    from rich.text import Text

    from shardwise.config import RunConfig
    from shardwise.data.preview import Preview
    from shardwise.data.survey import Survey

_DOCUMENTS, _ROWS = 500, 2


def run(args: Namespace) -> int:
    """Print what a run would train on: counts of each source, and rows of the first step."""
    if args.documents < 1 or args.rows < 0:
        raise UserError("--documents and --rows count; give at least 1, and 0 for no rows")
    cfg = load_config(args.run, args.overrides)
    from rich.console import Console
    from transformers.utils import logging

    from shardwise.data.preview import preview
    from shardwise.data.tokenizer import load_tokenizer

    logging.set_verbosity_error()
    is_hub_name(cfg.model.path)
    tokenizer = load_tokenizer(cfg.model, cfg.data.chat_template)
    found = preview(cfg, tokenizer, None if args.all else args.documents, args.rows)
    if args.json:
        import json

        print(json.dumps(found.to_dict()))
        return 0
    # In a file or a pipe no name is cut in two.
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 1_000)
    _print(cfg, found, tokenizer, console)
    return 0


def _print(cfg: RunConfig, found: Preview, tokenizer: Any, console: Console) -> None:
    console.print(f"rows of {cfg.data.sequence_length:,} tokens, packing {cfg.data.packed}")
    for key, surveys in (("train", found.train), ("validation", found.validation)):
        if surveys:
            console.print(_table(f"data.{key}", surveys))
            _print_lines(cfg, surveys, console)
    if epoch := found.epoch(cfg):
        console.print(epoch, soft_wrap=True)
    marks = "" if console.is_terminal else ", which stand between [[ and ]]"
    for number, row in enumerate(found.rows, 1):
        names = found.names(row)
        console.print(f"\nrow {number} of step 1, {_counts(row, names)}{marks}:", soft_wrap=True)
        console.print(_text(row, names, tokenizer, marked=bool(marks)), soft_wrap=True)


def _print_lines(cfg: RunConfig, surveys: list[Survey], console: Console) -> None:
    """Print what a table of sources leaves open."""
    longest = max(surveys, key=lambda survey: survey.longest)
    line = f"longest: {longest.longest:,} tokens, {longest.where}"
    if longest.cut:
        line += f" (data.sequence_length {longest.longest - 1:,} holds it whole)"
    console.print(line, soft_wrap=True)
    if any(survey.scale > 1 for survey in surveys):
        read = sum(survey.read for survey in surveys)
        total = sum(survey.num_documents or survey.read for survey in surveys)
        console.print(f"{read:,} of {total:,} documents were read; --all reads all of them")


def _table(title: str, surveys: list[Survey]) -> Any:
    """Return a table of the sources of a key, and what was read of each."""
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    table.add_column("source", overflow="fold")
    columns = ("documents", "tokens", "targets", "longest", "cut", "left out")
    targets = [survey.mean(survey.targets) for survey in surveys]
    is_mixed = len(surveys) > 1 and all(survey.share is not None for survey in surveys)
    for name in (*columns, "of all targets") if is_mixed else columns:
        table.add_column(name, justify="right")
    for survey, num_targets in zip(surveys, targets):
        is_whole = survey.num_documents in (None, survey.read)
        about = "" if is_whole else "~"
        reasons = ", ".join(f"{n:,} {reason}" for reason, n in survey.left_out.items())
        table.add_row(
            survey.name,
            "?" if survey.num_documents is None else f"{survey.num_documents:,}",
            f"{about}{round(survey.tokens * survey.scale):,}",
            percent(survey.targets / survey.tokens if survey.tokens else 0),
            f"{survey.longest:,}",
            percent(survey.cut / survey.read if survey.read else 0),
            reasons or "0",
            *([percent(num_targets / (sum(targets) or 1))] if is_mixed else []),
        )
    return table


def _counts(row: np.ndarray, names: dict[int, str]) -> str:
    """Return in words what a row [3, T+1] has."""
    num_tokens = int((row[1] >= 0).sum())
    kind, num = next(iter(names.values()), "document").split()[0], len(names)
    num //= 1 + (kind == "pair")
    what = f"{num} {kind}{'s' * (num != 1)}"
    tokens = f"{num_tokens:,} tokens, {row.shape[1] - num_tokens:,} of padding"
    return f"{what}, {tokens}, {int(row[2].sum()):,} targets"


def _text(row: np.ndarray, names: dict[int, str], tokenizer: Any, marked: bool) -> Text:
    """Return the text of a row, in which targets and special tokens can be seen."""
    from rich.text import Text

    from shardwise.data.preview import spans_of

    text, last, was_target = Text(), 0 if names.get(0) == "document 1" else -1, False
    spans = [*spans_of(row, tokenizer), ("", -1, False, False)]
    for words, document, is_target, is_special in spans:
        if marked and was_target and (document != last or not is_target):
            text.append("]]")
            was_target = False
        if document > last:
            text.append(f"\n-- {names[document]} --\n", style="dim")
        if marked and is_target and not was_target:
            text.append("[[")
        style = "bold magenta" if is_special else "green" if is_target else "dim"
        text.append(words, style=f"{style} underline" if is_special and is_target else style)
        last, was_target = document, is_target
    return text


def _add_arguments(parser: ArgumentParser) -> None:
    add_run_file(parser)
    parser.add_argument(
        "--documents",
        type=int,
        default=_DOCUMENTS,
        metavar="N",
        help=f"read so many documents of each source, evenly spaced (default {_DOCUMENTS})",
    )
    parser.add_argument("--all", action="store_true", help="read all documents")
    parser.add_argument(
        "--rows", type=int, default=_ROWS, metavar="N", help=f"rows to print (default {_ROWS})"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


COMMAND = Command(
    "data",
    "Show what a run would train on. It counts documents, tokens, targets, and what is cut or left "
    "out of each source, and prints rows of the first step, in which targets and special tokens "
    "can be seen.",
    _add_arguments,
    run,
)
