"""Bytes of tensors: what a rank holds, and the most that is alive at once inside a block of code."""

from __future__ import annotations

import ctypes
import gc
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import compress, pairwise
from pathlib import Path
from types import TracebackType
from typing import Any
from unittest import mock

import psutil
import torch
from torch._C._autograd import _disable_profiler, _enable_profiler, _prepare_profiler
from torch._C._profiler import (
    ProfilerActivity,
    ProfilerConfig,
    ProfilerState,
    RecordScope,
    _EventType,
    _ExperimentalConfig,
)
from torch.autograd.profiler import record_function
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from shardwise.records.memory_parts import Event, Mark, parts_at_peak

_LEFT = "shardwise.left:"  # name of a marker in the profiler's timeline: the block at this address has been freed
_MARK = "shardwise.mark"  # the same, for a call of `PeakMemory.mark`

Held = Mapping[str, Iterable[torch.Tensor]]
"""Tensors by the part of memory that they are: weights, gradients, optimizer."""


def tensor_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the storages behind these tensors on this rank, each storage once (views and tied weights share one).

    A DTensor counts with its local shard, padding included. A `meta` tensor counts as if it were allocated.
    """
    return sum(storage.nbytes() for storage in _storages(tensors).values())


def memory_in_use(device: torch.device) -> int:
    """Bytes in use now, for a person to watch: of the GPU's allocator, or the resident set of this process."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    return psutil.Process().memory_info().rss


def state_tensors(parameters: Iterable[torch.Tensor], optimizer: torch.optim.Optimizer) -> Held:
    """What a rank holds between steps: `weights`, `gradients` (those that are set) and `optimizer`.

    `parameters` are all parameters, frozen ones too. `optimizer` is every tensor of its state, step counters included,
    and what it works on if that is not the model's own.
    """
    weights = list(parameters)
    updated = [p for group in optimizer.param_groups for p in group["params"]]
    state = [value for entry in optimizer.state.values() for value in entry.values()]
    return {
        "weights": weights,
        "gradients": [p.grad for p in (*weights, *updated) if p.grad is not None],
        "optimizer": [*updated, *(value for value in state if isinstance(value, torch.Tensor))],
    }


