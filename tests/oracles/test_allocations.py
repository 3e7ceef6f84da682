"""The bytes of storages that begin, end, and change their size."""

from __future__ import annotations

import torch

from tests.oracles.allocations import StorageRecorder


def test_views_count_once_and_a_storage_until_its_last_view_ends():
    recorder = StorageRecorder()
    base = torch.empty(100)
    recorder.see(base)
    recorder.start()
    view = base[10:]
    recorder.see(view)
    assert recorder.stop().peak_bytes == 400
    del base
    assert recorder.stop().exit_bytes == 400
    del view
    assert recorder.stop().exit_bytes == 0


def test_the_moment_of_the_peak_is_when_most_was_alive():
    moments = iter(["start", "first", "second"])
    recorder = StorageRecorder(lambda: next(moments))
    recorder.start()
    one = torch.empty(2)
    recorder.see(one)
    two = torch.empty(1)
    recorder.see(two)
    del one, two
    recorder.see(torch.empty(2))
    assert recorder.peak_moment == "second"
    allocations = recorder.stop()
    assert (allocations.peak_bytes, allocations.exit_bytes) == (12, 0)


def test_a_resize_is_seen_while_it_is_watched():
    recorder = StorageRecorder()
    tensor = torch.empty(100)
    recorder.see(tensor)
    # No operator tells of it; where torch begins to dispatch one, nothing need be replaced.
    seen = []

    class Mode(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Mode():
        tensor.untyped_storage().resize_(0)
    assert seen == []
    with recorder.watching_resizes():
        tensor.untyped_storage().resize_(0)
        assert recorder.stop().exit_bytes == 0
        tensor.untyped_storage().resize_(400)
    assert recorder.stop().exit_bytes == 400
    assert "resize_" not in vars(torch.UntypedStorage)
