"""Weights in 16 bits that no step moves, as an update is less than half of their spacing."""

import math
from collections import Counter
from collections.abc import Callable, Iterable

import torch

from shardwise.config import RunConfig
from shardwise.config.optimizers import update_facts
from shardwise.models.names import is_factor_b


def unmoved_note(
    named: Iterable[tuple[str, torch.nn.Parameter]],
    cfg: RunConfig,
    from_every_rank: Callable[[Counter[str]], list[Counter[str]]],
) -> str | None:
    """Return a line of the share of trained weights that a run leaves where they are; None: few.

    It knows no update but those that are about the learning rate.
    """
    rate, num = cfg.optimizer.lr, Counter[str]()
    for name, parameter in named:
        values = getattr(parameter, "to_local", lambda p=parameter: p)().detach()
        if parameter.requires_grad and values.element_size() == 2 and not values.is_meta and rate:
            factor = cfg.optimizer.lora_b_lr_ratio if is_factor_b(name) else 1.0
            # From 2^k to 2^(k + 1) neighbours are eps 2^k apart.
            k = math.floor(math.log2(2 * rate * factor / torch.finfo(values.dtype).eps)) + 1
            kind = "norm" if "norm" in name else "other"
            num[f"{kind} unmoved"] += int((values.abs() >= 2.0**k).sum())
            num[kind] += values.numel()
    num = sum(from_every_rank(num), Counter[str]())
    unmoved_norms, every = num["norm unmoved"], num["norm"] + num["other"]
    unmoved = unmoved_norms + num["other unmoved"]
    is_few = unmoved < 0.1 * every and unmoved_norms <= 0.5 * num["norm"]
    if not update_facts(cfg.optimizer.name).moves_by_rate or not unmoved or is_few:
        return None
    key = "lora.dtype" if cfg.lora and cfg.lora.dtype == "model" else "model.dtype"
    norms = f", and of {unmoved_norms / num['norm']:.0%} of those of norms" if num["norm"] else ""
    return (
        f"at optimizer.lr {rate:g} an update is less than half the spacing of "
        f"{unmoved / every:.0%} of the trained weights{norms}: in 16 bits no step moves them; "
        f"train with {key}: float32, and bfloat16 as training.precision"
    )
