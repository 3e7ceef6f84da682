"""Tensors that lie in one file on disk, of which a window of few buffers is in memory.

Everything is read and written by one thread, in the order in which it was asked for, so that a unit
that is read again has what was written before. A tensor that is not in the window is a stand-in of
its shape: one NaN, expanded, so that nobody computes with it unnoticed.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

from shardwise.parallel.place import local, placed_like

ALIGNMENT = 64
"""Each tensor begins at a multiple of so many bytes, as torch's own memory does."""
NUM_BUFFERS = 3
"""One is computed with, one is read ahead, one is written behind."""


def stand_in(like: torch.Tensor) -> torch.Tensor:
    """Return one number, a NaN where there is one, that is seen as a tensor of this shape."""
    number = torch.full((1,), 1, dtype=torch.uint8).to(like.dtype)
    if like.is_floating_point():
        number = torch.full((1,), torch.nan).to(like.dtype)
    return number.expand(like.shape)


def aligned(num_bytes: int) -> int:
    """Return the bytes that a tensor of so many takes in the file."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


@dataclass(eq=False)
class Leaf:
    """A weight of this rank, or a state of the optimizer, on disk."""

    stand_in: torch.Tensor
    begin: int
    """Where it begins in the file."""
    tensor: torch.Tensor | None = None
    """What the model or the optimizer has; None: a state that was not made yet."""

    @property
    def nbytes(self) -> int:
        """Its bytes, without those that align the next one."""
        return self.stand_in.numel() * self.stand_in.itemsize

    def set(self, values: torch.Tensor) -> None:
        """Let the tensor have these values, in place of those or the stand-in that it has."""
        if self.tensor is not None:
            self.tensor.data = values


@dataclass(eq=False)
class Unit:
    """What is read together. In the file lie frozen weights, then trained ones, then states."""

    frozen: list[Leaf] = field(default_factory=list)
    trained: list[Leaf] = field(default_factory=list)
    states: list[Leaf] = field(default_factory=list)
    begin: int = 0
    begin_trained: int = 0
    begin_states: int = 0
    end: int = 0


class Pages(NamedTuple):
    """A part of a unit that is in memory at once: all weights, or what the optimizer updates."""

    unit: Unit
    is_update: bool = False

    @property
    def begin(self) -> int:
        """Where it begins in the file."""
        return self.unit.begin_trained if self.is_update else self.unit.begin

    @property
    def num_bytes(self) -> int:
        """How long it is."""
        return (self.unit.end if self.is_update else self.unit.begin_states) - self.begin

    @property
    def leaves(self) -> Iterator[Leaf]:
        """The tensors in it."""
        yield from self.unit.states if self.is_update else self.unit.frozen
        yield from self.unit.trained


class Buffer:
    """Memory that pages are read into, one after the other."""

    def __init__(self, num_bytes: int) -> None:
        self.memory = mmap.mmap(-1, num_bytes)
        self.pending: Future[None] | None = None
        """What the thread does with it last."""
        self._seen: StorageWeakRef | None = None

    def as_tensor(self, num_bytes: int) -> torch.Tensor:
        """Return the first bytes as a tensor, once they are written and nobody has another one."""
        if self.pending is not None:
            self.pending.result()
        assert self._seen is None or self._seen.expired(), "a weight is kept beyond its window"
        tensor = torch.frombuffer(self.memory, dtype=torch.uint8, count=num_bytes)
        self._seen = StorageWeakRef(tensor.untyped_storage())
        return tensor


class Held:
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


class Window:
    """The file of a rank, and the pages of it that are in memory."""

    def __init__(self, folder: Path, units: Sequence[Unit]) -> None:
        """Reserve the file, which has no name: it is gone when the process is, however it ends.

        OSError if the disk has no room for it.
        """
        self.units = units
        self.num_bytes = max(unit.end for unit in units)
        pages = [Pages(unit, is_update) for unit in units for is_update in (False, True)]
        largest = max(part.num_bytes for part in pages)
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115  # as long as the process
        os.posix_fallocate(self._file.fileno(), 0, self.num_bytes)
        self._free = deque(Buffer(largest) for _ in range(NUM_BUFFERS))
        self._thread = ThreadPoolExecutor(1, "disk")
        self._held: dict[Pages, Held] = {}
        self._current: Pages | None = None
        self.places = {
            leaf.stand_in.data_ptr(): leaf
            for unit in units
            for leaf in (*unit.frozen, *unit.trained, *unit.states)
        }
        self.read_bytes = 0
        self.written_bytes = 0

    def hold(self, pages: Pages, then: Pages | None = None) -> Held:
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
            assert held.buffer.pending is not None
            held.buffer.pending.result()
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
            held.buffer.pending = self._write(_bytes_of(held.bytes), pages.begin)
        self._free.append(held.buffer)

    def clear(self) -> None:
        """Let everything leave the window, unchanged."""
        for pages in list(self._held):
            self.drop(pages)

    def values(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy of what a tensor has on disk; the tensor itself if it is not there."""
        self.clear()
        leaf = self.places.get(local(tensor.detach()).data_ptr())
        if leaf is None:
            return tensor
        copy = torch.empty(leaf.stand_in.shape, dtype=leaf.stand_in.dtype)
        self._read(_bytes_of(copy), leaf.begin).result()
        return placed_like(tensor, copy) if isinstance(tensor, DTensor) else copy

    def store(self, leaf: Leaf, values: torch.Tensor) -> None:
        """Write a tensor of this rank to its place on disk."""
        self.clear()
        self._write(_bytes_of(local(values.detach()).contiguous()), leaf.begin).result()

    def _read_ahead(self, pages: Pages) -> Held:
        buffer = self._free.popleft()
        held = Held(pages, buffer)
        buffer.pending = self._read(_bytes_of(held.bytes), pages.begin)
        return held

    def _read(self, memory: memoryview, begin: int) -> Future[None]:
        self.read_bytes += len(memory)
        return self._thread.submit(_whole, os.preadv, self._file.fileno(), memory, begin)

    def _write(self, memory: memoryview, begin: int) -> Future[None]:
        self.written_bytes += len(memory)
        return self._thread.submit(_whole, os.pwritev, self._file.fileno(), memory, begin)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return tensor.view(-1).view(torch.uint8).numpy().data


def _whole(move: Callable[..., int], file: int, memory: memoryview, begin: int) -> None:
    """Read or write all of `memory`; the system may move less at a time."""
    done = 0
    while done < len(memory):
        moved = move(file, [memory[done:]], begin + done)
        assert moved > 0, "the file ends before its last tensor"
        done += moved
