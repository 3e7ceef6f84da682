"""The description of AdamW with moments in 8 bits; `parallel/adamw8bit.py` does it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwise.config import Optimizer, RunConfig
from shardwise.parallel.update_rule import COUNT_BYTES, Groups, States, UpdateRule
from shardwise.parallel.weights import Weight

if TYPE_CHECKING:
    import torch
    from torch import nn

    from shardwise.models.spec import ModelSpec


class AdamW8bitUpdate(UpdateRule):
    """AdamW with the moments of matrices in 8 bits (arXiv 2110.02861)."""

    name = "adamw8bit"
    selects = True
    has_blocks = True

    def selected(self, hf: nn.Module, spec: ModelSpec) -> frozenset[str]:
        """Return the parameters whose moments have 8 bits."""
        from shardwise.models.eight_bit import names_in_8_bits

        return names_in_8_bits(hf)

    def make(self, groups: Groups, cfg: Optimizer, precision: str) -> torch.optim.Optimizer:
        """See UpdateRule."""
        from shardwise.parallel.adamw8bit import AdamW8bit

        return AdamW8bit(groups, cfg.lr, cfg.betas, cfg.eps)

    def states(self, parameter: torch.Tensor, is_selected: bool) -> States:
        """Return codes and scales of both moments for a selected parameter."""
        from shardwise.parallel.adamw8bit import zero_states

        return zero_states(parameter) if is_selected else super().states(parameter, is_selected)

    def state_bytes(self, numel: int, itemsize: int, is_selected: bool) -> int:
        """See UpdateRule."""
        from shardwise.kernels import eight_bit

        if not is_selected:
            return super().state_bytes(numel, itemsize, is_selected)
        return eight_bit.num_bytes(numel) + COUNT_BYTES

    def selected_bytes(self, cfg: RunConfig, weight: Weight, numel: int) -> int:
        """Return the bytes of a chunk of rows.

        They are both moments in float32, and while one of them is read or rounded its codes in 32
        bits and a tensor like it; in 16 bits also the gradient and the weight in float32, of which
        the latter is gone when moments are rounded.
        """
        from shardwise.models.eight_bit import chunk_numel

        return min(numel, chunk_numel(weight.shape)) * (13 if weight.itemsize == 4 else 20)

    def moved_by_element(self, weight: Weight) -> int:
        """Return the bytes of one element, whose two codes have a byte each."""
        if not weight.is_selected:
            return super().moved_by_element(weight)
        return 3 * weight.itemsize + 4
