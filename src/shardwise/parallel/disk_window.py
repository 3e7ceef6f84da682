"""Tensors that lie in one file on disk, of which a window of few buffers is in memory.

Everything is read and written by one thread, in the order in which it was asked for, so that a unit
that is read again has what was written before.
"""

import contextlib
import errno
import mmap
import os
import tempfile
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch

from shardwise.base.interfaces import Storage
from shardwise.parallel.disk_buffers import Buffer, PinnedBuffer, SideStream
from shardwise.parallel.disk_units import DiskUnit, Leaf, Pages
from shardwise.parallel.place import local, placed_like

NUM_BUFFERS = 3
"""One is computed with, one is read ahead, one is written behind."""
Around = contextlib.AbstractContextManager[None]
"""Context in which the thread reads or writes."""
NOTHING: Around = contextlib.nullcontext()


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

    def __init__(
        self,
        folder: Path,
        units: Sequence[DiskUnit],
        made: Path | None = None,
        side: SideStream | None = None,
    ) -> None:
        """Reserve the file, which has no name: it is gone when the process is, however it ends.

        `made`: the folder, where it was made for the run and goes with its last file. `side`: for
        copies to a GPU, where there is one. OSError if the disk has no room for it.
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
        self._side = side
        self._free = deque(
            Buffer(mmap.mmap(-1, largest)) if side is None else PinnedBuffer(largest, side)
            for _ in range(NUM_BUFFERS)
        )
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
            memory, begin = held.buffer.first(num_bytes), pages.begin
            writing = held.buffer.writing(held.bytes[:num_bytes], held.buffer.mark())
            held.buffer.await_later(self._write(memory, begin, writing))
        self._free.append(held.buffer)

    def clear(self) -> None:
        """Let everything leave the window, unchanged."""
        for pages in list(self._held):
            self.drop(pages)

    def values(self, held: torch.Tensor) -> torch.Tensor:
        """See interfaces.Storage."""
        leaf = self._leaf_of(held)
        return held if leaf is None else placed_like(held, self.read(leaf))

    def change(self, held: torch.Tensor, values: torch.Tensor) -> None:
        """See interfaces.Storage."""
        leaf = self._leaf_of(held)
        if leaf is not None:
            self.write(leaf, local(values.detach()))

    def moved_bytes(self) -> tuple[int, int]:
        """See interfaces.Storage."""
        return self._read_bytes, self._written_bytes

    def memory_bytes(self) -> int:
        """See interfaces.Storage. What lies on a GPU is counted there."""
        self.clear()
        return 0 if self._side is not None else sum(len(buffer.memory) for buffer in self._free)

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
        if leaf is None:
            return None
        like = leaf.stand_in
        return placed_like(held, torch.empty(like.shape, dtype=like.dtype, device=like.device))

    def read(self, leaf: Leaf) -> torch.Tensor:
        """Return a copy of what one tensor has on disk."""
        copy = torch.empty(leaf.stand_in.shape, dtype=leaf.stand_in.dtype)
        self._read(_bytes_of(copy), leaf.begin).result()
        return copy.to(leaf.stand_in.device)

    def write(self, leaf: Leaf, values: torch.Tensor) -> None:
        """Write one tensor, and wait for that."""
        self._write(_bytes_of(values.contiguous().cpu()), leaf.begin).result()

    def _leaf_of(self, held: torch.Tensor) -> Leaf | None:
        self.clear()  # so that all that lies on disk has its stand-in
        for buffer in self._free:  # and no write has failed unnoticed
            buffer.wait()
        shown = local(held.detach())
        return self._leaves.get(shown.data_ptr()) if shown.numel() else None

    def _read_ahead(self, pages: Pages) -> LoadedPages:
        buffer = self._free.popleft()
        held = LoadedPages(pages, buffer)
        reading = buffer.reading(held.bytes, buffer.mark())
        memory = buffer.first(pages.num_bytes)
        buffer.await_later(self._read(memory, pages.begin, reading))
        return held

    def _read(self, memory: memoryview, begin: int, around: Around = NOTHING) -> Future[None]:
        self._read_bytes += len(memory)
        return self._thread.submit(_whole, os.preadv, self._file.fileno(), memory, begin, around)

    def _write(self, memory: memoryview, begin: int, around: Around = NOTHING) -> Future[None]:
        self._written_bytes += len(memory)
        return self._thread.submit(_whole, os.pwritev, self._file.fileno(), memory, begin, around)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return tensor.view(-1).view(torch.uint8).numpy().data


def _whole(
    move: Callable[..., int], file: int, memory: memoryview, begin: int, around: Around
) -> None:
    """Read or write all of `memory`; the system may move less at a time."""
    done = 0
    with around:
        while done < len(memory):
            moved = move(file, [memory[done:]], begin + done)
            if moved <= 0:
                raise OSError(errno.EIO, "the file of parallel.offload disk has been made shorter")
            done += moved
