"""Operators that a block of code launches, and places where the host waits for the device.

A GPU that is given small operators one by one waits for the host; a host that reads a number waits
for the GPU. Both are counted on any device, so that a CPU says what a GPU would meet.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

_aten = torch.ops.aten
WAITS = {
    _aten._local_scalar_dense.default,  # item(), int(), float(), bool()
    _aten.nonzero.default,
    _aten.masked_select.default,
    _aten._unique2.default,
    _aten.unique_dim.default,
    _aten.unique_consecutive.default,
    _aten.repeat_interleave.Tensor,
}
"""Operators whose result, or its shape, the host must know."""
TO_HOST = (torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.cpu)
"""Functions that read a tensor past the dispatcher; on a GPU each is a copy that is waited for."""
WITHOUT_LAUNCH = {
    _aten.empty.memory_format,
    _aten.empty_strided.default,
    _aten.empty_like.default,
    _aten.new_empty.default,
    _aten.new_empty_strided.default,
    _aten.detach.default,
    _aten.alias.default,
    _aten._unsafe_view.default,
    _aten.lift_fresh.default,
    _aten.is_same_size.default,
    _aten.promote_types.default,
    *WAITS - {_aten.nonzero.default, _aten.masked_select.default},
}
"""Operators that compute nothing on the device, beside views."""


class Dispatches:
    """Count, in a `with` block, the operators that are launched and the waits of the host.

    An operator counts once, though some launch several kernels. Code of torch.compile is one that
    the counter does not see into, so it counts eager code only.
    """

    def __init__(self, on_host: Iterable[torch.Tensor] = ()) -> None:
        """Start with zeros; to read tensors of `on_host` is no wait: see `counts_of_steps`."""
        self.operators: Counter[str] = Counter()
        """Launched operators, by name."""
        self.waits: Counter[str] = Counter()
        """Waits of the host, by the name of what waits."""
        self._on_host = tuple(on_host)
        self._on_host_by_id = {id(tensor) for tensor in self._on_host}
        self._modes = (_Functions(self), _Operators(self))

    @property
    def num_launches(self) -> int:
        """The number of launched operators."""
        return self.operators.total()

    @property
    def num_waits(self) -> int:
        """The number of waits of the host."""
        return self.waits.total()

    def count_wait(self, name: str, x: object) -> None:
        """Count a wait for a tensor, unless it lies in the host's memory on every device."""
        if id(x) not in self._on_host_by_id:
            self.waits[name] += 1

    def __enter__(self) -> "Dispatches":
        """Start to count."""
        for mode in self._modes:
            mode.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End counting."""
        for mode in reversed(self._modes):
            mode.__exit__(kind, error, trace)


def counts_of_steps(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the counts of steps that an optimizer keeps, one per parameter.

    torch's keep them in the host's memory whatever the parameter's device, and read each in a step.
    """
    counts = (state.get("step") for state in optimizer.state.values())
    return [count for count in counts if isinstance(count, torch.Tensor) and count.is_cpu]


class _Operators(TorchDispatchMode):
    def __init__(self, counts: Dispatches) -> None:
        super().__init__()
        self._counts = counts

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in WAITS or _selects_by_mask(func, args) or _copies_to_host(func, args, kwargs):
            self._counts.count_wait(str(func), args[0])
        if not (func.is_view or func in WITHOUT_LAUNCH):
            self._counts.operators[str(func)] += 1
        return func(*args, **(kwargs or {}))


class _Functions(TorchFunctionMode):
    def __init__(self, counts: Dispatches) -> None:
        super().__init__()
        self._counts = counts

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in TO_HOST:
            self._counts.count_wait(getattr(func, "__name__", str(func)), args[0])
        return func(*args, **(kwargs or {}))


def _selects_by_mask(func: Any, args: Sequence[Any]) -> bool:
    """Return whether an index holds a mask, whose length the host must count."""
    if func not in (_aten.index.Tensor, _aten.index_put_.default, _aten.index_put.default):
        return False
    return any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1])


def _copies_to_host(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> bool:
    if func is not _aten._to_copy.default or kwargs is None or args[0].device.type == "cpu":
        return False
    device = kwargs.get("device")
    return device is not None and device.type == "cpu" and not kwargs.get("non_blocking")
