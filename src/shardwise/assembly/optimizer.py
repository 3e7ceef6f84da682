"""The optimizer, and the learning rate as a pure function of the step."""

from __future__ import annotations

import math
from collections.abc import Container, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise.config import Optimizer
from shardwise.models.families import Family
from shardwise.models.kinds import RATES
from shardwise.models.names import hf_name, is_adapter

STATES = {"adamw": {"step", "exp_avg", "exp_avg_sq"}, "sgd": set[str]()}
"""The states that an optimizer keeps of each parameter after a step, by the optimizer's name: a count of steps, and
tensors of the parameter's shape and dtype."""


def is_decayed(name: str, parameter: nn.Parameter, family: Family) -> bool:
    """Whether weight decay acts on a whole (not sharded) parameter: LoRA factors, and what has two dims longer than 1.

    Left alone are norms, biases, rates of decay (`A_log`, in Mamba one per channel and state; `dt_bias`, `D`), and the
    linears that make gates and rates out of the input (`Family.gating`): their size is no sign of overfitting, and
    pulled to 0 they change what the layer is (a norm of 0, a forgotten state, a router that does not choose).
    Convolutions ([C, 1, K]) and the gate of an MLP are weights of a product like any other. So is a factor of rank 1.
    """
    if is_adapter(name):
        return True
    module, _, own = hf_name(name).rpartition(".")
    if own in RATES or any(module.endswith(f".{gate}") for gate in family.gating):
        return False
    return sum(size > 1 for size in parameter.shape) > 1


def make_optimizer(
    cfg: Optimizer, named: Sequence[tuple[str, nn.Parameter]], decayed: Container[str]
) -> torch.optim.Optimizer:
    """AdamW (arXiv 1711.05101) or plain SGD over this rank's trainable parameters, whole or sharded.

    `decayed`: names of the parameters on which weight decay acts, since a shard need not show its parameter's shape.
    Each group has its parameters' names in `param_names`: what is saved of an optimizer is saved by name.
    """
    # One group per kind of tensor: an optimizer's multi-tensor path refuses plain tensors beside DTensors, and DTensors
    # of several meshes. And one that may be empty: a pipeline's stage need not have anything to train, but has a
    # learning rate.
    kinds: dict[tuple[Any, bool], list[tuple[str, nn.Parameter]]] = (
        {(None, False): []} if not named else {}
    )
    for name, parameter in named:
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        kinds.setdefault((mesh, name in decayed), []).append((name, parameter))
    groups = [
        {"params": parameters, "weight_decay": cfg.weight_decay if decay else 0.0}
        for (_, decay), parameters in kinds.items()
    ]
    if not named:
        groups[0]["param_names"] = []  # which torch reads off the parameters
    if cfg.name == "sgd":
        return torch.optim.SGD(groups, lr=cfg.lr)
    return torch.optim.AdamW(groups, lr=cfg.lr, betas=cfg.betas, eps=cfg.eps)


def lr_factor(cfg: Optimizer, step: int, steps: int) -> float:
    """The share of the peak learning rate in step 1 <= `step` <= `steps`.

    It rises linearly to 1 in step `warmup_steps`, then falls towards 0, which it would reach in step `steps` + 1.
    """
    if step <= cfg.warmup_steps:
        return step / cfg.warmup_steps
    if cfg.lr_schedule == "constant":
        return 1.0
    progress = (step - cfg.warmup_steps - 1) / max(1, steps - cfg.warmup_steps)
    return (1 + math.cos(math.pi * progress)) / 2 if cfg.lr_schedule == "cosine" else 1 - progress


def make_lr_schedule(
    cfg: Optimizer, optimizer: torch.optim.Optimizer, steps: int, done: int = 0
) -> torch.optim.lr_scheduler.LambdaLR:
    """A scheduler whose `step()` follows each optimizer step, of which `done` were done before."""
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"]  # torch wants it of a schedule that does not start at 0
    return torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda done: lr_factor(cfg, min(done + 1, steps), steps), last_epoch=done - 1
    )
