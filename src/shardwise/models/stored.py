"""Frozen matrices in 8 or 4 bits as modules.

In the place of a parameter stands a module of the same name, `Stored`, with the tensors that
kernels/quantised.py says: `q_proj.base_layer.weight.codes` beside `.scales`. They are parameters,
so that strategies shard, gather and count them as any others. Whatever would read the weight past
these modules finds no tensor there, and fails.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from shardwise.kernels.quantised import (
    Format,
    Matrix,
    StoredLayout,
    Weight,
    quantised_linear,
    shapes_of,
)
from shardwise.models.tensor_cuts import DimCut


class Stored(nn.Module):
    """A frozen matrix in few bits, under the name of the parameter that it stands for."""

    def __init__(self, weight: torch.Tensor, fmt: Format, is_transposed: bool) -> None:
        super().__init__()
        self.format: Format = fmt
        self.weight_dtype = weight.dtype
        self.is_transposed = is_transposed
        """Whether the parameter is [..., in, out]. What is stored is [..., out, in] anyway."""
        for name, (size, dtype) in shapes_of(fmt, self.turned(weight).shape).items():
            memory = torch.empty(size, dtype=dtype, device="meta")
            self.register_parameter(name, nn.Parameter(memory, requires_grad=False))

    @property
    def matrix(self) -> Matrix:
        """Return this rank's share, which kernels compute with while its block runs."""
        names = tuple(self._parameters)
        tensors = tuple(getattr(self, name) for name in names)
        layout = StoredLayout(self.format, names, self.weight_dtype, self.is_transposed)
        return Matrix(tensors, layout)

    @property
    def shape(self) -> torch.Size:
        """The shape of the parameter."""
        return self.matrix.shape

    def turned(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the parameter's dims with those of what is stored, or back."""
        return tensor.mT if self.is_transposed and tensor.dim() > 1 else tensor

    def cuts(self, cut: DimCut) -> Iterator[tuple[str, DimCut]]:
        """Yield the cut of each tensor, by its name, where the matrix has this one.

        Raises Indivisible where a rank's columns would cut a block.
        """
        dims = range(len(self.shape))
        if self.is_transposed:
            dims = (*dims[:-2], dims[-1], dims[-2])
        dim, width = dims[cut.dim], self.shape[dims[-1]]
        for name, tensor in self._parameters.items():
            assert tensor is not None
            size = tensor.shape[-1]
            if tensor.dim() == 1:
                assert dim < len(dims) - 1, "a rule refuses to cut inputs in an order of their own"
            elif dim < len(dims) - 1:
                yield name, DimCut(dim, cut.rows)
            elif name != "steps" and size > 1:
                yield name, DimCut(dim, cut.rows.in_blocks(width // size))


class QuantisedLinear(nn.Linear):
    """A frozen linear whose weight is `Stored`."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return input weight^T + bias."""
        return quantised_linear(input, _matrix(self), self.bias)


class QuantisedConv1D(Conv1D):
    """transformers' Conv1D, which keeps its weight as [in, out], with a `Stored` one."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x weight + bias."""
        return quantised_linear(x, _matrix(self).mT, self.bias)


def _matrix(linear: Any) -> Matrix:
    return linear.weight.matrix


def is_turned(owner: nn.Module) -> bool:
    """Return whether a module keeps its matrices as [..., in, out]."""
    return isinstance(owner, Conv1D) or getattr(owner, "is_transposed", False)


def stored_in(model: nn.Module) -> dict[str, Stored]:
    """Return what is stored in few bits, by the names of the matrices."""
    return {path: part for path, part in model.named_modules() if isinstance(part, Stored)}


def weight_of(owner: Any, name: str = "weight") -> Weight:
    """Return a weight of a module as kernels take it."""
    weight = getattr(owner, name)
    return weight.matrix if isinstance(weight, Stored) else weight
