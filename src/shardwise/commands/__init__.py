"""The subcommands of `shardwise`, each the `COMMAND` of the module of its name."""

from __future__ import annotations

from importlib import import_module

from shardwise.commands.command import Command

NAMES = (
    *("init", "data", "plan", "train", "launch", "prove", "bench", "split", "calibrate"),
    *("models", "report", "check", "export", "schema", "completion"),
)
"""The names in the order in which `shardwise --help` lists them."""


def commands_of(name: str | None = None) -> tuple[Command, ...]:
    """Return the command of that name alone, whose imports are all that it needs; else all."""
    names = (name,) if name in NAMES else NAMES
    return tuple(import_module(f"shardwise.commands.{one}").COMMAND for one in names)
