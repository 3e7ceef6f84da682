"""Bytes of tensors: what a rank holds, and the most that is alive at once inside a block of code."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Iterable
from contextlib import ExitStack
from types import TracebackType
from typing import Any
from unittest import mock

import torch
from torch.autograd.profiler import profile, record_function
from torch.distributed.tensor import DTensor

_LEAVES = "shardwise.leaves:"  # name of the marker: these bytes, which the profiler does not know, are given back


def tensor_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the storages behind these tensors on this rank, each storage once (views and tied weights share one).

    A DTensor counts with its local shard, padding included. A `meta` tensor counts as if it were allocated.
    """
    return sum(storage.nbytes() for storage in _storages(tensors).values())


def state_bytes(parameters: Iterable[torch.Tensor], optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Bytes this rank holds between steps: `weights`, `gradients` (those that are set) and `optimizer`.

    `parameters` are all parameters, frozen ones too. `optimizer` is every tensor of its state, step counters included.
    """
    parameters = list(parameters)
    state = [value for entry in optimizer.state.values() for value in entry.values()]
    return {
        "weights": tensor_bytes(parameters),
        "gradients": tensor_bytes(p.grad for p in parameters if p.grad is not None),
        "optimizer": tensor_bytes(value for value in state if isinstance(value, torch.Tensor)),
    }


class PeakMemory:
    """The most bytes of tensors alive at once on `device` inside a `with` block: `peak_bytes`, set when it ends.

    On CUDA it is the caching allocator's own maximum, what was alive at entry included.

    On a CPU it is exact too: the bytes alive at entry plus the greatest running sum of what torch's allocator reports
    to the profiler, which sees each allocation and free, temporaries inside an operator and `storage.resize_` (by
    which fsdp2 drops and regains gathered weights) included. A dispatch mode that watches storages sees neither of
    these two. The profiler does not know what was allocated before it started, hence:

    - alive at entry are the storages of all tensors that Python can reach, and their gradients. What only C++ holds is
      missed: the buckets of DistributedDataParallel, unless `gradient_as_bucket_view=True` makes gradients of them.
    - such a storage that dies or is resized inside leaves at that moment by a marker in the profiler's timeline (and
      torch writes one line to stderr, that it does not know the block).
    - threads count if torch hands them its thread-local state, as it does to autograd's and gloo's; others do not.

    It slows the block: 1.5 times and then 15 microseconds per allocator event at exit, 1.5 s for 10^5. So it belongs in
    a step that is not timed. It cannot be nested, nor used inside a profiler.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.peak_bytes: int | None = None
        self._entry_bytes = 0
        self._profile: profile | None = None
        self._watched: dict[int, weakref.finalize] = {}
        self._patches = ExitStack()

    def __enter__(self) -> PeakMemory:
        """Start to measure."""
        self.peak_bytes = None
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
            return self
        assert self.device.type == "cpu", f"PeakMemory knows cuda and cpu, not {self.device}"
        # The profiler's library logs each start and stop to stderr below this level, which it reads at its first use.
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        self._profile = profile(profile_memory=True)
        storages = _storages(_reachable_tensors())
        self._entry_bytes = sum(storage.nbytes() for storage in storages.values())
        self._watched = {
            key: weakref.finalize(storage, _mark_leaving, storage.nbytes()) for key, storage in storages.items()
        }
        self._patches.enter_context(mock.patch.object(torch.UntypedStorage, "resize_", self._watching_resize()))
        self._profile.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Stop, and set `peak_bytes`, also where the block ends in an exception."""
        if self._profile is None:
            torch.cuda.synchronize(self.device)
            self.peak_bytes = torch.cuda.max_memory_allocated(self.device)
            return
        self._profile.__exit__(kind, error, traceback)
        self._patches.close()
        for finalizer in self._watched.values():
            finalizer.detach()
        self._watched = {}
        assert self._profile.kineto_results is not None
        alive = self.peak_bytes = self._entry_bytes
        for event in sorted(self._profile.kineto_results.events(), key=lambda e: e.start_ns()):
            name = event.name()
            if name == "[memory]" and event.device_type() == torch.profiler.DeviceType.CPU:
                alive += event.nbytes()
            elif name.startswith(_LEAVES):
                alive -= int(name.removeprefix(_LEAVES))
            self.peak_bytes = max(self.peak_bytes, alive)
        self._profile = None

    def _watching_resize(self) -> Any:
        resize = torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            finalizer = self._watched.pop(storage._cdata, None)
            # Asked for its own size, a storage stays where it is.
            if finalizer is not None and size != storage.nbytes():
                finalizer.detach()
                _mark_leaving(storage.nbytes())
            return resize(storage, size)

        return resize_


def _mark_leaving(num_bytes: int) -> None:
    with record_function(f"{_LEAVES}{num_bytes}"):
        pass


def _storages(tensors: Iterable[torch.Tensor]) -> dict[int, torch.UntypedStorage]:
    """The local storages behind tensors, by their address in C++."""
    storages = {}
    for tensor in tensors:
        local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
        storage = local.untyped_storage()
        storages[storage._cdata] = storage
    return storages


def _reachable_tensors() -> list[torch.Tensor]:
    """All CPU tensors with memory of their own that Python's garbage collector knows, and their gradients."""
    # By type: isinstance asks an object for its class, and some modules answer with a deprecation warning.
    tensors = [o for o in gc.get_objects() if issubclass(type(o), torch.Tensor)]
    tensors += [t.grad for t in tensors if t.is_leaf and t.grad is not None]
    return [t for t in tensors if t.device.type == "cpu" and t.layout == torch.strided]
