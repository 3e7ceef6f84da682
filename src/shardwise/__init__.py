"""Fine-tune hybrid-attention language models under every parallel strategy, proven equal.

The names of `__all__` are the library. Each is imported when it is first used, so that `import
shardwise` takes no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from shardwise.base import __version__ as __version__

if TYPE_CHECKING:
    from shardwise.base.batches import Batch as Batch
    from shardwise.base.batches import TensorBatch as TensorBatch
    from shardwise.base.interfaces import Mesh as Mesh
    from shardwise.base.records.record import RunRecord as RunRecord
    from shardwise.commands.library import RunFailed as RunFailed
    from shardwise.commands.library import prepare as prepare
    from shardwise.commands.library import run as run
    from shardwise.commands.library import train as train
    from shardwise.config import RunConfig as RunConfig
    from shardwise.config import UserError as UserError
    from shardwise.config.run_file import load_config as load_config
    from shardwise.models.own import TensorCut as TensorCut
    from shardwise.training.own_loop import OwnLoop as OwnLoop

_MODULES = {
    "Batch": "base.batches",
    "Mesh": "base.interfaces",
    "OwnLoop": "training.own_loop",
    "RunConfig": "config",
    "RunFailed": "commands.library",
    "RunRecord": "base.records.record",
    "TensorBatch": "base.batches",
    "TensorCut": "models.own",
    "UserError": "config",
    "load_config": "config.run_file",
    "prepare": "commands.library",
    "run": "commands.library",
    "train": "commands.library",
}
"""The module of each public name."""

__all__ = [
    "Batch",
    "Mesh",
    "OwnLoop",
    "RunConfig",
    "RunFailed",
    "RunRecord",
    "TensorBatch",
    "TensorCut",
    "UserError",
    "load_config",
    "prepare",
    "run",
    "train",
]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used (PEP 562)."""
    if name not in _MODULES:
        raise AttributeError(f"module 'shardwise' has no attribute {name!r}")
    return getattr(importlib.import_module(f"shardwise.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
