"""A loss or a gradient that is not finite: which tensors are not, and what to try."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from shardwise.base.interfaces import ParallelModel, Storage
from shardwise.base.words import listed
from shardwise.models.names import hf_name, is_adapter
from shardwise.parallel.place import local
from shardwise.parallel.reduce import from_every_rank


@dataclass(frozen=True)
class NotFinite:
    """The tensors of this rank that are not finite, by their names in files.

    They are in order from the output of the model to its input.
    """

    weights: tuple[str, ...]
    gradients: tuple[str, ...]


def look_through(pm: ParallelModel, optimizer: torch.optim.Optimizer | None = None) -> NotFinite:
    """Look through this rank's weights and the gradients that `optimizer` is about to use."""
    groups = [] if optimizer is None else optimizer.param_groups
    gradients = [
        (name, p.grad)
        for g in groups
        for name, p in zip(g["param_names"], g["params"])
        if p.grad is not None
    ]
    order = {name: place for place, (name, _) in enumerate(pm.named_parameters())}
    gradients.sort(key=lambda pair: order.get(pair[0], -1))  # groups are by weight decay and rate
    return NotFinite(_names(pm.named_parameters(), pm.storage), _names(gradients, pm.storage))


def explain(on_this_rank: NotFinite, just_loaded: bool, trained: bool) -> str:
    """Return a clause that names what is not finite on any rank, and after a colon what to try.

    `just_loaded`: no step has changed the weights since they were read. `trained`: a step has, in
    this run or before. This is a collective: an all-gather of the names, between all ranks.
    """
    ranks = from_every_rank(on_this_rank)[::-1]  # the last stage of a pipeline is on the last ranks
    weights = list(dict.fromkeys(name for rank in ranks for name in rank.weights))
    gradients = list(dict.fromkeys(name for rank in ranks for name in rank.gradients))
    if weights and just_loaded:
        return (
            f"weights {listed(weights)} are not finite as they were loaded: "
            "give a model or checkpoint without NaN"
        )
    where = "all weights are finite"
    if weights:
        where = f"weights {listed(weights)} are not finite"
    elif gradients:
        where += f", gradients {listed(gradients)} are not"
    if trained:
        return (
            f"{where}: lower optimizer.lr, lengthen optimizer.warmup_steps or set "
            "training.precision=float32"
        )
    return (
        f"{where}: look at the rows and at config.json; in 16 bits, set training.precision and "
        "model.dtype to float32"
    )


def _names(tensors: Iterable[tuple[str, torch.Tensor]], storage: Storage) -> tuple[str, ...]:
    values = ((name, storage.values(tensor.detach())) for name, tensor in tensors)
    names = (name for name, tensor in values if not local(tensor).isfinite().all())
    return tuple(name if is_adapter(name) else hf_name(name) for name in names)[::-1]
