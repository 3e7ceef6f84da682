"""What torch's operators read and write, one by one, as a layer runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import product
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

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
    *("mm", "addmm", "addmm_", "bmm", "baddbmm", "grouped_linear", "grouped_linear_gradients"),
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


class CountedOperators(TorchDispatchMode):
    """Notes the bytes that each operator reads and writes, in a `with` block."""

    def __init__(self) -> None:
        super().__init__()
        self.moves: list[int] = []
        self.is_in_kernel = False

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
        read = {id(x): x for x in tree_leaves((inputs, kwargs)) if isinstance(x, torch.Tensor)}
        written = [x for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
        moved = sum(num_bytes(x) for x in [*read.values(), *written])
        self.moves.append(0 if name in (*PRICED_BY_FLOPS, *ONE_A_ROW) else moved)
        return result

    def __enter__(self) -> CountedOperators:
        """Start to count; kernels count as one operator, and nothing goes block by block."""
        self._patches = ExitStack()
        for module, name in ((shifted, "BLOCK"), (dropout, "CPU_BLOCK")):
            self._patches.enter_context(mock.patch.object(module, name, 2**62))
        for kernel, name in product(KERNELS, ("forward", "backward")):
            method = staticmethod(self._as_one(getattr(kernel, name)))
            self._patches.enter_context(mock.patch.object(kernel, name, method))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        """End counting."""
        super().__exit__(*error)
        self._patches.close()

    def _as_one(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            with self._in_kernel():
                return method(*args, **kwargs)

        return run

    @contextmanager
    def _in_kernel(self) -> Iterator[None]:
        self.moves.append(0)
        self.is_in_kernel = True
        try:
            yield
        finally:
            self.is_in_kernel = False


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
