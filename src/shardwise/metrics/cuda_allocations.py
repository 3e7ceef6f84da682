"""Allocations on a GPU, from the figures and the history of torch's caching allocator."""

from itertools import pairwise

import torch

from shardwise.base.records.memory_parts import AllocationEvent
from shardwise.metrics.allocations import Allocations


class CudaRecorder:
    """Records the allocations on one GPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.entry_bytes = 0
        self.marks: list[int] = []  # allocations and frees that the allocator had counted so far

    def start(self) -> None:
        """Start to record."""
        torch.cuda.synchronize(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        self.entry_bytes = torch.cuda.memory_allocated(self.device)
        torch.cuda.memory._record_memory_history(context=None)

    def address(self, storage: torch.UntypedStorage) -> int | None:
        """Return the address of a storage in events; None if it is on another device."""
        return storage.data_ptr() if storage.device.type == "cuda" else None

    def mark(self) -> None:
        """Put a mark between the events so far and those that follow."""
        stats = torch.cuda.memory_stats(self.device)
        self.marks.append(stats["allocation.all.allocated"] + stats["allocation.all.freed"])

    def stop(self) -> Allocations:
        """Stop, and return what was recorded.

        `events` count bytes as they were requested; the other figures include rounding.
        """
        torch.cuda.synchronize(self.device)
        peak_bytes = torch.cuda.max_memory_allocated(self.device)
        exit_bytes = torch.cuda.memory_allocated(self.device)
        index = self.device.index
        if index is None:
            index = torch.cuda.current_device()
        history = torch.cuda.memory._snapshot()["device_traces"][index]
        torch.cuda.memory._record_memory_history(enabled=None)
        changes = [entry for entry in history if entry["action"] in ("alloc", "free_requested")]
        # The allocator counted these before the history began.
        unrecorded = self.marks[-1] - len(changes)
        events: list[AllocationEvent | None] = []
        alive_bytes = self.entry_bytes
        for begin, end in pairwise(mark - unrecorded for mark in self.marks):
            events.append(None)
            for entry in changes[begin:end]:
                size = entry["size"] if entry["action"] == "alloc" else -entry["size"]
                alive_bytes += size
                events.append(AllocationEvent(entry["addr"], size, alive_bytes))
        return Allocations([*events, None], self.entry_bytes, exit_bytes, peak_bytes)
