"""Tensors that lie in one file on disk, of which a window of few buffers is in memory.

Everything is read and written by one thread, in the order in which it was asked for, so that a unit
that is read again has what was written before.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import mmap
import os
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

from shardwise.base.interfaces import Storage
from shardwise.parallel.disk_units import DiskUnit, Leaf, Pages
from shardwise.parallel.place import local, placed_like

NUM_BUFFERS = 3
"""One is computed with, one is read ahead, one is written behind."""
PATIENCE_SECONDS = 2.0
"""How long somebody may still refer to what has left the window."""


class Buffer:
    """Memory that pages are read into, one after the other."""

    def __init__(self, num_bytes: int) -> None:
        self.memory = mmap.mmap(-1, num_bytes)
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
        """Return the first bytes as a tensor, once they are written and nobody has another one."""
        self.wait()
        # Somebody may let go of it a moment late: seen once, with ten processes for each core.
        end = time.monotonic() + PATIENCE_SECONDS
        while self._seen is not None and not self._seen.expired():
            assert time.monotonic() < end, "a weight is kept beyond its window"
            gc.collect()
            time.sleep(0.01)
        tensor = torch.frombuffer(self.memory, dtype=torch.uint8, count=num_bytes)
        self._seen = StorageWeakRef(tensor.untyped_storage())
        return tensor


class LoadedPages:
    """Pages in a buffer."""

    def __init__(self, pages: Pages, buffer: Buffer) -> None:
        self.pages, self.buffer = pages, buffer
        self.bytes = buffer.as_tensor(pages.num_bytes)

    def view(self, leaf: Leaf) -> torch.Tensor:
        """Return a tensor in this memory."""
        begin = leaf.begin - self.pages.begin
        like = leaf.stand_in
        return self.bytes[begin : begin + leaf.nbytes].view(like.dtype).view(like.shape)

    def has(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor lies in this memory."""
        return tensor.untyped_storage().data_ptr() == self.bytes.data_ptr()


