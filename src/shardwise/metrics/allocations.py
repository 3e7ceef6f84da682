"""The allocations of a device in a span of time, as all recorders report them."""

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from shardwise.base.records.memory_parts import AllocationEvent


@dataclass(frozen=True)
class Allocations:
    """Every allocation and free between `start` and `stop` of a recorder, and the bytes in use."""

    events: list[AllocationEvent | None]  # events in order; None stands for a call of `mark`
    entry_bytes: int
    exit_bytes: int
    peak_bytes: int


class AllocationRecorder(Protocol):
    """Records the allocations of one device."""

    def start(self) -> None:
        """Start to record."""
        ...

    def address(self, storage: torch.UntypedStorage) -> int | None:
        """Return the address of a storage in events; None if it is on another device."""
        ...

    def mark(self) -> None:
        """Put a mark between the events so far and those that follow."""
        ...

    def stop(self) -> Allocations:
        """Stop, and return what was recorded."""
        ...


@contextmanager
def replaced(cls: type, name: str, value: Any) -> Generator[None]:
    """Give a class another value for an attribute that it has inherited."""
    setattr(cls, name, value)
    try:
        yield
    finally:
        delattr(cls, name)
