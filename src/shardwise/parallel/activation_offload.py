"""Activation offload: what a layer keeps for its backward waits in CPU memory.

Autograd gives each tensor that it keeps to a hook, which copies the storage below it, once for all
tensors in it, so that the backward sees the very same views. Weights stay, as they are kept anyway.
While a layer's backward runs, what the layer below has kept comes back. On a GPU, copies between
pinned memory and the device run on a separate stream; on a CPU everything is copied too, so that
runs there show what is moved.
Source: torch.autograd.graph.saved_tensors_hooks, which torch.utils.checkpoint is made to work with:
it keeps its inputs by `save_for_backward`.
"""

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from shardwise.base.interfaces import Mesh, ParallelModel
from shardwise.config import RunConfig
from shardwise.models.part import ModelPart
from shardwise.models.spec import ModelSpec
from shardwise.models.storages import storages

LEAST_BYTES = 1024
"""Bytes below which a tensor stays, as a copy would take longer than it is worth."""


def apply(pm: ParallelModel, mesh: Mesh, cfg: RunConfig, spec: ModelSpec) -> ParallelModel:
    """Move what the forwards of layers keep to the CPU, and back before their backward."""
    stream = torch.cuda.Stream(mesh.device) if mesh.device.type == "cuda" else None
    for part in pm.parts:
        assert isinstance(part, ModelPart)
        offload = Offload(part, mesh.device, stream)
        for layer in part.spec.layers:
            module = part.hf.get_submodule(layer.name)
            module.forward = offload.around(module)
    return pm


class Moved:
    """A storage in CPU memory, and on the device again once its backward is near."""

    def __init__(self, storage: torch.UntypedStorage, offload: "Offload") -> None:
        on_device = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        self._offload = offload
        self._on_cpu: torch.Tensor | None = offload.to_cpu(on_device)
        self._on_device: torch.Tensor | None = None
        self._arrived: torch.cuda.Event | None = None

    def fetch(self) -> None:
        """Begin to copy it to the device, unless that has begun."""
        if self._on_cpu is not None:
            self._on_device, self._arrived = self._offload.to_device(self._on_cpu)
            self._on_cpu = None

    def storage(self) -> torch.UntypedStorage:
        """Return it on the device, for what is launched next."""
        self.fetch()
        assert self._on_device is not None
        if self._arrived is not None:
            torch.cuda.current_stream().wait_event(self._arrived)
        return self._on_device.untyped_storage()


class LayerForward:
    """Tensors that one forward of a layer has moved."""

    def __init__(self, below: "LayerForward | None") -> None:
        """Take the forward of the layer below on the same micro-batch."""
        self.below = below
        self.moved: list[weakref.ref[Moved]] = []

    def begin_backward(self) -> None:
        """Fetch what the layer below has moved, the first time."""
        below, self.below = self.below, None
        if below is not None:
            for reference in below.moved:
                if (moved := reference()) is not None:
                    moved.fetch()


class KeptTensor(NamedTuple):
    """The stand-in that autograd keeps in place of a tensor."""

    moved: Moved
    layer: LayerForward
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: Any


class Offload:
    """Tensors that the layers of one part move, micro-batch by micro-batch."""

    def __init__(
        self, part: ModelPart, device: torch.device, stream: torch.cuda.Stream | None
    ) -> None:
        self.part, self.device, self.stream = part, device, stream
        self.lowest: nn.Module | None = None
        self.latest: LayerForward | None = None
        # By (address of a storage's record, version of its numbers): it is moved once, although
        # several tensors see it. The first reference keeps the address from being used again.
        self.known: dict[tuple[int, int], tuple[StorageWeakRef, weakref.ref[Moved]]] = {}

    def around(self, layer: nn.Module) -> Callable[..., Any]:
        """Return the layer's forward, after which what it keeps is on the CPU; the lowest first."""
        forward = layer.forward
        self.lowest = self.lowest or layer

        def offloaded(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            if layer is self.lowest:  # of another micro-batch
                self.known.clear()
                self.latest = None
            this = LayerForward(self.latest)
            self.latest = this
            held = storages((*layer.parameters(), *layer.buffers()))  # as they are gathered now
            weights = {storage.data_ptr() for storage in held.values()}

            def keep(tensor: torch.Tensor) -> KeptTensor | torch.Tensor:
                if not self._is_moved(tensor, weights):
                    return tensor
                moved = self._move(tensor, this)
                size, stride = tensor.size(), tensor.stride()
                return KeptTensor(moved, this, tensor.dtype, size, stride, tensor.storage_offset())

            with saved_tensors_hooks(keep, _back):
                return forward(*args, **kwargs)

        return offloaded

    def _is_moved(self, tensor: torch.Tensor, weights: set[int]) -> bool:
        if is_traceable_wrapper_subclass(tensor) or tensor.device != self.device:
            return False
        storage = tensor.untyped_storage()
        return storage.nbytes() >= LEAST_BYTES and storage.data_ptr() not in weights

    def _move(self, tensor: torch.Tensor, layer: LayerForward) -> Moved:
        storage = tensor.untyped_storage()
        key = storage._cdata, tensor._version
        if key in self.known and (moved := self.known[key][1]()) is not None:
            return moved
        moved = Moved(storage, self)
        reference = weakref.ref(moved)
        self.known[key] = StorageWeakRef(storage), reference
        layer.moved.append(reference)
        self.part.offloaded_bytes += storage.nbytes()
        return moved

    def to_cpu(self, on_device: torch.Tensor) -> torch.Tensor:
        """Return a copy in CPU memory, which on a GPU is made beside what comes next."""
        if self.stream is None:
            return on_device.clone()
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            copy = torch.empty(on_device.shape, dtype=torch.uint8, pin_memory=True)
            copy.copy_(on_device, non_blocking=True)
        on_device.record_stream(self.stream)  # its memory is not given away before
        return copy

    def to_device(self, on_cpu: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event | None]:
        """Return a copy on the device and, on a GPU, what to wait for before it is read."""
        if self.stream is None:
            return on_cpu.clone(), None
        copy = torch.empty(on_cpu.shape, dtype=torch.uint8, device=self.device)
        self.stream.wait_stream(torch.cuda.current_stream())  # whose memory it may have been
        with torch.cuda.stream(self.stream):
            copy.copy_(on_cpu, non_blocking=True)
        copy.record_stream(self.stream)
        return copy, self.stream.record_event()


def _back(kept: KeptTensor | torch.Tensor) -> torch.Tensor:
    if isinstance(kept, torch.Tensor):
        return kept
    kept.layer.begin_backward()
    storage = kept.moved.storage()
    tensor = torch.empty(0, dtype=kept.dtype, device=storage.device)
    return tensor.set_(storage, kept.offset, kept.size, kept.stride)
