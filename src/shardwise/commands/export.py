"""The command `shardwise export`."""

import errno
import os
import shutil
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable
from pathlib import Path
from typing import get_args, get_type_hints

from shardwise.base.process.ending import RunError, system_error
from shardwise.commands.command import Command
from shardwise.config import Model, UserError, require

READERS = ("peft", "hf", "vllm", "sglang")
BASES = get_args(get_type_hints(Model)["base"])


def run(args: Namespace) -> int:
    """Write an adapter for one reader, or merged into its model, with a tokenizer beside it."""
    is_new = not (os.path.isdir(args.out) and os.listdir(args.out))
    try:
        return _export(args)
    except UserError as error:
        from shardwise.models.weight_folder import NoWeights

        if not isinstance(error, NoWeights):
            raise
        raise UserError(
            f"{str(error).rpartition('; ')[0]}; give the model with its weights. The base of a run "
            "with model.init: random is saved nowhere: train in full first (lora: null)"
        ) from None
    except Exception as error:
        cause = system_error(error)
        if cause is None or cause.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        if is_new:  # else it was refused, and something else has found no room
            shutil.rmtree(args.out, ignore_errors=True)
        raise RunError(
            f"{args.out}: {cause.strerror}; make room or give another place; nothing is written"
        ) from None


def _export(args: Namespace) -> int:
    from shardwise.data.tokenizer import find_tokenizer
    from shardwise.models.adapters.writing import export_adapter, merge_adapter
    from shardwise.models.copy import copy_model
    from shardwise.models.hub import check_source
    from shardwise.models.weight_folder import unread_note

    model, adapter, out = args.model, args.adapter, args.out
    if args.copy is None:
        require(
            adapter is not None,
            "the following arguments are required: OUT; see shardwise export --help",
        )
    else:
        require(adapter is None, "--copy takes MODEL and OUT; a copy has no adapter")
    require(
        args.base == "none" or args.merge, "--base is for --merge; an adapter alone has no base"
    )
    check_source(model)
    if args.copy is not None:
        _print([unread_note(model), *copy_model(Model(path=model), args.copy, out)])
        print(f"wrote {model} as model.base {args.copy} computes it: {out}")
        return 0
    # An adapter that is no folder is refused when it is read.
    tokenizer = find_tokenizer(adapter, model) if Path(adapter).is_dir() else None
    if args.merge:
        base = Model(path=model, base=args.base)
        _print([unread_note(model), *merge_adapter(base, adapter, out, tokenizer=tokenizer)])
        done = f"merged {adapter} into {model}: {out}"
    else:
        export_adapter(Model(path=model), adapter, out, args.reader, tokenizer)
        done = f"wrote {adapter} for {args.reader}: {out}"
    note = (
        "" if tokenizer else f"; without a tokenizer, since neither {adapter} nor {model} has one"
    )
    print(done + note)
    return 0


def _print(notes: Iterable[str | None]) -> None:
    for note in filter(None, notes):
        print(f"note: {note}")


def _add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="the model that was trained: folder or id")
    parser.add_argument(
        "adapter", metavar="ADAPTER", nargs="?", help="the folder of a PEFT adapter"
    )
    parser.add_argument("out", metavar="OUT", help="a folder to write, which is empty or not there")
    form = parser.add_mutually_exclusive_group(required=True)
    form.add_argument(
        "--merge",
        action="store_true",
        help="write the whole model with the adapter added into its weights; all readers take it",
    )
    form.add_argument(
        "--copy",
        choices=BASES[1:],
        help="write the model without an adapter, with the values that this model.base stores",
    )
    parser.add_argument(
        "--base",
        choices=BASES,
        default="none",
        help="with --merge: add the adapter to the values that this model.base stores",
    )
    form.add_argument(
        "--for",
        dest="reader",
        choices=READERS,
        help="write an adapter with the names that PEFT, transformers' AutoModelForCausalLM, vLLM "
        "or SGLang look for",
    )


COMMAND = Command(
    "export",
    "Write a LoRA adapter for those who serve it. Give it the names that one reader looks for, or "
    "merge it into its model.",
    _add_arguments,
    run,
)
