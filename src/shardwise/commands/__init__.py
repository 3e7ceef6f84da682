"""The subcommands of `shardwise`, in the order in which `shardwise --help` lists them."""

from __future__ import annotations

from shardwise.commands import bench, completion, export, init, models, report, schema, split, train

_MODULES = (init, train, bench, split, models, report, export, schema, completion)
COMMANDS = tuple(module.COMMAND for module in _MODULES)
