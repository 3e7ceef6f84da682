"""The base of optimizers that update selected parameters themselves, and the others by AdamW."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from shardwise.parallel.by_element import AdamW


class WithAdamW(torch.optim.Optimizer):
    """An update of its own for the groups whose `is_selected` is true, and AdamW for the others."""

    def __init__(
        self, groups: list[dict[str, Any]], lr: float, betas: tuple[float, float], eps: float
    ) -> None:
        others = [group for group in groups if not group["is_selected"]]
        empty = {"params": [], "param_names": [], "is_selected": False, "weight_decay": 0.0}
        # It has the same groups and states as this optimizer, so that schedules and checkpoints
        # see one optimizer.
        self._adamw = AdamW(others or [empty], lr=lr, betas=betas, eps=eps)
        selected = [group for group in groups if group["is_selected"]]
        super().__init__([*self._adamw.param_groups, *selected], {"lr": lr})
        self._adamw.param_groups[:] = [g for g in self.param_groups if not g["is_selected"]]
        self.state = self._adamw.state

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # ty: ignore[incompatible-method-override]
        """Update every parameter that has a gradient."""
        assert closure is None, "a step of this library has its gradients already"
        self._adamw.step()
        for group in self.param_groups:
            if group["is_selected"]:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        self._update(parameter, group["lr"], group["weight_decay"])

    def _update(self, parameter: nn.Parameter, lr: float, weight_decay: float) -> None:
        """Update a selected parameter, or this rank's shard of it, by its gradient."""
        raise NotImplementedError


def count_of_steps() -> torch.Tensor:
    """Return AdamW's count of a parameter's steps before the first one."""
    return torch.zeros((), dtype=torch.float32)
