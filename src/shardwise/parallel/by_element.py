"""torch's optimizers that update each element by itself, here on this rank's part of a parameter.

Such an update of a shard needs nothing from other ranks. On DTensors, each operation of torch takes
tens of microseconds of Python, and torch updates one parameter after the other, on a GPU too. The
parts are plain tensors, which torch updates all together: AdamW everywhere, SGD on a GPU.
"""

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


class AdamW(_OfParts, torch.optim.AdamW):
    """torch's AdamW, whose parameters may be DTensors, by its fused kernel.

    It needs no memory of its own; torch's other ways need tensors like the weights. But it takes
    every tensor as contiguous, and a shard that is a view into a weight along another dim than the
    first is not: of torch 2.13 it updates the elements that follow in memory, without a word. Such
    tensors are copied for the update, and written back.
    """

    def __init__(self, params: Any, **options: Any) -> None:
        """Take what torch's AdamW takes."""
        super().__init__(params, fused=True, **options)
        self._copied: list[tuple[torch.Tensor, torch.Tensor]] = []

    def _init_group(  # ty: ignore[incompatible-method-override]
        self, group: dict[str, Any], *lists: list[Any]
    ) -> bool:
        """Fill the lists with contiguous tensors."""
        has_complex = super()._init_group(group, *lists)
        for tensors in lists:
            for place, tensor in enumerate(tensors):
                if not tensor.is_contiguous():
                    tensors[place] = tensor.contiguous()
                    self._copied.append((tensor, tensors[place]))
        return has_complex

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update every parameter that has a gradient."""
        self._copied.clear()
        loss = super().step(closure)
        for tensor, copy in self._copied:
            tensor.copy_(copy)
        self._copied.clear()
        return loss


class SGD(_OfParts, torch.optim.SGD):  # ty: ignore[incompatible-method-override]
    """torch's SGD without momentum, whose parameters may be DTensors."""
