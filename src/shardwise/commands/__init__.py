"""The subcommands of `shardwise`, in the order in which `shardwise --help` lists them."""

from __future__ import annotations

from shardwise.commands import bench, check, export, models, prove, report, split, train

COMMANDS = tuple(
    module.COMMAND for module in (train, prove, bench, split, models, report, check, export)
)
