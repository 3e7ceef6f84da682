"""The command line: parse the arguments, and run one of `commands/`."""

import argparse
import difflib
import gc
import os
import re
import sys
from argparse import Namespace
from collections.abc import Sequence
from importlib import import_module
from typing import NoReturn

from shardwise.base import __version__
from shardwise.base.process.ending import is_full, report_error
from shardwise.commands.command import OVERRIDE, Command, is_completing
from shardwise.config import UserError, require
from shardwise.config.keys import elsewhere, known_keys, nearest

NAMES = (
    *("init", "data", "plan", "train", "launch", "prove", "bench", "split", "calibrate"),
    *("models", "report", "eval", "check", "export", "schema", "completion"),
)
"""The names in the order in which `shardwise --help` lists them."""

NO_CYCLES = ("init", "models", "plan", "check")
"""Commands that make hardly any cycles. Python would look for them in all modules as these are
imported: a second of five."""


FEW = 3
"""The most choices of an option that are all named where another value is given."""


class Parser(argparse.ArgumentParser):
    """argparse's parser, whose errors are reported as every other mistake of the user is."""

    def error(self, message: str) -> NoReturn:
        """Raise UserError with the message of argparse, and the nearest name that it knows."""
        if found := re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)", message):
            choices = re.findall(r"[\w.-]+", found[2])
            way_out = nearest(found[1], choices, "choices")
            if len(choices) <= FEW:  # "did you mean cpu?" is none where gpu was written for cuda
                way_out = f"give {' or '.join(choices)}"
            message = f"{message[: found.start()]}invalid choice: '{found[1]}'; {way_out}"
        raise UserError(f"{message}; see {self.prog} --help")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line (default: this process's) and return its exit code.

    0 success; 2 the user's mistake, one line on stderr; 3 out of memory; 130 Ctrl-C; 1 anything
    else, with its traceback.
    """
    # Before torch is imported: its CPU allocator else warns when the memory of a run is measured.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        args = parse(given)
        if args.command not in NO_CYCLES:
            return args.call(args)
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            return args.call(args)
        finally:
            if was_enabled:
                gc.enable()
    except BrokenPipeError:  # who reads the output, such as `head`, has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except BaseException as error:  # torch has errors that are no Exception
        return report_error(_of_argument(error, given))
    finally:
        if arguments is None:
            # The process ends here, and Python would look for garbage in all modules: a second.
            gc.freeze()


def parse(arguments: list[str]) -> Namespace:
    """Return the options, with `overrides` and, as `call`, the function of the command.

    Raises UserError for an argument that the command does not take.
    """
    require(not any("\0" in text for text in arguments), "an argument has a NUL; take it out")
    # Overrides are taken out first: to argparse, a value with a space in it is positional.
    overrides = [argument for argument in arguments if _is_override(argument)]
    options = [argument for argument in arguments if argument not in overrides]
    if is_completing():
        _complete(build_parser())
    parser = build_parser(next((text for text in arguments if not text.startswith("-")), None))
    args, unknown = parser.parse_known_args(options)
    if "run" in args:  # the commands that read a run file
        args.overrides = overrides
    elif overrides:  # --model=X is an option of `init`, and a section of the run file
        args, unknown = parser.parse_known_args(arguments)
    if unknown:
        way_out = f"see shardwise --help (an override is written {OVERRIDE})"
        name, options = unknown[0], re.findall(r"--[a-z][a-z-]+", args.usage())
        if name.startswith("--") and "." not in name:
            key, _, _ = name.partition("=")
            near = nearest(key, options, "options")
            is_near = difflib.get_close_matches(key, options, n=1, cutoff=0.8)
            if "run" in args and not is_near and (others := elsewhere(key[2:].replace("-", "_"))):
                way_out = f"{others}, as an override {OVERRIDE}"
            elif near.startswith("did you mean"):
                way_out = near
        takes = {"run", "sweep", "folder", "path", "model"} & vars(args).keys()
        if not name.startswith("-") and not takes:
            way_out = f"{args.command} takes no file; see shardwise {args.command} --help"
        raise UserError(f"unknown argument {name}; {way_out}")
    return args


def _complete(parser: Parser) -> NoReturn:
    """Answer the shell that asks for completions, and end this process."""
    from argcomplete import CompletionFinder

    class Finder(CompletionFinder):
        def filter_completions(self, completions: list[str]) -> list[str]:
            """Leave out a key that is suggested as its own value."""
            return [text for text in super().filter_completions(completions) if "=--" not in text]

    without_equals = [
        f"--{section}.{key}" for section in known_keys() for key in known_keys(section)
    ]
    Finder()(parser, always_complete_options=False, exclude=without_equals)
    raise AssertionError("argcomplete ends the process")


def _of_argument(error: BaseException, arguments: Sequence[str]) -> BaseException:
    """Return an error, or the user's mistake if the system gives it for a path of `arguments`."""
    path = getattr(error, "filename", None)
    given = tuple(filter(None, (argument.rpartition("=")[2] for argument in arguments)))
    is_given = isinstance(path, str) and path.startswith(given) and not is_full(error)
    if not (isinstance(error, OSError) and is_given):
        return error
    return UserError(f"{path[:100]}: {error.strerror}, by the system; give another path")


def _is_override(argument: str) -> bool:
    """Return whether an argument sets a key or a whole section of a run file; not `--foo=1`."""
    if re.fullmatch(r"--lora=(r=)?\d+", argument):  # an option of `plan`
        return False
    key, equals, _ = argument.partition("=")
    return key.startswith("--") and bool(equals) and ("." in key or key[2:] in known_keys())


def commands_of(name: str | None = None) -> tuple[Command, ...]:
    """Return the command of that name alone, whose imports are all that it needs; else all."""
    names = (name,) if name in NAMES else NAMES
    return tuple(import_module(f"shardwise.commands.{one}").COMMAND for one in names)


def build_parser(name: str | None = None) -> Parser:
    """Return the parser of the subcommands and their options: of this one, or of all."""
    parser = Parser(
        prog="shardwise",
        description="Fine-tune hybrid-attention language models.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"shardwise {__version__}")
    parsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in commands_of(name):
        subparser = parsers.add_parser(
            command.name, help=command.summary, description=command.text, allow_abbrev=False
        )
        subparser.set_defaults(call=command.run, usage=subparser.format_usage)
        command.add_arguments(subparser)
    return parser
