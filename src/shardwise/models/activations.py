"""The bytes of activations of one unit of a model on a rank."""

from __future__ import annotations

from typing import Any, NamedTuple

from shardwise.config import RunConfig
from shardwise.models.spec import ModelSpec


class UnitMemory(NamedTuple):
    """Bytes of one micro-batch of one unit on a rank."""

    kept: int
    forward: int
    backward: int


def unit_memory(
    cfg: RunConfig, hf: Any, spec: ModelSpec, unit_index: int, tp_rank: int = 0
) -> UnitMemory:
    """Return the bytes of a unit."""
    raise NotImplementedError
