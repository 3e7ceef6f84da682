"""Allocations in CPU memory: exact, by torch's profiler, or sampled where that is not possible.

`cpu_recorder` is the only door to this file. torch counts the bytes of its CPU allocator for its
profiler, but has no public call that returns them. So all that is private of torch stands here, in
`_Profiler`. Where a version of torch lacks it, bytes are those of the tensors that are alive at
certain moments, which is a lower bound, and a warning says so.
"""

import ctypes
import gc
import os
import warnings
import weakref
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.autograd.profiler import record_function

from shardwise.base.records.memory_parts import AllocationEvent
from shardwise.metrics.allocations import AllocationRecorder, Allocations, replaced
from shardwise.metrics.live_tensors import cpu_tensors, gradients, live_tensors
from shardwise.models.storages import storages

# Names of markers in the profiler's timeline. A marker has nothing else, so the name of the second
# kind ends with the address of a block.
_MARK = "shardwise.mark"
_FREED = "shardwise.freed:"


def cpu_recorder() -> AllocationRecorder:
    """Return a recorder of CPU memory: an exact one, or with a warning one that samples."""
    try:
        profiler = _Profiler()
    except (ImportError, AttributeError, OSError, ValueError, StopIteration) as error:
        warnings.warn(
            f"peak memory is a lower bound, sampled at a few moments: torch {torch.__version__} "
            f"does not report its CPU allocations as expected ({error})",
            stacklevel=3,
        )
        return _SampledRecorder()
    return _ExactRecorder(profiler)


class _Change(NamedTuple):
    """An allocation, or with negative `size_bytes` a free, as torch's CPU allocator reports it."""

    address: int
    size_bytes: int
    total_bytes: int
    """All bytes that the allocator has counted since it began, after this change."""


class _Profiler:
    """torch's profiler, set to record allocations in CPU memory, and markers."""

    def __init__(self) -> None:
        """Look up what is private of torch; an error of any kind where it is not there."""
        from torch._C import _autograd, _profiler

        # Without it the profiler's library logs each start and stop to stderr. The library reads
        # the variable when it is used for the first time.
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        self._prepare = _autograd._prepare_profiler
        self._enable: Any = _autograd._enable_profiler  # its stub lacks the last argument
        self._disable: Any = _autograd._disable_profiler
        # With memory, and without shapes, stacks, FLOPs and modules.
        options = (False, True, False, False, False, _profiler._ExperimentalConfig())
        self._config = _profiler.ProfilerConfig(_profiler.ProfilerState.KINETO, *options)
        self._without_modes: Any = torch._C._DisableTorchDispatch
        self._activities = {_profiler.ProfilerActivity.CPU}
        # Markers alone: a step has twenty times as many events of operators as of allocations.
        self._scopes = {_profiler.RecordScope.USER_SCOPE}
        self._allocation = _profiler._EventType.Allocation
        # A global variable of C++ lets the allocator count in every thread, not only in those that
        # the profiler has reached. gloo's threads allocate and free like ours, but they drop the
        # last reference to a finished operation, and with it to buffers, outside of the part that
        # runs with our thread-local state. Python can only set the variable by its symbol.
        library = next(Path(torch.__file__).parent.glob("lib/libc10.*"))
        symbol = "FLAGS_caffe2_report_cpu_memory_usage"
        self._in_all_threads = ctypes.c_bool.in_dll(ctypes.CDLL(str(library)), symbol)

    def start(self) -> None:
        """Start to record, in all threads."""
        self._prepare(self._config, self._activities)
        self._enable(self._config, self._activities, self._scopes)
        self._in_all_threads.value = True

    def put_marker(self, name: str) -> None:
        """Put a marker into the timeline.

        A marker is an operator to torch. Dispatch modes must not see it: selective checkpointing
        refuses one that the first forward did not have.
        """
        with self._without_modes(), record_function(name):
            pass

    def stop(self) -> list[_Change | str]:
        """Stop, and return changes of CPU memory and names of markers in order of time."""
        self._in_all_threads.value = False
        timeline: list[_Change | str] = []
        for event in self.raw_events():
            if event.tag != self._allocation:
                timeline.append(event.name)
            elif event.extra_fields.device.type == "cpu":
                block = event.extra_fields
                timeline.append(_Change(block.ptr, block.alloc_size, block.total_allocated))
        return timeline

    def raw_events(self) -> list[Any]:
        """Stop the profiler and return its events, of all threads, in order of time."""
        tree = self._disable().experimental_event_tree()
        return sorted(_flattened(tree), key=lambda event: event.start_time_ns)


def _flattened(nodes: Iterable[Any]) -> Iterator[Any]:
    """Yield all events of the profiler's tree."""
    for node in nodes:
        yield node
        yield from _flattened(node.children)


