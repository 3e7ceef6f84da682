"""The global gradient norm, and clipping by it, of parameters sharded over different axes."""

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain

import torch
from torch import nn

from shardwise.base.interfaces import IN_MEMORY, Mesh, ParameterFacts, Storage
from shardwise.parallel.place import local, sharded_axes
from shardwise.parallel.reduce import sum_over

Facts = Mapping[nn.Parameter, ParameterFacts]
PLAIN = ParameterFacts()


def counted(gradient: torch.Tensor, facts: ParameterFacts) -> list[torch.Tensor]:
    """Return what this rank counts of a gradient. Rows that several ranks hold count once."""
    gradient = local(gradient)
    if facts.counted is None:
        return [gradient]
    return [gradient.narrow(*rows) for rows in facts.counted]


def _sum_of_squares(gradients: Iterator[torch.Tensor]) -> torch.Tensor:
    """Return the sum in float32 of gradients that are all on a GPU or all on the CPU.

    On a CPU torch's norm adds one square after the other to a float32, which loses 1 % of 100
    million squares. Its sum does not. There one gradient after the other is asked for.
    """
    first = next(gradients)
    if first.device.type != "cpu":
        return (
            torch.stack(torch._foreach_norm([first, *gradients], 2, torch.float32)).square().sum()
        )
    pieces = (piece for g in chain([first], gradients) for piece in g.flatten().split(2**16))
    return torch.stack([piece.float().square().sum() for piece in pieces]).sum()


def global_norm(
    parameters: Iterable[nn.Parameter], mesh: Mesh, facts: Facts, storage: Storage = IN_MEMORY
) -> torch.Tensor:
    """Return the 2-norm of all gradients together (scalar, float32), equal on every rank.

    `facts`, `storage`: see ParallelModel. Each rank adds squares up by their parameters'
    sharded axes; then these sums are summed over just these axes, 4 bytes each. So a shard counts
    once and a replica is not counted again. Stages of a pipeline hold disjoint parameters, except a
    tied weight, which one of its two stages counts.
    """
    by_axes: dict[tuple[str, ...], list[tuple[torch.Tensor, ParameterFacts]]] = {}
    for parameter in parameters:
        known = facts.get(parameter, PLAIN)
        if parameter.grad is not None and not known.is_copy:
            same_axes = by_axes.setdefault(sharded_axes(parameter, known), [])
            same_axes.append((parameter.grad, known))
    total = torch.zeros((), device=mesh.device)
    for axes in sorted(by_axes):
        pieces = (
            piece
            for gradient, known in by_axes[axes]
            for piece in counted(storage.values(gradient), known)
        )
        # Gradients that are kept on the CPU are summed where the group can be reached.
        squares = _sum_of_squares(pieces).to(mesh.device)
        total += sum_over(squares, mesh, axes)
    return sum_over(total, mesh, ("pp",)).sqrt()


@torch.no_grad()
def clip_by_global_norm(
    parameters: Iterable[nn.Parameter],
    mesh: Mesh,
    facts: Facts,
    max_norm: float | None,
    loss_scale: float = 1.0,
    storage: Storage = IN_MEMORY,
) -> torch.Tensor:
    """Divide all gradients by `loss_scale` and scale them to a global norm of at most `max_norm`.

    A norm that is not finite clips nothing, so that the gradients that are not finite can be named.
    Returns the norm before clipping, without the loss scale.
    """
    parameters = list(parameters)
    norm = global_norm(parameters, mesh, facts, storage) / loss_scale
    scale = torch.ones_like(norm) if max_norm is None else (max_norm / (norm + 1e-6)).clamp(max=1.0)
    scale = torch.where(norm.isfinite(), scale, 1.0)
    if max_norm is not None or loss_scale != 1.0:
        factor = scale / loss_scale
        for parameter in parameters:
            if parameter.grad is not None:
                values = storage.values(parameter.grad)
                gradient = local(values)  # with offload it is on the CPU
                gradient.mul_(factor.to(gradient.device))
                storage.change(parameter.grad, values)
    return norm
