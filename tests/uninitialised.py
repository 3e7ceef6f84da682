"""What finds uninitialised memory in the operands of matrix products, on any machine.

A library may read the memory between the rows of an operand and multiply it by zero, as oneDNN does
on CPUs with AMX: harmless until a NaN lies there. So every `torch.empty` is filled with NaN, and
each product's operands are looked at with the memory between their rows.
"""

from __future__ import annotations

import math
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

PRODUCTS = (
    "mm",
    "bmm",
    "addmm",
    "addmv",
    "baddbmm",
    "mv",
    "_grouped_mm",
    "linear",
    "matmul",
    "convolution",
)


class Products(TorchDispatchMode):
    """Counts matrix products, and lists those that are handed memory with a NaN in or between the
    rows of an operand.

    What a product writes to (`out`) is not looked at.
    """

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.poisoned: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in PRODUCTS:
            self.count += 1
            for operand in args:
                if isinstance(operand, torch.Tensor) and _spanned(operand).isnan().any():
                    self.poisoned.append(
                        f"{name} of {tuple(operand.shape)}, strides {operand.stride()}"
                    )
        return func(*args, **(kwargs or {}))


def _spanned(tensor: torch.Tensor) -> torch.Tensor:
    """The memory from a tensor's first number to the end of its last row, with what lies between
    the rows."""
    if not tensor.is_floating_point() or 0 in tensor.shape:
        return torch.zeros(0)
    rows, stride = max(zip(tensor.shape, tensor.stride()), key=lambda dim: dim[1], default=(1, 1))
    start = tensor.storage_offset()
    after = tensor.untyped_storage().nbytes() // tensor.element_size() - start
    return tensor.as_strided((min(max(rows * stride, 1), after),), (1,), start)


@contextmanager
def filled_with_nan() -> Generator[Products]:
    """Within it, what torch leaves uninitialised is NaN, and products are looked at."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    assert torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    try:
        assert math.isnan(torch.empty(1).item())
        with Products() as products:
            yield products
    finally:
        torch.use_deterministic_algorithms(deterministic)