class Window(Storage):
    """The file of a rank, and the pages of it that are in memory."""

    def __init__(self, folder: Path, units: Sequence[DiskUnit], made: Path | None = None) -> None:
        """Reserve the file, which has no name: it is gone when the process is, however it ends.

        `made`: the folder, where it was made for the run and goes with its last file.
        OSError if the disk has no room for it.
        """
        self._thread = ThreadPoolExecutor(1, "disk")
        # Begins now: where memory is short, Python may wait for ever for a thread that fails.
        self._thread.submit(int).result()
        self._made = made
        self.num_bytes = max(unit.end for unit in units)
        pages = [Pages(unit, is_update) for unit in units for is_update in (False, True)]
        largest = max(part.num_bytes for part in pages)
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115  # as long as the process
        os.posix_fallocate(self._file.fileno(), 0, self.num_bytes)
        self._free = deque(Buffer(largest) for _ in range(NUM_BUFFERS))
        self._held: dict[Pages, LoadedPages] = {}
        self._current: Pages | None = None
        self._leaves = {
            leaf.stand_in.data_ptr(): leaf
            for unit in units
            for leaf in (*unit.frozen, *unit.trained, *unit.states, *unit.gradients)
        }
        self._read_bytes = 0
        self._written_bytes = 0

    def hold(self, pages: Pages, then: Pages | None = None) -> LoadedPages:
        """Have these pages in memory, and begin to read those that are needed `then`.

        All others leave the window.
        """
        if pages != self._current:
            wanted = dict.fromkeys(part for part in (pages, then) if part is not None)
            for other in [part for part in self._held if part not in wanted]:
                self.drop(other)
            for part in wanted:
                if part not in self._held:
                    self._held[part] = self._read_ahead(part)
            held = self._held[pages]
            held.buffer.wait()
            for leaf in pages.leaves:
                leaf.set(held.view(leaf))
            self._current = pages
        return self._held[pages]

    def drop(self, pages: Pages, is_changed: bool = False) -> None:
        """Let pages leave the window; those that have changed are written behind."""
        held = self._held.pop(pages)
        self._current = None if pages == self._current else self._current
        for leaf in pages.leaves:
            leaf.set(leaf.stand_in)
        if is_changed:
            num_bytes = pages.unit.begin_gradients - pages.begin
            writing = self._write(held.buffer.first(num_bytes), pages.begin)
            held.buffer.await_later(writing)
        self._free.append(held.buffer)

    def clear(self) -> None:
        """Let everything leave the window, unchanged."""
        for pages in list(self._held):
            self.drop(pages)

    def values(self, held: torch.Tensor) -> torch.Tensor:
        """See interfaces.Storage."""
        leaf = self._leaf_of(held)
        return held if leaf is None else _placed(held, self.read(leaf))

    def change(self, held: torch.Tensor, values: torch.Tensor) -> None:
        """See interfaces.Storage."""
        leaf = self._leaf_of(held)
        if leaf is not None:
            self.write(leaf, local(values.detach()))

    def moved_bytes(self) -> tuple[int, int]:
        """See interfaces.Storage."""
        return self._read_bytes, self._written_bytes

    def memory_bytes(self) -> int:
        """See interfaces.Storage."""
        self.clear()
        return sum(len(buffer.memory) for buffer in self._free)

    def close(self) -> None:
        """See interfaces.Storage; the file's bytes are free again, and so is the memory."""
        self._thread.shutdown()
        self._file.close()
        self._held.clear()
        self._free.clear()
        if self._made is not None:
            with contextlib.suppress(OSError):  # somebody has put something there
                self._made.rmdir()

    def room(self, held: torch.Tensor) -> torch.Tensor | None:
        """Return memory for other values of what lies on disk; None: it does not."""
        leaf = self._leaf_of(held)
        return None if leaf is None else _placed(held, _memory_like(leaf))

    def read(self, leaf: Leaf) -> torch.Tensor:
        """Return a copy of what one tensor has on disk."""
        copy = _memory_like(leaf)
        self._read(_bytes_of(copy), leaf.begin).result()
        return copy

    def write(self, leaf: Leaf, values: torch.Tensor) -> None:
        """Write one tensor, and wait for that."""
        self._write(_bytes_of(values.contiguous()), leaf.begin).result()

    def _leaf_of(self, held: torch.Tensor) -> Leaf | None:
        self.clear()  # so that all that lies on disk has its stand-in
        for buffer in self._free:  # and no write has failed unnoticed
            buffer.wait()
        shown = local(held.detach())
        return self._leaves.get(shown.data_ptr()) if shown.numel() else None

    def _read_ahead(self, pages: Pages) -> LoadedPages:
        buffer = self._free.popleft()
        held = LoadedPages(pages, buffer)
        buffer.await_later(self._read(buffer.first(pages.num_bytes), pages.begin))
        return held

    def _read(self, memory: memoryview, begin: int) -> Future[None]:
        self._read_bytes += len(memory)
        return self._thread.submit(_whole, os.preadv, self._file.fileno(), memory, begin)

    def _write(self, memory: memoryview, begin: int) -> Future[None]:
        self._written_bytes += len(memory)
        return self._thread.submit(_whole, os.pwritev, self._file.fileno(), memory, begin)


def _memory_like(leaf: Leaf) -> torch.Tensor:
    return torch.empty(leaf.stand_in.shape, dtype=leaf.stand_in.dtype)


def _placed(like: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    return placed_like(like, values) if isinstance(like, DTensor) else values


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return tensor.view(-1).view(torch.uint8).numpy().data


def _whole(move: Callable[..., int], file: int, memory: memoryview, begin: int) -> None:
    """Read or write all of `memory`; the system may move less at a time."""
    done = 0
    while done < len(memory):
        moved = move(file, [memory[done:]], begin + done)
        if moved <= 0:
            raise OSError(errno.EIO, "the file of parallel.offload disk has been made shorter")
        done += moved
