"""The description of SGD; `parallel/by_element.py` does it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from shardwise.config import Optimizer, RunConfig
from shardwise.parallel.update_rule import Groups, States, UpdateRule
from shardwise.parallel.weights import Weight

if TYPE_CHECKING:
    import torch


class SgdUpdate(UpdateRule):
    """SGD without momentum."""

    name = "sgd"
    moves_by_rate = False
    whole_states = ()

    def make(self, groups: Groups, cfg: Optimizer, precision: str) -> torch.optim.Optimizer:
        """See UpdateRule."""
        from shardwise.parallel.by_element import SGD

        return SGD(groups, lr=cfg.lr)

    def states(self, parameter: torch.Tensor, is_selected: bool) -> States:
        """Return none."""
        return {}

    def state_bytes(self, numel: int, itemsize: int, is_selected: bool) -> int:
        """Return 0, as it has not even a count of steps."""
        return 0

    def update_bytes(self, cfg: RunConfig, numels: Mapping[Weight, int], is_gloo: bool) -> int:
        """Return the bytes of copies of gradients, to which torch adds weights that decay: of one
        weight after the other on a CPU, and of all together on a GPU.
        """
        if not cfg.optimizer.weight_decay:
            return 0
        sizes = [numel * weight.itemsize for weight, numel in numels.items()]
        if is_gloo:
            return max(sizes)
        return sum(sizes) if not cfg.parallel.offloads else 0
