"""Tensors of a simulated step: few whole numbers have values, all else has a shape and no memory.

A step reads some values on the host: how many targets a batch has, how many tokens each expert
gets. They come from whole numbers such as token ids, labels and places, so these are computed as
ever. What is computed from weights is torch's FakeTensor: a shape, a dtype and strides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed._tools.fake_collectives  # functional collectives take fake tensors
from torch._C import _get_dispatch_mode, _TorchDispatchModeKey
from torch._C._distributed_c10d import _create_work_from_future  # ty: ignore[import-not-found]
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from shardwise.config import UserError
from tests.oracles.allocations import StorageRecorder

_aten, _c10d = torch.ops.aten, torch.ops.c10d
WAY_OUT = "go by the formulas, or measure a run with measure.memory"
MOST_VALUES = 2**22
"""A larger tensor has no values: this many whole numbers take 32 MiB."""
FEW_VALUES = 2**15
"""A larger tensor of floating point that is made of nothing has none. A module's buffers, which are
read while a model is built, are smaller: frequencies of rotary positions, Falcon-H1's multipliers.
Gradients and an optimizer's states of large weights are not."""

_DEPENDS_ON_VALUES = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}


class SimulatedTensors(TorchDispatchMode):
    """In this mode what is computed from weights has no memory, and every storage is recorded.

    - An operator is computed if all its inputs have values and its output is not too large.
    - Any other result is a FakeTensor on the CPU. The host reads 1 where it reads a loss or a norm.
    - Routers choose evenly: token t gets experts t k to t k + k - 1, modulo their number.
    - A tensor with values keeps them where others without values are written into it.
    - A rank receives 1 where another one would send it a whole number: by this the stages of
      torch's pipelines agree that they know the shapes of what they pass on.
    """

    def __init__(self, recorder: StorageRecorder, copies_whole: bool) -> None:
        """Record storages by `recorder`.

        `copies_whole`: whether a gather and a reduce-scatter copy the whole tensor, as gloo's do.
        """
        super().__init__()
        self._recorder, self._copies_whole = recorder, copies_whole
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if _get_dispatch_mode(_TorchDispatchModeKey.FAKE) is not None:
            # DTensor finds out a shape with fake tensors of its own, which are no part of the step.
            return func(*args, **kwargs)
        tensors = _tensors((args, kwargs))
        if any(is_traceable_wrapper_subclass(tensor) for tensor in tensors):
            return NotImplemented  # A DTensor calls operators on the tensors that it wraps.
        if any(isinstance(tensor, FakeTensor) for tensor in tensors):
            result = self._without_values(func, args, kwargs, tensors)
        else:
            result = self._with_values(func, args, kwargs, tensors)
        for tensor in _tensors(result):
            if isinstance(tensor, FakeTensor) or not tensor.is_meta:
                self._recorder.see(tensor)
        return result

    def _shapes(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        with self._fake:
            return func(*args, **kwargs)

    def _without_values(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], tensors: list[torch.Tensor]
    ) -> Any:
        """Return the result of an operator of which some input is fake."""
        if func is _aten._local_scalar_dense.default:
            return _number(args[0])
        if func.namespace == "c10d":
            return self._communicated(func, args, tensors)
        if _writes_into_first(func) and not isinstance(args[0], FakeTensor):
            return args[0]
        result = self._shapes(func, args, kwargs)
        if isinstance(result, FakeTensor) and result.is_meta:
            # PEFT makes adapters on the CPU and moves them to meta.
            return torch.empty_strided(
                result.shape, result.stride(), dtype=result.dtype, device="meta"
            )
        if func is _aten.topk.default:
            dim = args[2] if len(args) > 2 else kwargs.get("dim", -1)
            return result[0], _in_turn(result[1], args[0].shape[dim])
        return result

    def _with_values(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], tensors: list[torch.Tensor]
    ) -> Any:
        """Return the result of an operator of which every input has values, or is on meta."""
        device, from_meta = kwargs.get("device"), any(tensor.is_meta for tensor in tensors)
        stays_on_meta = from_meta if device is None else device.type == "meta"
        if stays_on_meta:
            return func(*args, **kwargs)  # The model is built there.
        if func is _c10d.recv_.default:
            for tensor in tensors:
                tensor.fill_(1)
        # The output is no larger than the inputs, or its shape comes from their values.
        is_small = func.is_view or func._schema.is_mutable or func.namespace == "c10d"
        if is_small or not _DEPENDS_ON_VALUES.isdisjoint(func.tags):
            return func(*args, **kwargs)
        shapes = self._shapes(func, args, kwargs)
        if not from_meta and all(_has_values(made, bool(tensors)) for made in _tensors(shapes)):
            return func(*args, **kwargs)
        return shapes

    def _communicated(self, func: Any, args: Sequence[Any], tensors: list[torch.Tensor]) -> Any:
        """Return the result of an operator of a process group; its `Work` keeps the tensors."""
        whole = {_c10d._allgather_base_.default: 0, _c10d._reduce_scatter_base_.default: 1}
        if func in whole and self._copies_whole:
            self._recorder.see(self._shapes(torch.empty_like, (args[whole[func]],), {}))
        future = torch.futures.Future[list[torch.Tensor]]()
        future.set_result(tensors)
        work = _create_work_from_future(future).boxed()
        return work if len(func._schema.returns) == 1 else (args[0], work)


class NumbersAreOne(TorchFunctionMode):
    """In this mode the host reads 1 for each number of a list, as for a loss or a norm alone.

    What a rank would be sent is uninitialised, and a sum of it is often no number.
    """

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is torch.Tensor.tolist and args[0].is_floating_point():
            return np.ones(tuple(args[0].shape)).tolist()
        return func(*args, **(kwargs or {}))


def _tensors(arguments: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, torch.Tensor)]


def _writes_into_first(func: Any) -> bool:
    """Return whether an operator changes its first argument, a tensor, and returns it."""
    returns, first = func._schema.returns, func._schema.arguments[0]
    is_returned = len(returns) == 1 and returns[0].alias_info is not None
    return is_returned and first.alias_info is not None and first.alias_info.is_write


def _has_values(result: torch.Tensor, is_computed: bool) -> bool:
    is_few = is_computed or not result.is_floating_point()
    return result.numel() <= (MOST_VALUES if is_few else FEW_VALUES)


def _number(tensor: torch.Tensor) -> float:
    """Return what the host reads of a number without a value, such as a loss."""
    if tensor.is_floating_point():
        return 1.0
    raise UserError(
        "the step cannot be simulated: the host reads a whole number or a truth that is computed "
        f"from weights, which have no values; {WAY_OUT}"
    )


def _in_turn(indices: torch.Tensor, num_choices: int) -> torch.Tensor:
    """Return indices [..., k] that choose each of `num_choices` equally often."""
    if indices.numel() > MOST_VALUES:
        return indices
    return torch.arange(indices.numel()).remainder_(num_choices).view(indices.shape)
