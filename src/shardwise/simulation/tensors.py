"""Tensors of a simulated step: large ones have a shape and no memory, small whole numbers values.

A step reads some values on the host: how many targets a batch has, how many tokens each expert
gets. All of them come from whole numbers (token ids, labels, places), so tensors of these are
computed as ever. What is made of weights has no memory: torch's FakeTensor knows its shape, dtype
and strides only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed._tools.fake_collectives  # so that collectives take fake tensors
from torch._C import _get_dispatch_mode, _TorchDispatchModeKey
from torch._C._distributed_c10d import _create_work_from_future
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from shardwise.config import UserError
from shardwise.simulation.allocations import StorageRecorder

_aten, _c10d = torch.ops.aten, torch.ops.c10d
MOST_VALUES = 2**22
"""The elements of the largest tensor that has values: 4 million, or 32 MiB of whole numbers."""
FEW_VALUES = 2**12
"""Inputs of so many elements have an output that need not be measured before it is made."""


class SimulatedTensors(TorchDispatchMode):
    """In this mode what is computed from weights has no memory, and every storage is recorded.

    - An operator whose inputs all have values is computed, unless its output is too large.
    - A tensor that is made of nothing has values if it holds whole numbers or is a single number.
    - Anything else is a FakeTensor on the CPU. A number that is read of it is 1.
    - A router's choice is even: token t gets the experts t k, t k + 1, ... of all E in turn.
    - A tensor with values into which one without is written keeps its values.
    """

    def __init__(self, recorder: StorageRecorder, copies_sums: bool) -> None:
        """Record storages by `recorder`.

        `copies_sums`: whether a reduce-scatter copies what it sums, as gloo's does.
        """
        super().__init__()
        self._copies_sums = copies_sums
        self.recorder = recorder
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        # DTensor works out shapes in a mode of its own, whose tensors are no part of the step.
        if _get_dispatch_mode(_TorchDispatchModeKey.FAKE) is not None:
            return func(*args, **kwargs)
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        if any(is_traceable_wrapper_subclass(tensor) for tensor in tensors):
            return NotImplemented  # a DTensor, which calls operators on the tensors that it wraps
        result = self._result(func, args, kwargs, tensors)
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and not _is_plain_meta(tensor):
                self.recorder.see(tensor)
        return result

    def _result(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], tensors: list[torch.Tensor]
    ) -> Any:
        if not any(isinstance(tensor, FakeTensor) for tensor in tensors):
            return self._of_values(func, args, kwargs, tensors)
        if func is _aten._local_scalar_dense.default:
            return _number(args[0])
        if func.namespace == "c10d":
            return self._sent(func, args, tensors)
        with self._fake:
            result = func(*args, **kwargs)
        if func is _aten.topk.default:
            values, indices = result
            return values, _in_turn(indices, args[0].shape[kwargs.get("dim", -1)])
        if func._schema.is_mutable and isinstance(args[0], torch.Tensor):
            returned = func._schema.returns
            is_first = len(returned) == 1 and returned[0].alias_info is not None
            if is_first and not isinstance(args[0], FakeTensor) and "out" not in kwargs:
                return args[0]
        return result

    def _sent(self, func: Any, args: Sequence[Any], tensors: list[torch.Tensor]) -> Any:
        """Return what an operator of a process group does, with a `Work` that keeps its tensors."""
        if func is _c10d._reduce_scatter_base_.default and self._copies_sums:
            with self._fake:
                self.recorder.see(torch.empty_like(args[1]))
        future = torch.futures.Future()
        future.set_result(tensors)
        work = _create_work_from_future(future).boxed()
        return work if len(func._schema.returns) == 1 else (args[0], work)

    def _of_values(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], tensors: list[torch.Tensor]
    ) -> Any:
        """Return the result of an operator of which every input has values, or is on meta."""
        device = kwargs.get("device")
        is_meta = any(tensor.is_meta for tensor in tensors)
        if (device is not None and device.type == "meta") or (is_meta and device is None):
            return func(*args, **kwargs)
        if not is_meta and func.namespace != "c10d" and tensors and max(tensor.numel() for tensor in tensors) <= FEW_VALUES:
            return func(*args, **kwargs)
        if not is_meta and (func.is_view or func.namespace == "c10d"):
            result = func(*args, **kwargs)
            if func is _c10d.recv_.default:
                for tensor in args[0]:
                    tensor.fill_(1)
            return result
        with self._fake:
            result = func(*args, **kwargs)
        made = [x for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
        is_small = all(tensor.numel() <= MOST_VALUES for tensor in made)
        if tensors:
            has_values = is_small and not is_meta
        else:
            has_values = is_small and not any(
                tensor.is_floating_point() and tensor.numel() > FEW_VALUES for tensor in made
            )
        return func(*args, **kwargs) if has_values else result


def _is_plain_meta(tensor: torch.Tensor) -> bool:
    return tensor.is_meta and not isinstance(tensor, FakeTensor)


def _number(tensor: torch.Tensor) -> float:
    """Return what the host reads of a number without a value, such as a loss: 1."""
    if tensor.is_floating_point():
        return 1.0
    raise UserError(
        "the step reads a whole number that it computes from weights, and a simulation has no "
        "values of weights; measure this run with measure.memory, or plan it by the formulas"
    )


def _in_turn(indices: torch.Tensor, num_choices: int) -> torch.Tensor:
    """Return indices [..., k] as a router would that gives each expert equally many tokens."""
    if indices.numel() > MOST_VALUES:
        return indices
    return torch.arange(indices.numel()).remainder_(num_choices).view(indices.shape)
