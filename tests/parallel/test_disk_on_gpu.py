"""Offload to disk beside a GPU, of which memory on this machine stands in.

Its copies are made as late as the events allow: when somebody waits for one, all before it are
made. So whoever reads too early finds a NaN, or what was there before.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from shardwise.config import UserError
from shardwise.parallel import disk
from shardwise.parallel.disk_buffers import Buffer, PinnedBuffer
from shardwise.training.step import NonFiniteLossError
from tests.distributed import run_ranks
from tests.parity.harness import Cell, Outcome, microbatches, run, run_config


class LateEvent:
    """The end of the first copies that a stream was asked for."""

    def __init__(self, stream: LateStream, num_copies: int) -> None:
        self.stream, self.num_copies = stream, num_copies

    def synchronize(self) -> None:
        self.stream.copy_until(self.num_copies)
        self.stream.num_seen = max(self.stream.num_seen, self.num_copies)


class LateStream:
    """A stand-in of SideStream on this machine, which counts the bytes of its copies."""

    def __init__(self, device: torch.device) -> None:
        self.asked: list[Callable[[], None]] = []
        self.num_bytes = 0
        self.lock = threading.Lock()
        self.last: dict[int, int] = {}
        """The number of the last copy of each pinned memory, by its address."""
        self.num_seen = 0
        """The copies whose end this process has awaited, and not only the device."""
        self.is_read_over = False
        """Whether pinned memory was read into before a copy of it had ended."""

    def pinned(self, num_bytes: int) -> torch.Tensor:
        made = self.on_device(num_bytes)
        self.last[made.data_ptr()] = 0
        return made

    def on_device(self, num_bytes: int) -> torch.Tensor:
        return torch.full((num_bytes,), 255, dtype=torch.uint8)  # each four or two are a NaN

    def mark(self) -> LateEvent:
        return LateEvent(self, 0)  # this thread has computed all that it was asked for

    def copy(self, target: torch.Tensor, source: torch.Tensor, after: LateEvent) -> LateEvent:
        assert after.num_copies == 0
        is_down = target.data_ptr() in self.last
        if is_down:
            source = source.clone()  # as it is now, and whoever has it may let go of it
        # What nobody has any more, a GPU could still copy to.
        place = (lambda: target) if is_down else weakref.ref(target)
        pinned = (target if is_down else source).data_ptr()

        def late() -> None:
            if (there := place()) is not None:
                there.copy_(source)

        with self.lock:
            self.asked.append(late)
            self.num_bytes += len(source)
            self.is_read_over |= not is_down and self.last[pinned] > self.num_seen
            self.last[pinned] = len(self.asked)
            return LateEvent(self, len(self.asked))

    def hold_back(self, until: LateEvent) -> None:
        self.copy_until(until.num_copies)

    def copy_until(self, num_copies: int) -> None:
        with self.lock:
            for place, late in enumerate(self.asked[:num_copies]):
                late()
                self.asked[place] = int  # it is done, and lets go of its memory


def nothing() -> None:
    """No bug."""


def computed_before_the_copy_has_ended() -> None:
    PinnedBuffer.wait = Buffer.wait  # type: ignore[method-assign]


def read_over_what_is_copied() -> None:
    @contextmanager
    def reading(self: Any, target: torch.Tensor, after: Any) -> Any:
        yield
        self._copied = self._side.copy(target, self._pinned[: len(target)], after)

    PinnedBuffer.reading = reading  # type: ignore[method-assign]


def written_before_the_copy_has_ended() -> None:
    @contextmanager
    def writing(self: Any, source: torch.Tensor, after: Any) -> Any:
        self._side.copy(self._pinned[: len(source)], source, after)
        yield

    PinnedBuffer.writing = writing  # type: ignore[method-assign]


def never_copied_back() -> None:
    PinnedBuffer.writing = Buffer.writing  # type: ignore[method-assign]


def outcome(cell: Cell, bug: Callable[[], None]) -> tuple[Outcome | None, int]:
    """Return the numbers of a rank, None if they are not finite, and the bytes of its copies."""
    streams: list[Any] = []
    if cell.variant:
        disk._side_stream = lambda device: streams.append(LateStream(device)) or streams[0]
        bug()
    cfg = run_config(cell, optimizer="adamw")
    seen = None
    with contextlib.suppress(NonFiniteLossError, UserError):  # in training, in validation
        seen = run(cfg, lambda mesh, step: microbatches(cfg, mesh, step))
    is_read_over = any(stream.is_read_over for stream in streams)
    return None if is_read_over else seen, sum(stream.num_bytes for stream in streams)


@cache
def in_memory(cell: Cell) -> list[tuple[Outcome | None, int]]:
    return run_ranks(cell.nproc, outcome, replace(cell, variant=""), nothing)


def differ(cell: Cell, bug: Callable[[], None]) -> tuple[bool, int]:
    """Return whether any number differs from those of a run in memory, and the copied bytes."""
    ranks = run_ranks(cell.nproc, outcome, cell, bug)
    is_equal = all(
        mine is not None
        and mine.losses == other.losses
        and mine.norms == other.norms
        and mine.eval_loss == other.eval_loss
        and all(
            torch.equal(tensor, getattr(other, kind)[name])
            for kind in ("grads", "params", "saved")
            for name, tensor in getattr(mine, kind).items()
        )
        for (mine, _), (other, _) in zip(ranks, in_memory(cell), strict=True)
    )
    return not is_equal, ranks[0][1]


FULL = Cell("qwen3_5_text", "single", "full", 1, "offload-disk")


@pytest.mark.parametrize(
    "cell",
    [
        FULL,
        Cell("llama", "single", "lora", 1, "offload-disk"),
        Cell("llama", "ddp", "full", 2, "offload-disk"),
        Cell("llama", "tp", "full", 2, "offload-disk"),
    ],
    ids=str,
)
def test_every_number_is_that_of_a_run_in_memory(cell):
    differs, copied = differ(cell, nothing)
    assert not differs
    assert copied > 0


@pytest.mark.parametrize(
    "bug",
    [
        computed_before_the_copy_has_ended,
        read_over_what_is_copied,
        written_before_the_copy_has_ended,
        never_copied_back,
    ],
)
def test_a_copy_that_nobody_waits_for_is_seen(bug):
    assert differ(FULL, bug)[0]
