"""Gradients of bfloat16 weights that add up in float32 over micro-batches and ranks.

They are rounded once, before the optimizer's step. A bfloat16 sum stops growing when what is added
is under 1/256 of it. Memory: 4 bytes for an element of a gradient instead of 2.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from shardwise.base.batches import AnyBatch
from shardwise.base.interfaces import Mesh, ParallelModel
from shardwise.base.layouts import strategy_facts
from shardwise.config import RunConfig
from shardwise.models.spec import ModelSpec


def apply(pm: ParallelModel, mesh: Mesh, cfg: RunConfig, spec: ModelSpec) -> ParallelModel:
    """Let gradients be float32 from the backward to the clipping.

    The optimizer gets them in the dtype of the weights. Float32 weights need nothing. Under single,
    ddp and zero autograd adds up in float32, and ranks are added up after the last backward. Under
    fsdp2 each micro-batch's shards are moved into float32 ones. Its reduce-scatter adds up ranks in
    float32 but returns the weights' dtype, so that each micro-batch's sum over ranks is rounded
    once; few gradients (`weights.are_few`) are reduced, and rounded, once a step.
    """
    if all(p.dtype == torch.float32 for p in pm.trained().values()):
        return pm
    pm = replace(pm, make_optimizer=_rounding_once(pm.make_optimizer))
    if "weights" in strategy_facts(cfg.parallel).sharded:
        return replace(pm, run=_moving_shards(pm.run))
    _accept_float32(pm.trained().values())
    return pm


def _accept_float32(parameters: Iterable[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.grad_dtype = torch.float32


def _moving_shards(inner: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def run(
        pm: ParallelModel, microbatches: Sequence[AnyBatch], loss_scale: float, train: bool
    ) -> torch.Tensor:
        if not train:
            return inner(pm, microbatches, loss_scale, train)
        total = torch.zeros((), device=microbatches[0].device)
        trained = pm.trained().values()
        sums: dict[nn.Parameter, torch.Tensor] = {}
        for parameter in trained:
            parameter.grad_dtype = parameter.dtype  # as fsdp2 sets it
        for i, batch in enumerate(microbatches):
            last = i == len(microbatches) - 1
            alone = replace(pm, set_sync=lambda _, last=last: pm.set_sync(last))
            total += inner(alone, [batch], loss_scale, train)
            for parameter in trained:
                gradient, parameter.grad = parameter.grad, None
                if gradient is None:
                    continue  # fsdp2 keeps those of replicas in float32 until the last micro-batch.
                if parameter in sums:
                    sums[parameter].add_(gradient)
                else:
                    sums[parameter] = gradient.float()
        _accept_float32(trained)
        for parameter, gradient in sums.items():
            parameter.grad = gradient
        return total

    return run


def _rounding_once(
    make: Callable[..., torch.optim.Optimizer],
) -> Callable[..., torch.optim.Optimizer]:
    def make_optimizer(named: Any) -> torch.optim.Optimizer:
        optimizer = make(named)
        parameters = [p for group in optimizer.param_groups for p in group["params"]]

        def before(*_: object) -> None:
            for parameter in parameters:
                gradient, parameter.grad = parameter.grad, None
                parameter.grad_dtype = parameter.dtype
                parameter.grad = None if gradient is None else gradient.to(parameter.dtype)

        def after(*_: object) -> None:
            for parameter in parameters:
                parameter.grad = None
            _accept_float32(parameters)

        optimizer.register_step_pre_hook(before)
        optimizer.register_step_post_hook(after)
        _accept_float32(parameters)  # They are ZeRO's shards, if not the weights themselves.
        return optimizer

    return make_optimizer
