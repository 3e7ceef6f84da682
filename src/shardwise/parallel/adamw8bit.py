"""AdamW with moments in 8 bits (kernels/eight_bit.py), of parameters and of shards of them.

Nothing is sent: each rank keeps the codes and scales of what it updates. No cut of a weight goes
through a block, as a rule refuses a run in which one would, so that blocks are those of one
process. Codes are sharded as the parameter is, and so are scales, whose last dim is 1/BLOCK of its.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise.kernels import eight_bit
from shardwise.parallel.place import local, placed
from shardwise.parallel.with_adamw import WithAdamW, count_of_steps


class AdamW8bit(WithAdamW):
    """AdamW with moments in 8 bits for selected groups, and in the weights' dtype for the others.

    Parameters may be DTensors.
    """

    def __init__(
        self, groups: list[dict[str, Any]], lr: float, betas: tuple[float, float], eps: float
    ) -> None:
        super().__init__(groups, lr, betas, eps)
        self._betas, self._eps = betas, eps

    def _update(self, parameter: nn.Parameter, lr: float, weight_decay: float) -> None:
        gradient, state = parameter.grad, self.state[parameter]
        assert gradient is not None
        if not state:
            state.update({name: make() for name, make in zero_states(parameter).items()})
        state["step"] += 1
        eight_bit.update_(
            local(parameter.detach()),
            local(gradient),
            {name: local(tensor) for name, tensor in state.items()},
            lr,
            self._betas,
            self._eps,
            weight_decay,
        )


def zero_states(parameter: torch.Tensor) -> dict[str, Callable[[], torch.Tensor]]:
    """Return what makes the states of a parameter, or of this rank's shard, before a step."""
    states: dict[str, Callable[[], torch.Tensor]] = {"step": count_of_steps}
    for moment in eight_bit.MOMENTS:
        codes, scales = eight_bit.names_of(moment)
        states[codes] = partial(_zeros, parameter, eight_bit.CODES, 1)
        states[scales] = partial(_zeros, parameter, torch.float32, eight_bit.BLOCK)
    return states


def _zeros(parameter: torch.Tensor, dtype: torch.dtype, block: int) -> torch.Tensor:
    """Return a zero for each `block` values of a row, sharded as the parameter is."""
    part = local(parameter.detach())
    zeros = part.new_zeros((*part.shape[:-1], part.shape[-1] // block), dtype=dtype)
    if not isinstance(parameter, DTensor):
        return zeros
    shape = *parameter.shape[:-1], parameter.shape[-1] // block
    return placed(zeros, parameter.device_mesh, parameter.placements, shape)
