"""What to say of a loss or a gradient that is not finite: where it shows, and what to try."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from shardwise.interfaces import ParallelModel
from shardwise.models.names import hf_name, is_adapter
from shardwise.parallel.place import local
from shardwise.parallel.reduce import of_every_rank

NUM_NAMES = 3
"""So many are named; the others are counted."""


@dataclass(frozen=True)
class NotFinite:
    """Names, as the files have them, of what is not finite on this rank, from the output of the model to its input."""

    weights: tuple[str, ...]
    gradients: tuple[str, ...]


def look_through(pm: ParallelModel, optimizer: torch.optim.Optimizer | None = None) -> NotFinite:
    """Look through this rank's weights and, with an `optimizer`, the gradients that it is about to use."""
    groups = [] if optimizer is None else optimizer.param_groups
    gradients = [
        (name, p.grad)
        for g in groups
        for name, p in zip(g["param_names"], g["params"])
        if p.grad is not None
    ]
    order = {name: place for place, (name, _) in enumerate(pm.named_parameters())}
    gradients.sort(key=lambda pair: order.get(pair[0], -1))  # groups are by weight decay
    return NotFinite(_names(pm.named_parameters()), _names(gradients))


def explain(found: NotFinite, just_loaded: bool, trained: bool) -> str:
    """Say in a clause what is not finite on any rank, and after a colon what to try. A collective of all ranks.

    `just_loaded`: no step has changed the weights since they were read; `trained`: one has, in this run or before.
    """
    ranks = of_every_rank(found)[::-1]  # the last stage of a pipeline is on the last ranks
    weights = list(dict.fromkeys(name for rank in ranks for name in rank.weights))
    gradients = list(dict.fromkeys(name for rank in ranks for name in rank.gradients))
    if weights and just_loaded:
        return f"{_listed(weights, 'weights')} are not finite as they were loaded: give a model or checkpoint without NaN"
    where = f"{_listed(weights, 'weights')} are not finite" if weights else "all weights are finite"
    if gradients and not weights:
        where += f", {_listed(gradients, 'gradients')} are not"
    if trained:
        way_out = (
            "lower optimizer.lr, lengthen optimizer.warmup_steps or set training.precision=float32"
        )
    else:
        way_out = "look at the rows and at config.json; in 16 bits, set training.precision and model.dtype to float32"
    return f"{where}: {way_out}"


def _names(tensors: Iterable[tuple[str, torch.Tensor]]) -> tuple[str, ...]:
    names = (name for name, tensor in tensors if not local(tensor.detach()).isfinite().all())
    return tuple(name if is_adapter(name) else hf_name(name) for name in names)[::-1]


def _listed(names: list[str], what: str) -> str:
    more = f" and {len(names) - NUM_NAMES} more" if len(names) > NUM_NAMES else ""
    return f"{what} {', '.join(names[:NUM_NAMES])}{more}"
