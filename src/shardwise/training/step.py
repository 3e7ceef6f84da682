"""One optimizer step: the same lines for every layout."""

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from shardwise.assembly.build import Job
from shardwise.assembly.routing import STATISTICS
from shardwise.base.batches import AnyBatch
from shardwise.base.interfaces import Mesh, ParallelModel
from shardwise.config import require
from shardwise.parallel.clip import clip_by_global_norm
from shardwise.parallel.reduce import sum_over
from shardwise.training.not_finite import NotFinite, look_through


@dataclass(frozen=True)
class StepResult:
    """Result of a step, equal on every rank."""

    loss: float
    """The mean over the target tokens of the global batch, or its pairs, before the update."""
    grad_norm: float
    """The global norm before clipping, without the loss scale."""
    tokens: int
    """Target tokens of the global batch."""
    skipped: bool = False
    """Whether float16 gradients have overflown, so that the weights were left as they are."""
    routing: Mapping[str, float] = field(default_factory=dict)
    """How even the loads of experts were: see STATISTICS; empty in a model without experts."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Means over the pairs of the global batch, by `Objective.names`."""


Phase = Literal["backward", "reduction", "update"]
After = Callable[[Phase], object]
"""Function that a step calls after each of its phases. After `update` gradients are there still."""


def nothing(phase: Phase) -> None:
    """Do nothing after a phase."""


def count_targets(
    pm: ParallelModel, microbatches: Sequence[AnyBatch], mesh: Mesh
) -> tuple[int, int]:
    """Return the target tokens of the global batch, and what its loss is divided by.

    This rank reads some complete rows of it. The host waits for the device once.
    """
    count = torch.stack([pm.objective.count(batch) for batch in microbatches]).sum(0)
    counts = sum_over(count, mesh, mesh.ROW_AXES).tolist()
    return counts[0], counts[-1]


def sum_loss(loss: torch.Tensor, mesh: Mesh) -> torch.Tensor:
    """Add the ranks' disjoint parts of the summed loss up, in place.

    The stages of a pipeline before the last one have 0, or their share of the router loss.
    """
    return sum_over(loss, mesh, ("pp", *mesh.gradient_axes))


def forward_backward(
    pm: ParallelModel,
    microbatches: Sequence[AnyBatch],
    mesh: Mesh,
    scale: float = 1.0,
    after: After = nothing,
) -> tuple[torch.Tensor, int]:
    """Leave `scale` times the gradient of the global batch's mean loss in every `.grad`.

    Returns that loss, not scaled, and the number of target tokens.
    """
    tokens, divisor = count_targets(pm, microbatches, mesh)
    require(divisor > 0, "a global batch has no target; give rows of which one has a label")
    loss = pm.run(pm, microbatches, scale / divisor, True)
    after("backward")
    for reduce in pm.reduce_grads:
        reduce()
    after("reduction")
    return sum_loss(loss, mesh) / divisor, tokens


def training_step(
    job: Job,
    microbatches: Sequence[AnyBatch],
    mesh: Mesh,
    max_grad_norm: float | None,
    after: After = nothing,
) -> StepResult:
    """Run forward and backward, clip the gradients, and update the weights.

    Raises NonFiniteLossError, before the update, if the loss or the norm is not finite. In float16
    a norm that is not finite skips the update instead and lowers the loss scale. Such a step
    counts, so that a step's learning rate and rows are functions of its number alone.
    """
    loss, tokens = forward_backward(job.pm, microbatches, mesh, job.loss_scale.scale, after)
    norm = clip_by_global_norm(
        job.trainable(),
        mesh,
        job.pm.parameter_facts,
        max_grad_norm,
        job.loss_scale.scale,
        job.pm.storage,
    )
    objective, routing = job.pm.objective, job.routing
    numbers = [loss.double(), norm.double(), *objective.take().double()]
    if routing is not None:
        routing.take(job.pm, mesh)
        numbers += routing.statistics().double()
    # One wait of the host for all numbers.
    loss_number, norm_number, *statistics = torch.stack(numbers).tolist()
    finite = math.isfinite(norm_number)
    metrics, statistics = statistics[: len(objective.names)], statistics[len(objective.names) :]
    result = StepResult(
        loss_number,
        norm_number,
        tokens,
        skipped=not finite,
        routing=dict(zip(STATISTICS, statistics)),
        metrics=dict(zip(objective.names, metrics)),
    )
    if not (math.isfinite(loss_number) and job.loss_scale.update(finite)):
        raise NonFiniteLossError(result, look_through(job.pm, job.optimizer))
    if finite:
        job.optimizer.step()
        if routing is not None:
            routing.balance(job.pm)
    after("update")
    with warnings.catch_warnings():
        # torch warns where the first step was skipped.
        warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")
        job.lr_schedule.step()
    job.optimizer.zero_grad(set_to_none=True)
    return result


class NonFiniteLossError(ArithmeticError):
    """The loss or the gradient norm of a step is NaN or infinite, on every rank alike."""

    def __init__(self, result: StepResult, found: NotFinite) -> None:
        super().__init__(f"loss {result.loss}, gradient norm {result.grad_norm}")
        self.found = found
        """Names of what is not finite on this rank."""
