"""What torch's operators read and write, one by one, as a layer runs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple
from unittest import mock

import peft
import torch
import transformers
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import shardwise
from shardwise.kernels import dropout
from shardwise.kernels.delta_rule import InChunks
from shardwise.kernels.lora_linear.fused import _LoraLinears
from shardwise.kernels.selective_scan.chunked import _SelectiveScan
from shardwise.kernels.short_conv import shifted
from shardwise.kernels.state_space_duality.chunked import _Mamba2Scan
from shardwise.metrics.dispatch import WITHOUT_LAUNCH

KERNELS = (InChunks, _SelectiveScan, _Mamba2Scan, _LoraLinears)
"""Functions that a GPU has kernels for: one operator each, which moves nothing but casts."""
PRICED_BY_FLOPS = (
    *("mm", "addmm", "addmm_", "bmm", "baddbmm", "_grouped_mm"),
    *("grouped_linear", "grouped_linear_gradients"),
    *("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention"),
    *("_scaled_dot_product_flash_attention_for_cpu_backward",),
)
"""Products and cores: operators that move 0 bytes."""
ONLY_WRITTEN = ("copy_", "fill_", "zero_")
"""Operators whose first argument is written and not read."""
MADE = (
    "zeros_like",
    "ones_like",
    "full_like",
    "new_zeros",
    "new_ones",
    "new_full",
    "nll_loss_backward",
)
"""Operators that read nothing of their arguments but sizes, or a number a row."""
ONE_A_ROW = ("gather", "scatter_add_", "nll_loss_forward")
"""Operators that read or write a number a row of their arguments."""
PACKAGES = tuple(str(Path(package.__file__).parent) for package in (shardwise, transformers, peft))
"""Packages whose code an operator is put down to."""


class Launch(NamedTuple):
    """One operator or kernel."""

    name: str
    moved_bytes: int
    """Bytes of its inputs and outputs."""
    is_product: bool
    """A product, or a core between products, which FLOPs price rather than bytes."""
    where: str
    """The code that runs it, or of whose backward it is: file and function."""


class CountedOperators(TorchDispatchMode):
    """Notes each operator that launches a kernel, in a `with` block, and the bytes that it moves.

    Views, allocations and what asks for sizes launch none (WITHOUT_LAUNCH). `as_one`: functions of
    autograd that count as one operator, which moves nothing but casts. `where`: that of the forward
    whose backward is counted.
    """

    active: CountedOperators | None = None
    """The one that counts now."""

    def __init__(
        self, as_one: Iterable[Any] = KERNELS, where: Mapping[int, str] = MappingProxyType({})
    ) -> None:
        super().__init__()
        self.launches: list[Launch] = []
        self.is_in_kernel = False
        self._as_one_operator = tuple(as_one)
        self.where = dict(where)
        """The code in which autograd has recorded a node, by the node's number."""

    @property
    def moves(self) -> list[int]:
        """The bytes of each operator, 0 for products."""
        return [0 if launch.is_product else launch.moved_bytes for launch in self.launches]

    def note(self, name: str, tensors: Any, is_product: bool = True) -> None:
        """Count a kernel by its inputs and outputs, unless it is part of one that counts."""
        if self.is_in_kernel:
            return
        each = {id(x): x for x in tree_leaves(tensors) if isinstance(x, torch.Tensor)}
        moved = sum(num_bytes(x) for x in each.values())
        self.launches.append(Launch(name, moved, is_product, self._origin()))

    def _origin(self) -> str:
        where = _running_code()
        node = torch._C._current_autograd_node()
        if node is None:
            self.where[torch._C._autograd._get_sequence_nr() - 1] = where
        elif not where:
            where = self.where.get(node._sequence_nr(), type(node).__name__)
        return where

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        space, name = func._schema.name.split("::")
        if space == "prim" or func.is_view or func in WITHOUT_LAUNCH:
            return result
        if self.is_in_kernel and not (name == "_to_copy" and is_frozen_weight(args[0])):
            return result
        inputs = () if name in MADE else args[1:] if name in ONLY_WRITTEN else args
        others = {key: value for key, value in (kwargs or {}).items() if key != "out"}
        read = {id(x): x for x in tree_leaves((inputs, others)) if isinstance(x, torch.Tensor)}
        written = [x for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
        moved = sum(num_bytes(x) for x in [*read.values(), *written])
        moved = 0 if name in ONE_A_ROW else moved
        self.launches.append(Launch(name, moved, name in PRICED_BY_FLOPS, self._origin()))
        return result

    def __enter__(self) -> CountedOperators:
        """Start to count; kernels count as one operator, and nothing goes block by block."""
        self._patches = ExitStack()
        for module, name in ((shifted, "BLOCK"), (dropout, "CPU_BLOCK")):
            self._patches.enter_context(mock.patch.object(module, name, 2**62))
        for kernel, name in product(self._as_one_operator, ("forward", "backward")):
            method = staticmethod(self._as_one(getattr(kernel, name)))
            self._patches.enter_context(mock.patch.object(kernel, name, method))
        CountedOperators.active = self
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        """End counting."""
        super().__exit__(*error)
        CountedOperators.active = None
        self._patches.close()

    def _as_one(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            with self._in_kernel():
                return method(*args, **kwargs)

        return run

    @contextmanager
    def _in_kernel(self) -> Iterator[None]:
        self.note("kernel", ())
        self.is_in_kernel = True
        try:
            yield
        finally:
            self.is_in_kernel = False


def _running_code() -> str:
    """The innermost code of the project, of transformers or of PEFT that runs; "" if none does."""
    frame = sys._getframe(2)
    while frame is not None:
        code = frame.f_code
        if code.co_filename.startswith(PACKAGES) and code.co_qualname != "Tuned._run":
            function = code.co_qualname.partition(".<locals>")[0]
            return f"{'/'.join(Path(code.co_filename).parts[-2:])}:{function}"
        frame = frame.f_back
    return ""


def num_bytes(x: torch.Tensor) -> int:
    """The bytes of a tensor that lie apart: an expanded one has each number once."""
    numel = 1
    for size, stride in zip(x.shape, x.stride(), strict=True):
        numel *= size if stride else 1
    return numel * x.itemsize


def is_frozen_weight(x: torch.Tensor) -> bool:
    """Whether x is a frozen weight, or a view of one."""
    base = x if x._base is None else x._base
    return isinstance(base, nn.Parameter) and not base.requires_grad