def state_bytes(parameters: Iterable[torch.Tensor], optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Bytes of `state_tensors` on this rank; each storage counts once, at its first place in their order."""
    counted: list[torch.Tensor] = []
    sizes: dict[str, int] = {}
    for part, tensors in state_tensors(parameters, optimizer).items():
        counted += tensors
        sizes[part] = tensor_bytes(counted) - sum(sizes.values())
    return sizes


class PeakMemory:
    """Bytes of tensors alive on `device` around a `with` block: `entry_bytes`, `exit_bytes` and the most, `peak_bytes`.

    `parts` says what the peak was made of (see `parts_at_peak`). For that, `held` gives the tensors of weights,
    gradients and optimizer at entry, at exit and whenever `mark` is called.

    On CUDA these are the caching allocator's own figures, and `parts` follows its history of allocations.

    On a CPU they are exact too. To the bytes alive at entry is added what torch's allocator counts and reports to the
    profiler: each allocation and free, temporaries inside an operator and `storage.resize_` included (by the latter
    fsdp2 drops and regains gathered weights). A dispatch mode that watches storages sees neither. But the profiler
    knows nothing of what was allocated before it started, hence:

    - alive at entry are the storages of all tensors that Python can reach, and of their gradients. What only C++ holds
      is missed, with one exception: a gradient that is set at exit, but whose memory was neither found at entry nor
      allocated inside, lies in memory that was there before. So the buckets of DistributedDataParallel count if
      `gradient_as_bucket_view=True` makes gradients of them and the block does not end by setting those to None.
    - such a storage that dies or is resized inside is taken off at that moment, by a marker in the profiler's
      timeline. (torch may write a line to stderr that it does not know the block; the marker is for that.)
    - what a thread of the user's own allocates and frees again between two allocations of this one is not seen.

    gloo lets go of its buffers in a thread of its own, at times a little after the operation has ended; so figures of
    distributed runs may differ by a buffer from one time to the next, as the memory does.

    It costs about 10 microseconds per allocation or free, 1 s for 10^5, most of it at exit, and at
    entry a collection of garbage, 0.3 s where torch and transformers are imported (see
    `freeze_imports`): use it in a step that is not timed. It cannot be nested, nor used inside a
    profiler. All figures stay None until the block ends.
    """

    def __init__(self, device: torch.device, held: Callable[[], Held] = dict) -> None:
        assert device.type in ("cpu", "cuda"), f"PeakMemory knows cpu and cuda, not {device}"
        self.device = device
        self.entry_bytes: int | None = None
        self.exit_bytes: int | None = None
        self.peak_bytes: int | None = None
        self.parts: dict[str, int] | None = None
        self._held = held
        self._marks: list[Mark] = []
        self._recorder = _CudaRecorder(device) if device.type == "cuda" else _CpuRecorder()

    def __enter__(self) -> PeakMemory:
        """Start to measure."""
        self._recorder.start()
        self.mark()
        return self

    def mark(self, ends_forward: bool = False) -> None:
        """Look what is held now; before each micro-batch's forward, and after it with `ends_forward`."""
        held: dict[int, tuple[str, int]] = {}
        for part, tensors in self._held().items():
            for storage in _storages(tensors).values():
                if storage.device.type == self.device.type and storage.nbytes():
                    held.setdefault(storage.data_ptr(), (part, storage.nbytes()))
        self._marks.append(Mark(held, ends_forward))
        self._recorder.mark()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Stop, and set the figures, also where the block ends in an exception."""
        self.mark()
        events, self.entry_bytes, self.exit_bytes, self.peak_bytes = self._recorder.stop()
        marks = iter(self._marks)
        timeline = [event or next(marks) for event in events]
        self.parts = parts_at_peak(timeline, self.entry_bytes, self.peak_bytes)


Recorded = tuple[list[Event | None], int, int, int]
"""Events in order, None for a mark; bytes at entry, at exit, at the peak."""


class _CudaRecorder:
    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.entry_bytes = 0
        self.marks: list[int] = []

    def start(self) -> None:
        torch.cuda.synchronize(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        self.entry_bytes = torch.cuda.memory_allocated(self.device)
        torch.cuda.memory._record_memory_history(context=None)

    def mark(self) -> None:
        stats = torch.cuda.memory_stats(self.device)
        self.marks.append(stats["allocation.all.allocated"] + stats["allocation.all.freed"])

    def stop(self) -> Recorded:
        torch.cuda.synchronize(self.device)
        peak, exit_bytes = torch.cuda.max_memory_allocated(self.device), torch.cuda.memory_allocated(self.device)
        index = torch.cuda.current_device() if self.device.index is None else self.device.index
        history = torch.cuda.memory._snapshot()["device_traces"][index]
        torch.cuda.memory._record_memory_history(enabled=None)
        changes = [entry for entry in history if entry["action"] in ("alloc", "free_requested")]
        unrecorded = self.marks[-1] - len(changes)  # counted by the allocator before anybody recorded
        events: list[Event | None] = []
        alive = self.entry_bytes  # from here on without what the allocator rounds up
        for begin, end in pairwise(mark - unrecorded for mark in self.marks):
            events.append(None)
            for entry in changes[begin:end]:
                size = entry["size"] if entry["action"] == "alloc" else -entry["size"]
                alive += size
                events.append(Event(entry["addr"], size, alive))
        return [*events, None], self.entry_bytes, exit_bytes, peak


class _CpuRecorder:
    def start(self) -> None:
        # Else the profiler's library logs each start and stop to stderr. It reads this when it is first used.
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        gc.collect()
        tensors = _tensors()
        self.tensors = [weakref.ref(tensor) for tensor in tensors]
        storages = {key: s for key, s in _storages(_on_cpu(tensors)).items() if s.data_ptr()}
        del tensors
        self.at_entry = {storage.data_ptr(): storage.nbytes() for storage in storages.values()}
        self.watched = {key: weakref.finalize(s, _mark_left, s.data_ptr()) for key, s in storages.items()}
        self.patch = mock.patch.object(torch.UntypedStorage, "resize_", self._watched_resize())
        self.patch.start()
        # Allocations and our own markers alone: a step has twenty times as many events of operators.
        config = ProfilerConfig(ProfilerState.KINETO, False, True, False, False, False, _ExperimentalConfig())
        _prepare_profiler(config, {ProfilerActivity.CPU})
        enable: Any = _enable_profiler  # whose stub lacks the last argument
        enable(config, {ProfilerActivity.CPU}, {RecordScope.USER_SCOPE})
        _count_all_threads(True)
        self.probe = torch.empty(1)  # makes the first event and, when it is freed, the last one

    def mark(self) -> None:
        with record_function(_MARK):
            pass

    def stop(self) -> Recorded:
        probe_bytes = self.probe.nbytes
        del self.probe
        _count_all_threads(False)
        results: Any = _disable_profiler()
        self.patch.stop()
        for finalizer in self.watched.values():
            finalizer.detach()
        timeline = sorted(_events(results.experimental_event_tree()), key=lambda e: e.start_time_ns)
        from_before = set(self.at_entry)
        # DistributedDataParallel's buckets, see PeakMemory.
        allocated = {e.extra_fields.ptr for e in timeline if e.tag == _EventType.Allocation}
        still_there = [tensor for reference in self.tensors if (tensor := reference()) is not None]
        gradients = {s.data_ptr(): s.nbytes() for s in _storages(_on_cpu(_gradients(still_there))).values()}
        buckets = sum(gradients[ptr] for ptr in gradients.keys() - self.at_entry.keys() - allocated)
        entry = alive = peak = sum(self.at_entry.values()) + buckets
        count_at_start, left, mistaken = None, 0, 0
        events: list[Event | None] = []
        for event in timeline:
            if event.name == _MARK:
                events.append(None)
                continue
            if event.name.startswith(_LEFT):
                address = int(event.name.removeprefix(_LEFT))
                left += self.at_entry[address]
                events.append(Event(address, 0, alive))
                continue
            if event.tag != _EventType.Allocation or event.extra_fields.device.type != "cpu":
                continue
            block = event.extra_fields
            if count_at_start is None:
                count_at_start = block.total_allocated
            if block.ptr in from_before:
                from_before.discard(block.ptr)
                # The marker has its size. torch counts its end only if it remembers some block there from an earlier
                # measurement, and then with that one's size.
                mistaken += max(0, -block.alloc_size)
            alive = entry + block.total_allocated - count_at_start - left + mistaken
            peak = max(peak, alive)
            events.append(Event(block.ptr, block.alloc_size, alive))
        return events, entry, alive + probe_bytes, peak

    def _watched_resize(self) -> Any:
        resize = torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            address = storage.data_ptr()
            result = resize(storage, size)  # allocates, copies, and only then frees, even if the size stays the same
            finalizer = self.watched.pop(storage._cdata, None)
            if finalizer is not None and finalizer.detach():  # else it is a new storage at a dead one's place
                _mark_left(address)
            return result

        return resize_


def _count_all_threads(on: bool) -> None:
    """Let torch's CPU allocator count in every thread, not only in those that the profiler has reached.

    gloo's threads allocate and free as ours does, but the last reference to a finished operation, and with it to
    buffers, is dropped outside the part that runs with our thread-local state. Python has no way to this switch, a
    global variable in C++ for diagnosis, but the symbol.
    """
    library = ctypes.CDLL(str(next(Path(torch.__file__).parent.glob("lib/libc10.*"))))
    ctypes.c_bool.in_dll(library, "FLAGS_caffe2_report_cpu_memory_usage").value = on


def _events(nodes: Iterable[Any]) -> Iterator[Any]:
    """All events of the profiler's tree, of all threads."""
    for node in nodes:
        yield node
        yield from _events(node.children)


def _mark_left(address: int) -> None:
    with record_function(f"{_LEFT}{address}"):
        pass


def _storages(tensors: Iterable[torch.Tensor]) -> dict[int, torch.UntypedStorage]:
    """The storages behind tensors, by their address in C++."""
    storages = (plain.untyped_storage() for tensor in tensors for plain in _plain_tensors(tensor))
    return {storage._cdata: storage for storage in storages}


def _plain_tensors(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensors with memory that a tensor is made of: itself, or what a subclass (DTensor: its shard) wraps."""
    if not is_traceable_wrapper_subclass(tensor):
        yield tensor
        return
    for name in tensor.__tensor_flatten__()[0]:
        part = getattr(tensor, name)
        if isinstance(part, torch.Tensor):
            yield from _plain_tensors(part)


def freeze_imports() -> None:
    """Exempt all that this process has imported from garbage collections, its own and those of processes it forks.

    A collection of what torch and transformers are, 400,000 objects, takes 0.3 s. The tensors among them stay known to
    PeakMemory.
    """
    _FROZEN.extend(map(weakref.ref, _unfrozen_tensors()))
    gc.freeze()


_FROZEN: list[weakref.ref[torch.Tensor]] = []
"""The tensors that `freeze_imports` has hidden from the garbage collector."""


def _tensors() -> list[torch.Tensor]:
    """The tensors that Python's garbage collector knows."""
    frozen = (reference() for reference in _FROZEN)
    return [*(tensor for tensor in frozen if tensor is not None), *_unfrozen_tensors()]


def _unfrozen_tensors() -> list[torch.Tensor]:
    # By type: isinstance asks an object for its class, and some modules answer with a deprecation warning. Without a
    # loop in Python: there are some 400,000 objects, and a few hundred tensors.
    objects = gc.get_objects()
    return list(compress(objects, map(_subclasses(torch.Tensor).__contains__, map(type, objects))))


def _on_cpu(tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """What of these tensors, and of their gradients, lies in CPU memory; of a DTensor, its shard."""
    tensors = list(tensors)
    for tensor in [*tensors, *_gradients(tensors)]:
        for plain in _plain_tensors(tensor):
            if plain.layout == torch.strided and plain.untyped_storage().device.type == "cpu":
                yield plain


def _subclasses(cls: type) -> set[type]:
    return {cls}.union(*map(_subclasses, cls.__subclasses__()))


def _gradients(tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    return (t.grad for t in tensors if t.is_leaf and t.grad is not None)
