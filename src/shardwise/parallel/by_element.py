"""torch's optimizers that update each element by itself, here on this rank's part of a parameter.

Such an update of a shard needs nothing from other ranks. On DTensors, each operation of torch takes
tens of microseconds of Python, and torch updates one parameter after the other, on a GPU too. The
parts are plain tensors, which torch updates all together: AdamW everywhere, SGD on a GPU.
"""

from __future__ import annotations

from typing import Any

import torch

from shardwise.parallel.place import local


class _OfParts(torch.optim.Optimizer):
    """States are DTensors where parameters are, so that checkpoints know how they are sharded."""

    def _init_group(self, group: dict[str, Any], *lists: list[Any]) -> bool:
        """Fill the lists with what torch updates: parameters, gradients and each of the states."""
        has_complex = super()._init_group(group, *lists)  # ty: ignore[missing-attribute]
        for tensors in lists:
            tensors[:] = map(local, tensors)
        return has_complex


class AdamW(_OfParts, torch.optim.AdamW):  # ty: ignore[incompatible-method-override]
    """torch's AdamW, whose parameters may be DTensors, by its fused kernel.

    It needs no memory of its own; torch's other ways need tensors like the weights.
    """

    def __init__(self, params: Any, **options: Any) -> None:
        """Take what torch's AdamW takes."""
        super().__init__(params, fused=True, **options)


class SGD(_OfParts, torch.optim.SGD):  # ty: ignore[incompatible-method-override]
    """torch's SGD without momentum, whose parameters may be DTensors."""
