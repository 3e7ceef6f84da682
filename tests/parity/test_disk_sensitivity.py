"""Known bugs of offload to disk, planted one at a time as in test_sensitivity.py: each must turn a
cell red."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest
import torch

from shardwise.parallel import disk, disk_update, disk_window
from shardwise.parallel.disk_units import Pages
from shardwise.parallel.disk_window import Window
from tests.parity.features.disk import FIXED
from tests.parity.harness import Cell
from tests.parity.test_sensitivity import check_caught, planted

FULL, LORA, AGAIN, HALVED, SHARED = FIXED


def updates_never_written():
    def dropped(self: Any, pages: Pages, is_changed: bool = False) -> None:
        drop(self, pages)

    drop, Window.drop = Window.drop, dropped


def pages_of_an_earlier_read():
    """What a cache gives that no write goes through."""
    cache: dict[tuple[int, int, int], bytes] = {}

    def cached(self: Any, memory: memoryview, begin: int, *around: Any) -> Future[None]:
        reading = read(self, memory, begin, *around)
        reading.result()
        key = id(self), begin, len(memory)
        if key in cache and begin > 0:
            memory[:] = cache[key]
        cache[key] = bytes(memory)
        return reading

    read, Window._read = Window._read, cached


def buffers_used_again_before_they_are_written():
    late: list[tuple[Any, ...]] = []

    def written_late(self: Any, memory: memoryview, begin: int, *around: Any) -> Future[None]:
        if len(memory) < 2**14:  # a single tensor's
            return write(self, memory, begin, *around)
        late.append((self, memory, begin, *around))
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def read_first(self: Any, memory: memoryview, begin: int, *around: Any) -> Future[None]:
        reading = read(self, memory, begin, *around)
        reading.result()
        while late:
            write(*late.pop()).result()
        return reading

    write, Window._write = Window._write, written_late
    read, Window._read = Window._read, read_first


def units_read_without_waiting():
    def early(self: Any, pages: Pages, then: Pages | None = None) -> Any:
        result = Future.result
        Future.result = lambda *_: None
        try:
            return hold(self, pages, then)
        finally:
            Future.result = result

    def slow(*args: Any) -> None:
        time.sleep(0.02)
        whole(*args)

    hold, Window.hold = Window.hold, early
    whole, disk_window._whole = disk_window._whole, slow


def weights_kept_for_the_backward():
    """By autograd itself, beyond their window."""
    disk.saved_tensors_hooks = lambda *_: torch.enable_grad()


def last_micro_batchs_gradient_alone():
    def replaced(self: Any, parameter: Any) -> None:
        self.waiting.discard(parameter)
        add(self, parameter)

    add, disk_update.Update._add = disk_update.Update._add, replaced


def gradients_in_memory_lost():
    """Those of backwards in two halves, beside others that wait."""

    def finish(self: Any) -> None:
        for parameter in self.waiting:
            parameter.grad = self.layout.gradients[parameter].stand_in
        self.waiting.clear()

    disk_update.Update.finish = finish


def clipped_in_memory_only():
    Window.change = lambda self, held, values: None


def recomputed_without_weights():
    """Before the first weight that autograd asks for, nothing is read for a backward."""
    around = disk._around

    def without_hooks(module: Any, window: Any, order: Any, number: int) -> Any:
        read = around(module, window, order, number)

        def forward(*args: Any, **kwargs: Any) -> Any:
            register, torch.Tensor.register_hook = torch.Tensor.register_hook, lambda *_: None
            try:
                return read(*args, **kwargs)
            finally:
                torch.Tensor.register_hook = register

        return forward

    disk._around = without_hooks


BUGS: tuple[tuple[Callable[[], None], Cell], ...] = (
    (updates_never_written, FULL),
    (updates_never_written, SHARED),
    (pages_of_an_earlier_read, FULL),
    (pages_of_an_earlier_read, LORA),
    (buffers_used_again_before_they_are_written, FULL),
    (units_read_without_waiting, LORA),
    (weights_kept_for_the_backward, LORA),
    (last_micro_batchs_gradient_alone, FULL),
    (gradients_in_memory_lost, HALVED),
    (clipped_in_memory_only, FULL),
    (recomputed_without_weights, AGAIN),
)


@pytest.mark.parametrize(("bug", "cell"), planted(BUGS))
def test_planted_bug_is_caught(bug, cell):
    check_caught(bug, cell)
