"""What is asked of a kernel with a gate: outputs, gradients, dtypes, and what it keeps."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from tests.kernels.recurrences import weighed
from tests.models.tiny import relative_error

Kernel = Callable[..., torch.Tensor]


def run(kernel: Kernel, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The output, and the gradients of a weighed sum of it."""
    out = kernel(*tensors)
    needed = [tensor for tensor in tensors if tensor.requires_grad]
    return [out, *torch.autograd.grad(weighed(out), needed)]


def error(kernel: Kernel, naive: Kernel, tensors: Sequence[torch.Tensor]) -> float:
    """The largest difference of an output or a gradient from the naive kernel's in float64."""
    double = [x.detach().double().requires_grad_(x.requires_grad) for x in tensors]
    results = run(kernel, tensors)
    dtypes = [tensors[0].dtype, *(x.dtype for x in tensors if x.requires_grad)]
    assert [result.dtype for result in results] == dtypes
    pairs = zip(results, run(naive, double), strict=True)
    return max(relative_error(mine.double(), other) for mine, other in pairs)


def kept_elements(kernel: Kernel, tensors: Sequence[torch.Tensor]) -> int:
    """The elements that a forward keeps for its backward, each storage counted once."""
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes() // tensor.element_size()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        kernel(*tensors)
    return sum(kept.values())
