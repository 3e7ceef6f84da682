"""The optimizer, and the learning rate as a pure function of the step."""

import math
from collections.abc import Container, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from shardwise.config import Optimizer
from shardwise.models.names import is_factor_b
from shardwise.models.spec import ModelSpec
from shardwise.models.weights import WeightRow, weights_of
from shardwise.parallel.optimizers import OPTIMIZERS


def decayed(hf: nn.Module, spec: ModelSpec) -> frozenset[str]:
    """Return the names of the parameters on which weight decay acts, by their full shapes."""
    return frozenset(row.name for row in weights_of(hf, spec) if is_decayed(row, spec.is_own))


def is_decayed(row: WeightRow, is_own: bool) -> bool:
    """Return whether weight decay acts on a full (not sharded) parameter.

    In a module of the caller it acts on all with two dims or more, as plain recipes of AdamW do. In
    a model of a family it acts on LoRA factors, also of rank 1, and on whatever has two dims longer
    than 1: a convolution ([C, 1, K]) and the gate of an MLP are weights of a product like any
    other.
    It does not act on norms, magnitudes of DoRA, biases, rates of decay (`A_log`, in Mamba one per
    channel and state; `dt_bias`, `D`) and the linears that make gates and rates out of the input
    (`Kind.gating`): their size is no sign of overfitting, and pulled to 0 they change what the
    layer computes.
    """
    if is_own:
        return len(row.shape) > 1
    if row.part:
        return row.part in ("lora_A", "lora_B")
    is_matrix = sum(size > 1 for size in row.shape) > 1
    return is_matrix and row.role not in ("rate", "gating", "score", "bias")


def make_optimizer(
    cfg: Optimizer,
    named: Sequence[tuple[str, nn.Parameter]],
    decayed: Container[str],
    selected: Container[str] = (),
    precision: str = "bfloat16",
) -> torch.optim.Optimizer:
    """Return the optimizer `cfg.name` over this rank's trainable parameters or shards.

    `decayed`: names of the parameters on which weight decay acts; a shard need not show its
    parameter's shape. Each group has its parameters' names in `param_names`, by which an
    optimizer's states are saved. The first group has the learning rate that is reported, `cfg.lr`:
    groups of LoRA's factors B at another rate come last.
    `selected`: see `UpdateRule.selected`; `precision`: `training.precision`.
    """
    rule = OPTIMIZERS[cfg.name]
    groups: dict[tuple[bool, float, bool], list[tuple[str, nn.Parameter]]] = {}
    for name, parameter in named:
        ratio = cfg.lora_b_lr_ratio if is_factor_b(name) else 1.0
        key = name in decayed, ratio, rule.selects and name in selected
        groups.setdefault(key, []).append((name, parameter))
    options: list[dict[str, Any]] = [
        {
            "params": parameters,
            "weight_decay": cfg.weight_decay if decays else 0.0,
            "lr": cfg.lr * ratio,
        }
        | ({"is_selected": is_selected} if rule.selects else {})
        for (decays, ratio, is_selected), parameters in sorted(
            groups.items(), key=lambda group: group[0][1] != 1
        )
    ]
    if not named:
        # A pipeline's stage may have nothing to train, but it has a learning rate.
        options = [{"params": [], "param_names": [], "weight_decay": 0.0, "is_selected": False}]
    return rule.make(options, cfg, precision)


def optimized_parameters(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield (name, parameter or shard) of everything that an optimizer updates on this rank."""
    for group in optimizer.param_groups:
        yield from zip(group["param_names"], group["params"], strict=True)


def lr_phases(cfg: Optimizer, steps: int) -> tuple[int, float]:
    """Return the last step of the warm-up, and the last step before the learning rate falls.

    Between the two the learning rate is the peak.
    """
    warmup = cfg.warmup_steps or round(cfg.warmup_ratio * steps)
    if cfg.lr_schedule == "constant":
        return warmup, math.inf
    if cfg.lr_schedule == "wsd":
        return warmup, max(warmup, steps - round(cfg.decay_ratio * steps))
    return warmup, warmup


def lr_factor(cfg: Optimizer, step: int, steps: int) -> float:
    """Return the share of the peak learning rate in step 1 <= `step` <= `steps`.

    It rises linearly to 1 in the last step of the warm-up, stays, then falls from 1 towards
    `min_lr_ratio`, which it would reach in step `steps` + 1. The phases of `wsd` are those of
    MiniCPM (arXiv 2404.06395), whose decay is exponential; ours is linear, so that it has an end.
    """
    warmup, plateau = lr_phases(cfg, steps)
    if step <= warmup:
        return step / warmup
    if step <= plateau:
        return 1.0
    progress = (step - plateau - 1) / (steps - plateau)
    height = 1 - progress
    if cfg.lr_schedule == "cosine":
        height = (1 + math.cos(math.pi * progress)) / 2
    return cfg.min_lr_ratio + (1 - cfg.min_lr_ratio) * height


def make_lr_schedule(
    cfg: Optimizer, optimizer: torch.optim.Optimizer, steps: int, done: int = 0
) -> torch.optim.lr_scheduler.LambdaLR:
    """Return a scheduler whose `step()` follows each optimizer step, after `done` earlier ones."""
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"]  # torch needs it in a schedule that does not start at 0
    return torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda done: lr_factor(cfg, min(done + 1, steps), steps), last_epoch=done - 1
    )