class _ExactRecorder:
    """Adds up what torch's CPU allocator reports to the bytes that are alive at the start.

    The profiler knows nothing of blocks from before the start. So the recorder watches their
    storages, and puts a marker into the timeline when one of them dies or is resized. (torch may
    then write a line to stderr that it does not know the block.)
    """

    def __init__(self, profiler: _Profiler) -> None:
        self._profiler = profiler
        self._watch = ExitStack()

    def start(self) -> None:
        """Start to record."""
        gc.collect()
        tensors = live_tensors()
        self._tensors = [weakref.ref(tensor) for tensor in tensors]
        cpu_storages = storages(cpu_tensors(tensors))
        at_entry = {key: storage for key, storage in cpu_storages.items() if storage.data_ptr()}
        del tensors
        self._entry_sizes = {s.data_ptr(): s.nbytes() for s in at_entry.values()}
        self._finalizers = {
            key: weakref.finalize(
                storage, self._profiler.put_marker, f"{_FREED}{storage.data_ptr()}"
            )
            for key, storage in at_entry.items()
        }
        self._watch.enter_context(replaced(torch.UntypedStorage, "resize_", self._resize()))
        self._profiler.start()
        # Its allocation is the first event. It is freed last.
        self._probe = torch.empty(1)

    def address(self, storage: torch.UntypedStorage) -> int | None:
        """Return the address of a storage in events; None if it is on another device."""
        return storage.data_ptr() if storage.device.type == "cpu" else None

    def mark(self) -> None:
        """Put a mark between the events so far and those that follow."""
        self._profiler.put_marker(_MARK)

    def stop(self) -> Allocations:
        """Stop, and return what was recorded."""
        probe_bytes = self._probe.nbytes
        del self._probe
        timeline = self._profiler.stop()
        self._watch.close()
        for finalizer in self._finalizers.values():
            finalizer.detach()
        changes = [entry for entry in timeline if isinstance(entry, _Change)]
        buckets = self._unseen_gradient_bytes({change.address for change in changes})
        entry_bytes = alive_bytes = peak_bytes = sum(self._entry_sizes.values()) + buckets
        first_total = changes[0].total_bytes
        unseen = set(self._entry_sizes)  # addresses of blocks from before the start
        allocated = set[int]()  # addresses of blocks that are alive, allocated since the start
        freed_bytes = mistaken_bytes = 0
        events: list[AllocationEvent | None] = []
        for entry in timeline:
            if isinstance(entry, _Change):
                if entry.address in unseen:
                    unseen.discard(entry.address)
                    # A marker counts the end of this block. torch counts it too if it remembers a
                    # block here from an earlier measurement, and with the size of that one.
                    mistaken_bytes += max(0, -entry.size_bytes)
                elif entry.size_bytes < 0 and entry.address not in allocated:
                    # So torch also remembers one that only C++ could reach at the start.
                    mistaken_bytes -= entry.size_bytes
                if entry.size_bytes > 0:
                    allocated.add(entry.address)
                else:
                    allocated.discard(entry.address)
                counted_bytes = entry.total_bytes - first_total + mistaken_bytes
                alive_bytes = entry_bytes + counted_bytes - freed_bytes
                peak_bytes = max(peak_bytes, alive_bytes)
                events.append(AllocationEvent(entry.address, entry.size_bytes, alive_bytes))
            elif entry == _MARK:
                events.append(None)
            elif entry.startswith(_FREED):
                address = int(entry.removeprefix(_FREED))
                freed_bytes += self._entry_sizes[address]
                events.append(AllocationEvent(address, 0, alive_bytes))
        return Allocations(events, entry_bytes, alive_bytes + probe_bytes, peak_bytes)

    def _unseen_gradient_bytes(self, allocated: set[int]) -> int:
        """Return the bytes of gradients that were neither found at the start nor allocated since.

        They lie in the buckets of DistributedDataParallel, which were there before; see PeakMemory.
        """
        tensors = [tensor for reference in self._tensors if (tensor := reference()) is not None]
        cpu_storages = storages(cpu_tensors(gradients(tensors))).values()
        sizes = {storage.data_ptr(): storage.nbytes() for storage in cpu_storages}
        unseen = sizes.keys() - self._entry_sizes.keys() - allocated
        return sum(sizes[address] for address in unseen)

    def _resize(self) -> Any:
        """Return `resize_` of storages that puts a marker where a watched storage is resized."""
        resize = torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            address = storage.data_ptr()
            # It allocates, copies, and only then frees, even if the size stays the same.
            result = resize(storage, size)
            finalizer = self._finalizers.pop(storage._cdata, None)
            # Without `detach` it is a new storage in the place of a dead one.
            if finalizer is not None and finalizer.detach():
                self._profiler.put_marker(f"{_FREED}{address}")
            return result

        return resize_


class _SampledRecorder:
    """Looks at the start and at each mark which tensors are alive.

    What lives between two moments only, or in an operator, is not seen.
    """

    def start(self) -> None:
        """Start to record."""
        self._events: list[AllocationEvent | None] = []
        self._sizes = self._alive()
        self._entry_bytes = self._alive_bytes = self._peak_bytes = sum(self._sizes.values())

    def address(self, storage: torch.UntypedStorage) -> int | None:
        """Return the address of a storage in events; None if it is on another device."""
        return storage.data_ptr() if storage.device.type == "cpu" else None

    def mark(self) -> None:
        """Record the changes since the last look, and put a mark behind them."""
        before, self._sizes = self._sizes, self._alive()
        changes = [(address, -size) for address, size in before.items()]
        changes += self._sizes.items()
        unchanged = before.items() & self._sizes.items()
        for address, size in changes:
            if (address, abs(size)) not in unchanged:
                self._alive_bytes += size
                self._events.append(AllocationEvent(address, size, self._alive_bytes))
        self._peak_bytes = max(self._peak_bytes, self._alive_bytes)
        self._events.append(None)

    def stop(self) -> Allocations:
        """Stop, and return what was recorded up to the last mark."""
        return Allocations(self._events, self._entry_bytes, self._alive_bytes, self._peak_bytes)

    def _alive(self) -> dict[int, int]:
        """Return the bytes of each storage in CPU memory by its address."""
        cpu_storages = storages(cpu_tensors(live_tensors())).values()
        return {s.data_ptr(): s.nbytes() for s in cpu_storages if s.nbytes()}
