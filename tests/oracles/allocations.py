"""The storages of a simulated step: when each begins, changes its size, and ends."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch

from shardwise.base.records.memory_parts import AllocationEvent
from shardwise.metrics.allocations import Allocations, replaced


class _Block(NamedTuple):
    number: int
    num_bytes: int
    reference: weakref.ref[torch.UntypedStorage]
    """Kept, so that it says when the storage ends."""


class StorageRecorder:
    """Records the bytes of all storages that it is shown, from when it is first shown them.

    It is a `Recorder` of `shardwise.metrics`. An address is a number that no other storage gets.
    """

    def __init__(self, moment: Callable[[], str] = str) -> None:
        self._moment = moment
        self._alive: dict[int, _Block] = {}  # by the address of the storage in C++
        self._num_seen = 0
        self._alive_bytes = 0
        self._events: list[AllocationEvent | None] = []
        self._entry_bytes = 0
        self._peak_bytes = 0
        self.peak_moment = ""
        """What `moment` gave when most bytes were alive since `start`."""

    def see(self, tensor: torch.Tensor) -> None:
        """Record the storage of a tensor, unless it is known with its size."""
        self._see(tensor.untyped_storage())

    def _see(self, storage: torch.UntypedStorage) -> None:
        key, num_bytes = storage._cdata, storage.nbytes()
        known = self._alive.get(key)
        if known is not None and known.num_bytes == num_bytes:
            return
        self._num_seen += 1
        reference = (
            weakref.ref(storage, lambda _: self._forget(key)) if known is None else known.reference
        )
        self._alive[key] = _Block(self._num_seen, num_bytes, reference)
        self._change(self._num_seen, num_bytes)
        if known is not None:  # resized: torch allocates, copies, and then frees
            self._change(known.number, -known.num_bytes)

    def address(self, storage: torch.UntypedStorage) -> int:
        """Return the number of a storage; 0 if it was never shown."""
        block = self._alive.get(storage._cdata)
        return block.number if block else 0

    def _forget(self, key: int) -> None:
        block = self._alive.pop(key)
        self._change(block.number, -block.num_bytes)

    def _change(self, number: int, num_bytes: int) -> None:
        if not num_bytes:
            return
        self._alive_bytes += num_bytes
        self._events.append(AllocationEvent(number, num_bytes, self._alive_bytes))
        if self._alive_bytes > self._peak_bytes:
            self._peak_bytes = self._alive_bytes
            self.peak_moment = self._moment()

    def start(self) -> None:
        """Start to record: forget what was before, except which storages are alive."""
        self._events = []
        self._entry_bytes = self._peak_bytes = self._alive_bytes
        self.peak_moment = self._moment()

    def mark(self) -> None:
        """Put a mark between the events so far and those that follow."""
        self._events.append(None)

    def stop(self) -> Allocations:
        """Stop, and return what was recorded."""
        return Allocations(self._events, self._entry_bytes, self._alive_bytes, self._peak_bytes)

    def watching_resizes(self) -> AbstractContextManager[None]:
        """See storages that are resized, as fsdp2 frees and regains gathered weights.

        No dispatch mode sees that.
        """
        resize = torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            self._see(storage)
            return result

        return replaced(torch.UntypedStorage, "resize_", resize_)
