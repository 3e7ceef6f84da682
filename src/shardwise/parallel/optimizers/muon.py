"""The description of Muon; `parallel/muon.py` does it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import prod
from typing import TYPE_CHECKING

from shardwise.config import Optimizer, RunConfig
from shardwise.parallel.sent import DataStep, Messages
from shardwise.parallel.update_rule import Groups, States, UpdateRule
from shardwise.parallel.weights import Weight

if TYPE_CHECKING:
    import torch
    from torch import nn

    from shardwise.models.spec import ModelSpec


class MuonUpdate(UpdateRule):
    """Muon (arXiv 2502.16982) for the matrices of layers, and AdamW for everything else, at the
    same learning rate.
    """

    name = "muon"
    selects = True
    needs_matrices = True

    def selected(self, hf: nn.Module, spec: ModelSpec) -> frozenset[str]:
        """Return the matrices, and the stacks of experts."""
        from shardwise.models.weights import matrices_of

        return matrices_of(hf, spec)

    def make(self, groups: Groups, cfg: Optimizer, precision: str) -> torch.optim.Optimizer:
        """See UpdateRule."""
        from shardwise.parallel.muon import Muon, dtype_of

        return Muon(groups, cfg.lr, cfg.betas, cfg.eps, dtype_of(precision))

    def states(self, parameter: torch.Tensor, is_selected: bool) -> States:
        """Return the momentum for a matrix."""
        from shardwise.parallel.muon import MOMENTUM_BUFFER

        states = super().states(parameter, is_selected)
        return {MOMENTUM_BUFFER: states[self.whole_states[0]]} if is_selected else states

    def state_bytes(self, numel: int, itemsize: int, is_selected: bool) -> int:
        """See UpdateRule."""
        return numel * itemsize if is_selected else super().state_bytes(numel, itemsize, False)

    def selected_bytes(self, cfg: RunConfig, weight: Weight, numel: int) -> int:
        """Return the most of what an update of a matrix needs in turn.

        That is the update in the weight's dtype and in that of products; the matrix, which is
        gathered where a rank has a shard of it, with two like it and two Gram matrices; and what is
        added to the weight.
        """
        from shardwise.parallel.muon import dtype_of

        size, dtype = weight.itemsize, dtype_of(cfg.training.precision).itemsize
        is_cut = numel < weight.numel and (weight.shard_dim or 0) >= len(weight.shape) - 2
        multiplied = weight.numel if is_cut else numel
        grams = multiplied // prod(weight.shape[-2:]) * min(weight.shape[-2:]) ** 2
        in_products = (3 * multiplied + 2 * grams + numel * is_cut) * dtype
        if size == dtype:
            return in_products
        return max(numel * (size + dtype), in_products, numel * (2 * dtype + size))

    def moved_by_element(self, weight: Weight) -> int:
        """Return the bytes of one element, of which a matrix has one state."""
        return 5 * weight.itemsize if weight.is_selected else super().moved_by_element(weight)

    def products(self, cfg: RunConfig, weights: Iterable[Weight]) -> tuple[int, torch.dtype]:
        """Return the FLOPs that make matrices orthogonal: every rank each matrix as a whole.

        A step of the iteration multiplies X X^T = A, A A, and (b A + c A A) X.
        """
        from shardwise.parallel.muon import STEPS, dtype_of

        total = 0
        for weight in weights:
            if weight.is_selected:
                rows, columns = sorted(weight.shape[-2:])
                matrices = weight.numel // (rows * columns)
                total += matrices * STEPS * (4 * rows**2 * columns + 2 * rows**3)
        return total, dtype_of(cfg.training.precision)

    def messages(self, step: DataStep, weights: Iterable[Weight]) -> Iterator[Messages]:
        """Yield an all-gather of each matrix's momentum, in the dtype of products.

        A stack that is cut between its experts is not gathered.
        """
        from shardwise.parallel.muon import dtype_of

        itemsize = dtype_of(step.cfg.training.precision).itemsize
        for weight in weights:
            dim = weight.shard_dim
            is_cut = dim is not None and dim >= len(weight.shape) - 2
            if weight.is_selected and weight.is_trained and is_cut:
                num_bytes = weight.padded_numel * itemsize
                yield Messages("all-gather", step.data_axis(weight), 1, num_bytes)
