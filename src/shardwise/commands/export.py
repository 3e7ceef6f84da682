"""The command `shardwise export`."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

from shardwise.commands.command import Command
from shardwise.config import Model


def run(args: Namespace) -> int:
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


def _add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--merge",
        nargs=3,
        required=True,
        metavar=("MODEL", "ADAPTER", "OUT"),
        help="add the weights of a LoRA adapter to its model and write a model folder",
    )


COMMAND = Command("export", "Write a trained model in another form.", _add_arguments, run)
