"""Buffers of disk offload: on a CPU the memory that is computed with, on a GPU pinned memory.

A GPU computes with a copy of what was read. Copies are made on a stream of their own while it
computes: after the read that they follow, and before the write that needs them.
"""

import gc
import mmap
import time
from collections.abc import Generator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

PATIENCE_SECONDS = 2.0
"""How long somebody may still refer to what has left the window."""


class Buffer:
    """Memory that pages are read into, one after the other."""

    def __init__(self, memory: mmap.mmap | memoryview) -> None:
        self.memory = memory
        self.pending: Future[None] | None = None
        """The last task of the thread with it."""
        self._seen: StorageWeakRef | None = None

    def first(self, num_bytes: int) -> memoryview:
        """Return the first bytes for the thread, which may have them a moment after it is done."""
        return memoryview(self.memory)[:num_bytes]

    def await_later(self, pending: Future[None]) -> None:
        """Note what the thread is asked to do with it."""
        self.pending = pending

    def wait(self) -> None:
        """Wait until the thread is done with it; raise the error that it has met."""
        if self.pending is not None:
            self.pending.result()

    def as_tensor(self, num_bytes: int) -> torch.Tensor:
        """Return a tensor for what is read next, once nobody has the one before it.

        What the buffer had is written by then.
        """
        self.wait()
        # Somebody may let go of it a moment late: seen once, with ten processes for each core.
        end = time.monotonic() + PATIENCE_SECONDS
        while self._seen is not None and not self._seen.expired():
            assert time.monotonic() < end, "a weight is kept beyond its window"
            gc.collect()
            time.sleep(0.01)
        tensor = self._tensor(num_bytes)
        self._seen = StorageWeakRef(tensor.untyped_storage())
        return tensor

    def _tensor(self, num_bytes: int) -> torch.Tensor:
        return torch.frombuffer(self.memory, dtype=torch.uint8, count=num_bytes)

    def mark(self) -> torch.cuda.Event | None:
        """Return the event that a GPU has done all that this thread has asked it for."""
        return None

    def reading(self, target: torch.Tensor, after: Any) -> AbstractContextManager[None]:
        """Return what the thread does around a read: after a mark, a tensor gets the values."""
        return nullcontext()

    def writing(self, source: torch.Tensor, after: Any) -> AbstractContextManager[None]:
        """Return what the thread does around a write of values that a tensor has at a mark."""
        return nullcontext()


class SideStream:
    """A stream of a GPU for copies between its memory and pinned memory."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device)

    def pinned(self, num_bytes: int) -> torch.Tensor:
        """Return pinned memory."""
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def on_device(self, num_bytes: int) -> torch.Tensor:
        """Return memory of the GPU, which what it was asked for until now may still use."""
        return torch.empty(num_bytes, dtype=torch.uint8, device=self.device)

    def mark(self) -> torch.cuda.Event:
        """See Buffer."""
        return torch.cuda.current_stream(self.device).record_event()

    def copy(
        self, target: torch.Tensor, source: torch.Tensor, after: torch.cuda.Event
    ) -> torch.cuda.Event:
        """Begin a copy after an event, from any thread; return the event of its end."""
        self._stream.wait_event(after)
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
        for tensor in (target, source):
            if tensor.is_cuda:
                tensor.record_stream(self._stream)  # its memory is not given away before
        return self._stream.record_event()

    def hold_back(self, until: torch.cuda.Event) -> None:
        """Let what this thread asks the GPU for next begin after an event."""
        torch.cuda.current_stream(self.device).wait_event(until)


class PinnedBuffer(Buffer):
    """Pinned memory beside a GPU, which computes with a copy of it."""

    def __init__(self, num_bytes: int, side: SideStream) -> None:
        self._pinned, self._side = side.pinned(num_bytes), side
        self._copied: torch.cuda.Event | None = None
        """The end of the last copy to the GPU."""
        super().__init__(self._pinned.numpy().data)

    def wait(self) -> None:
        """See Buffer; and let the GPU wait for the copy."""
        super().wait()
        if self._copied is not None:
            self._side.hold_back(self._copied)

    def _tensor(self, num_bytes: int) -> torch.Tensor:
        return self._side.on_device(num_bytes)

    def mark(self) -> torch.cuda.Event:
        """See Buffer."""
        return self._side.mark()

    @contextmanager
    def reading(self, target: torch.Tensor, after: torch.cuda.Event) -> Generator[None]:
        """Copy what was read to the GPU, with len(target) bytes.

        An earlier copy ends before, so that a run is never more than a few units ahead of its GPU.
        """
        if self._copied is not None:
            self._copied.synchronize()
        yield
        self._copied = self._side.copy(target, self._pinned[: len(target)], after)

    @contextmanager
    def writing(self, source: torch.Tensor, after: torch.cuda.Event) -> Generator[None]:
        """Copy the values from the GPU, with len(source) bytes."""
        self._side.copy(self._pinned[: len(source)], source, after).synchronize()
        yield
