"""Muon: the update of a matrix is its momentum with all singular values brought near 1.

Matrices of layers are updated by Muon, and everything else by AdamW. An update has the root mean
square of AdamW's, 0.2 at a learning rate of 1, so that one learning rate and one weight decay serve
both. A matrix whose momentum is sharded is gathered: each rank sends its part of the update to all
others, (n-1)/n of the matrix's bytes in the dtype of the products reach each rank, once a step. All
ranks orthogonalise the same matrix, and each applies its own part.
Sources: Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024); Liu et
al., "Muon is Scalable for LLM Training", arXiv 2502.16982, for the scale.
"""

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from shardwise.parallel.place import cut
from shardwise.parallel.reduce import all_gather
from shardwise.parallel.with_adamw import WithAdamW

MOMENTUM = 0.95
"""The decay rate of the momentum, torch.optim.Muon's default."""
MOMENTUM_BUFFER = "momentum_buffer"
"""The name of the momentum among a parameter's states."""
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
STEPS = 5
"""Iterations of Newton and Schulz."""
_EPSILON = 1e-7


def dtype_of(precision: str) -> torch.dtype:
    """Return the dtype in which Muon multiplies and gathers, by `training.precision`."""
    return torch.float32 if precision == "float32" else torch.bfloat16


class Muon(WithAdamW):
    """Muon for selected groups, which are matrices, with AdamW for the others.

    A matrix has two dims, and a stack of matrices `[E, out, in]` three. Both may be DTensors.
    `dtype`: in which matrices are multiplied and gathered; torch.optim.Muon has bfloat16.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        lr: float,
        betas: tuple[float, float],
        eps: float,
        dtype: torch.dtype,
    ) -> None:
        super().__init__(groups, lr, betas, eps)
        self._dtype = dtype

    def _update(self, parameter: nn.Parameter, lr: float, weight_decay: float) -> None:
        gradient = parameter.grad
        assert gradient is not None
        state = self.state[parameter]
        if MOMENTUM_BUFFER not in state:
            state[MOMENTUM_BUFFER] = torch.zeros_like(gradient)
        momentum = state[MOMENTUM_BUFFER]
        momentum.lerp_(gradient, 1 - MOMENTUM)
        update = gradient.lerp(momentum, MOMENTUM).to(self._dtype)  # Nesterov
        scale = 0.2 * math.sqrt(max(parameter.shape[-2:]))
        parameter.mul_(1 - lr * weight_decay)
        parameter.add_(_orthogonal(update).to(parameter.dtype), alpha=-lr * scale)


def _orthogonal(update: torch.Tensor) -> torch.Tensor:
    """Return the orthogonalised matrix or matrices, sharded as the given ones."""
    if not isinstance(update, DTensor):
        return _newton_schulz(update)
    sharded = [(axis, p.dim) for axis, p in enumerate(update.placements) if isinstance(p, Shard)]
    local = update.to_local()
    if any(dim >= update.dim() - 2 for _, dim in sharded):
        ((axis, dim),) = sharded
        group, rank = update.device_mesh.get_group(axis), update.device_mesh.get_local_rank(axis)
        whole = _newton_schulz(_gathered(local, dim, update.shape[dim], group))
        local = cut(whole, dim, group.size())[rank].contiguous()
    else:  # Complete matrices of a stack are on this rank.
        local = _newton_schulz(local)
    return DTensor.from_local(
        local, update.device_mesh, update.placements, shape=update.shape, stride=update.stride()
    )


def _gathered(local: torch.Tensor, dim: int, size: int, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the complete tensor, whose dim `dim` has `size` elements, of which `local` is a part.

    Each rank's part goes to all others, padded to the size of the first one.
    """
    rows = local.movedim(dim, 0)
    most = -(-size // group.size())
    padded = rows.new_zeros(most, *rows.shape[1:])
    padded[: len(rows)] = rows
    buffer = rows.new_empty(most * group.size(), *rows.shape[1:])
    all_gather(buffer, padded, group=group)
    return buffer[:size].movedim(0, dim).contiguous()


def _newton_schulz(update: torch.Tensor) -> torch.Tensor:
    """Return the matrices [..., out, in] with singular values of about 0.7 to 1.2."""
    if not update.numel():
        return update
    is_tall = update.shape[-2] > update.shape[-1]
    x = update.mT if is_tall else update
    # One matrix takes the same products as torch.optim.Muon's, which rounds as they do.
    add_product = torch.addmm if update.dim() == 2 else torch.baddbmm
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=_EPSILON)
    a, b, c = _COEFFICIENTS
    for _ in range(STEPS):
        gram = x @ x.mT
        x = add_product(x, add_product(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if is_tall else x).contiguous()
