"""Frozen matrices in 8 or 4 bits as modules.

In the place of a parameter stands a module of the same name, `Stored`, with the tensors that
kernels/quantised.py says: `q_proj.base_layer.weight.codes` beside `.scales`. They are parameters,
so that strategies shard, gather and count them as any others. Whatever would read the weight past
these modules finds no tensor there, and fails.
"""

from __future__ import annotations

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

    def __init__(self, weight: torch.Tensor, fmt: Format) -> None:
        super().__init__()
        self.format: Format = fmt
        self.weight_dtype = weight.dtype
        for name, (size, dtype) in shapes_of(fmt, weight.shape).items():
            memory = torch.empty(size, dtype=dtype, device="meta")
            self.register_parameter(name, nn.Parameter(memory, requires_grad=False))

    @property
    def matrix(self) -> Matrix:
        """Return this rank's share, which kernels compute with while its block runs."""
        names = tuple(self._parameters)
        tensors = tuple(getattr(self, name) for name in names)
        return Matrix(tensors, StoredLayout(self.format, names, self.weight_dtype))

    @property
    def shape(self) -> torch.Size:
        """The shape of the matrix."""
        return self.matrix.shape

    def cuts(self, cut: DimCut) -> Iterator[tuple[str, DimCut]]:
        """Yield the cut of each tensor, by its name, where the matrix has this one.

        Raises Indivisible where a rank's columns would cut a block.
        """
        *_, width = self.shape
        is_last = cut.dim == len(self.shape) - 1
        for name, tensor in self._parameters.items():
            assert tensor is not None
            size = tensor.shape[-1]
            if not is_last:
                yield name, cut
            elif name != "steps" and size > 1:
                yield name, DimCut(cut.dim, cut.rows.in_blocks(width // size))


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


def stored_in(model: nn.Module) -> dict[str, Stored]:
    """Return what is stored in few bits, by the names of the matrices."""
    return {path: part for path, part in model.named_modules() if isinstance(part, Stored)}


def weight_of(owner: Any, name: str = "weight") -> Weight:
    """Return a weight of a module as kernels take it."""
    weight = getattr(owner, name)
    return weight.matrix if isinstance(weight, Stored) else weight
