"""The subcommands of `shardwise`, in the order in which `shardwise --help` lists them."""

from __future__ import annotations

from shardwise.commands import (
    bench,
    calibrate,
    check,
    completion,
    data,
    export,
    init,
    launch,
    models,
    plan,
    prove,
    report,
    schema,
    split,
    train,
)

_MODULES = (
    *(init, data, plan, train, launch, prove, bench, split, calibrate),
    *(models, report, check, export, schema, completion),
)
COMMANDS = tuple(module.COMMAND for module in _MODULES)
