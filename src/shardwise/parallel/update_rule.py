"""The base of an optimizer: how it is made, and what ranks hold, send and compute for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from shardwise.config import Optimizer, RunConfig
from shardwise.config.optimizers import UpdateFacts
from shardwise.parallel.sent import DataStep, Messages
from shardwise.parallel.weights import Weight

if TYPE_CHECKING:
    import torch
    from torch import nn

    from shardwise.models.spec import ModelSpec

Groups = list[dict[str, Any]]
"""Parameters that are updated alike, with their names and options, as torch has them."""
States = dict[str, "Callable[[], torch.Tensor]"]
"""Functions that make the states of a parameter, by name."""
COUNT_BYTES = 4
"""Bytes of AdamW's count of a parameter's steps, in float32."""


class UpdateRule(UpdateFacts):
    """An optimizer. What this one answers is AdamW's, which others have for what they leave."""

    def selected(self, hf: nn.Module, spec: ModelSpec) -> frozenset[str]:
        """Return the names of the parameters that it does not leave to AdamW.

        The choice is by the shapes of full parameters, whatever part of them a rank has.
        """
        return frozenset()

    def make(self, groups: Groups, cfg: Optimizer, precision: str) -> torch.optim.Optimizer:
        """Return torch's optimizer over groups of a rank's parameters or shards.

        Where it selects, each group has `is_selected`. `precision`: `training.precision`.
        """
        from shardwise.parallel.by_element import AdamW

        return AdamW(groups, lr=cfg.lr, betas=cfg.betas, eps=cfg.eps)

    def states(self, parameter: torch.Tensor, is_selected: bool) -> States:
        """Return what makes the states that it keeps of a parameter after a step.

        They are zeros on the parameter's device, `meta` too, and sharded as it is, where it is a
        shard.
        """
        import torch

        from shardwise.parallel.with_adamw import count_of_steps

        like = partial(torch.zeros_like, parameter)
        return dict.fromkeys(self.whole_states, like) | {"step": count_of_steps}

    def state_bytes(self, numel: int, itemsize: int, is_selected: bool) -> int:
        """Return the bytes of the states of so many elements of a trained weight."""
        return len(self.whole_states) * numel * itemsize + COUNT_BYTES

    def update_bytes(self, cfg: RunConfig, numels: Mapping[Weight, int], is_gloo: bool) -> int:
        """Return the most bytes that an update needs, beside weights, gradients and states.

        `numels`: the elements that this rank updates of each trained weight.
        """
        return max(
            self.selected_bytes(cfg, weight, numel) if weight.is_selected else 0
            for weight, numel in numels.items()
        )

    def selected_bytes(self, cfg: RunConfig, weight: Weight, numel: int) -> int:
        """Return the bytes that it needs to update so many elements of a selected weight."""
        raise NotImplementedError

    def moved_by_element(self, weight: Weight) -> int:
        """Return the bytes of one element: weight and states read and written, gradient read."""
        return (3 + 2 * len(self.whole_states)) * weight.itemsize

    def products(self, cfg: RunConfig, weights: Iterable[Weight]) -> tuple[int, torch.dtype]:
        """Return the FLOPs of products in an update of a rank's weights, and their dtype."""
        import torch

        return 0, torch.float32

    def messages(self, step: DataStep, weights: Iterable[Weight]) -> Iterator[Messages]:
        """Yield what an update of these weights sends, of which each data rank has a shard."""
        yield from ()
