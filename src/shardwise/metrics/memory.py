"""Bytes of tensors: those that a rank keeps, and the most that are alive in a block of code."""

import gc
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType

import psutil
import torch

from shardwise.base.records.memory_parts import Mark, parts_at_peak
from shardwise.metrics.allocations import AllocationRecorder
from shardwise.metrics.cpu_allocations import cpu_recorder
from shardwise.metrics.cuda_allocations import CudaRecorder
from shardwise.models.storages import storages

StateTensors = Mapping[str, Iterable[torch.Tensor]]
"""Tensors by the part of memory that they are: weights, gradients, optimizer."""


def tensor_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of the storages behind these tensors on this rank.

    Each storage counts once, so views and tied weights share theirs. A DTensor counts with its
    local shard, padding included. A `meta` tensor counts as if it were allocated.
    """
    return sum(storage.nbytes() for storage in storages(tensors).values())


def memory_in_use(device: torch.device) -> int:
    """Return the bytes in use now, for display.

    On a GPU they are those of torch's allocator, on a CPU the resident set of this process.
    """
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    return psutil.Process().memory_info().rss


def state_tensors(
    parameters: Iterable[torch.Tensor], optimizer: torch.optim.Optimizer
) -> StateTensors:
    """Return the tensors that a rank keeps between steps.

    `weights` are all of `parameters`, which include the frozen ones. `gradients` are those that are
    set. `optimizer` are the tensors of the optimizer's state, step counters included, and the
    parameters that it updates where they are not the model's own.
    """
    weights = list(parameters)
    updated = [p for group in optimizer.param_groups for p in group["params"]]
    state = [value for entry in optimizer.state.values() for value in entry.values()]
    return {
        "weights": weights,
        "gradients": [p.grad for p in (*weights, *updated) if p.grad is not None],
        "optimizer": [*updated, *(value for value in state if isinstance(value, torch.Tensor))],
    }


def state_bytes(
    parameters: Iterable[torch.Tensor], optimizer: torch.optim.Optimizer
) -> dict[str, int]:
    """Return the bytes of each part of `state_tensors` on this rank.

    A storage counts once, in the first part that has it.
    """
    counted: list[torch.Tensor] = []
    sizes: dict[str, int] = {}
    for part, tensors in state_tensors(parameters, optimizer).items():
        counted += tensors
        sizes[part] = tensor_bytes(counted) - sum(sizes.values())
    return sizes


class PeakMemory:
    """Bytes of tensors alive on `device` around a `with` block.

    They are `entry_bytes`, `exit_bytes` and, at their most, `peak_bytes`. All figures stay None
    until the block ends. `parts` says what the peak consisted of (see `parts_at_peak`). For that,
    `state` returns the tensors of weights, gradients and optimizer; it is called at entry, at exit
    and at each `mark`.

    On CUDA the figures are those of the caching allocator, and `parts` follows its history.

    On a CPU they are exact too. To the bytes alive at entry are added those that torch's allocator
    counts and reports to the profiler: each allocation and free, also of temporary memory inside an
    operator, and of `storage.resize_`, by which fsdp2 frees and regains gathered weights. (A
    dispatch mode that watches storages would see neither.) Three things limit this:

    - Alive at entry are the storages of all tensors that Python can reach, and of their gradients.
      Memory that only C++ can reach is missed, with one exception: a gradient that is set at exit,
      but lies in memory that was neither found at entry nor allocated inside. That memory was there
      before. So the buckets of DistributedDataParallel count if `gradient_as_bucket_view=True`
      makes gradients of them, and if the block does not end by setting gradients to None.
    - A block that another thread of the user allocates and frees between two allocations of this
      thread is not seen.
    - gloo frees its buffers in a thread of its own, at times a little after the operation has
      ended. So figures of distributed runs can differ by a buffer from time to time, as the memory
      does.

    It costs about 10 microseconds per allocation or free, so 1 s for 10^5, most of it at exit. At
    entry it collects garbage, which takes 0.3 s where torch and transformers are imported (see
    `freeze_imports`). So use it in a step that is not timed. It cannot be nested, nor used inside a
    profiler.
    """

    def __init__(
        self,
        device: torch.device,
        state: Callable[[], StateTensors] = dict,
        recorder: AllocationRecorder | None = None,
    ) -> None:
        """Measure on `device`, by another recorder than the device's if one is given."""
        assert device.type in ("cpu", "cuda"), f"PeakMemory measures cpu and cuda, not {device}"
        self.device = device
        self.entry_bytes: int | None = None
        self.exit_bytes: int | None = None
        self.peak_bytes: int | None = None
        self.parts: dict[str, int] | None = None
        self._state = state
        self._marks: list[Mark] = []
        self._recorder = recorder or (
            CudaRecorder(device) if device.type == "cuda" else cpu_recorder()
        )

    def __enter__(self) -> "PeakMemory":
        """Start to measure."""
        self._recorder.start()
        self.mark()
        return self

    def mark(self, ends_forward: bool = False) -> None:
        """Note which tensors of the state lie where.

        Call it before the forward of each micro-batch, and after it with `ends_forward`.
        """
        blocks: dict[int, tuple[str, int]] = {}
        for part, tensors in self._state().items():
            for storage in storages(tensors).values():
                address = self._recorder.address(storage)
                if address is not None and storage.nbytes():
                    blocks.setdefault(address, (part, storage.nbytes()))
        self._marks.append(Mark(blocks, ends_forward))
        self._recorder.mark()

    def added_bytes(self) -> int:
        """Return, after the block, by how much its peak was above the bytes at entry."""
        assert self.peak_bytes is not None
        assert self.entry_bytes is not None
        return self.peak_bytes - self.entry_bytes

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Stop and set the figures, also where the block ends in an exception."""
        self.mark()
        recorded = self._recorder.stop()
        self.entry_bytes, self.exit_bytes = recorded.entry_bytes, recorded.exit_bytes
        self.peak_bytes = recorded.peak_bytes
        marks = iter(self._marks)
        timeline = [event or next(marks) for event in recorded.events]
        self.parts = parts_at_peak(timeline, recorded.entry_bytes, recorded.peak_bytes)


def free_cache(device: torch.device) -> None:
    """Collect garbage, and give the cached memory of a GPU back to the device."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
