"""One optimizer step: the same lines for every layout."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from shardwise.assembly.build import Job
from shardwise.interfaces import Batch, Mesh, ParallelModel
from shardwise.parallel.reduce import DATA_AXES, sum_over
from shardwise.training.gradients import clip_by_global_norm
from shardwise.training.not_finite import NotFinite, look_through

LOSS_AXES = ("pp", *DATA_AXES, "cp")
"""Ranks along these hold disjoint parts of the summed loss (pipeline stages before the last one hold 0)."""


@dataclass(frozen=True)
class StepResult:
    """What a step did, equal on every rank."""

    loss: float  # mean over the global batch's target tokens, before the update
    grad_norm: float  # global, before clipping; of the loss as it is, whatever its scale was
    tokens: int  # target tokens of the global batch
    skipped: bool = False  # float16 gradients have overflown: the weights were left as they are


def count_targets(microbatches: Sequence[Batch], mesh: Mesh) -> int:
    """Target tokens of the global batch, from this rank's share of it."""
    count = torch.tensor(
        sum(batch.num_target_tokens() for batch in microbatches), device=mesh.device
    )
    return int(sum_over(count, mesh, DATA_AXES))


def forward_backward(
    pm: ParallelModel, microbatches: Sequence[Batch], mesh: Mesh, scale: float = 1.0
) -> tuple[torch.Tensor, int]:
    """Leave in every `.grad` `scale` times the gradient of the global batch's mean loss.

    Return that loss (not scaled) and the number of target tokens.
    """
    tokens = count_targets(microbatches, mesh)
    assert tokens > 0, "a global batch without a single target token"
    loss = pm.run(pm, microbatches, scale / tokens, True)
    for reduce in pm.reduce_grads:
        reduce()
    return sum_over(loss, mesh, LOSS_AXES) / tokens, tokens


def training_step(
    job: Job, microbatches: Sequence[Batch], mesh: Mesh, max_grad_norm: float | None
) -> StepResult:
    """Forward, backward, clip, update; NonFiniteLossError, before the update, if loss or norm is not finite.

    In float16 a norm that is not finite skips the update instead and lowers the loss scale; the step counts, and the
    learning rate goes on, so that the rate of a step and its rows are functions of its number alone.
    """
    loss, tokens = forward_backward(job.pm, microbatches, mesh, job.loss_scale.scale)
    norm = clip_by_global_norm(
        job.trainable(), mesh, job.pm.parameter_facts, max_grad_norm, job.loss_scale.scale
    )
    finite = bool(torch.isfinite(norm))
    result = StepResult(loss.item(), norm.item(), tokens, skipped=not finite)
    if not (torch.isfinite(loss) and job.loss_scale.update(finite)):
        raise NonFiniteLossError(result, look_through(job.pm, job.optimizer))
    if finite:
        job.optimizer.step()
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", "Detected call of `lr_scheduler.step"
        )  # where the first step was skipped
        job.lr_schedule.step()
    job.optimizer.zero_grad(set_to_none=True)
    return result


class NonFiniteLossError(ArithmeticError):
    """The loss or the gradient norm of a step is NaN or infinite; equal on every rank, so all stop together."""

    def __init__(self, result: StepResult, found: NotFinite) -> None:
        super().__init__(f"loss {result.loss}, gradient norm {result.grad_norm}")
        self.found = found  # on this rank
