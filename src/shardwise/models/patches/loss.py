"""The head computes the loss itself, so that its logits never lie in memory together."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig

from shardwise.base.batches import IGNORED
from shardwise.config import RunConfig, UserError
from shardwise.kernels.linear_cross_entropy import (
    Kernel,
    Vocabulary,
    kernel_of,
    linear_cross_entropy,
)
from shardwise.kernels.triton_support import why_not
from shardwise.models.causal_lm import CausalLM
from shardwise.models.families import FAMILIES, Family

KERNELS: dict[str, Kernel] = {"auto": "auto", "chunked": "torch", "triton": "triton"}
"""The kernel of each value of `training.loss` except plain."""


def loss_of_run(cfg: RunConfig, family: Family, device: torch.device) -> str:
    """Return what `training.loss` comes to on a device: chunked, triton or plain.

    Raises UserError where Triton is asked for and cannot run.
    """
    if not _is_in_head(cfg, family):
        return "plain"
    if cfg.training.loss == "triton" and (reason := why_not(device)) is not None:
        raise UserError(f"training.loss is triton, but {reason}; use auto or chunked")
    return "triton" if kernel_of(KERNELS[cfg.training.loss], device) == "triton" else "chunked"


def apply(part: CausalLM, cfg: RunConfig, device: torch.device) -> None:
    """Let the head of a part return the loss where it is given labels, unless the loss is plain."""
    part.loss_in_head = _is_in_head(cfg, part.family)
    if part.loss_in_head and part.spec.last:
        head = part.hf.get_submodule(part.spec.head)
        scale, softcap = _scale_and_softcap(part.hf.config, part.family)
        _give_loss(head, scale, softcap, KERNELS[cfg.training.loss])


def _is_in_head(cfg: RunConfig, family: Family) -> bool:
    # What a family that is not listed does to its logits is not known.
    return cfg.training.loss != "plain" and family.model_type in FAMILIES


def _give_loss(head: nn.Module, scale: float, softcap: float | None, kernel: Kernel) -> None:
    """Let the linear of a head, or both copies that PEFT has of it, take labels."""
    linears: list[Any] = [module for module in head.modules() if isinstance(module, nn.Linear)]
    for module in linears:
        module.forward = _logits_or_loss(module, scale, softcap, kernel)


def _logits_or_loss(
    linear: Any, scale: float, softcap: float | None, kernel: Kernel
) -> Callable[..., torch.Tensor]:
    logits = linear.forward

    def forward(
        hidden: torch.Tensor,
        labels: torch.Tensor | None = None,
        vocabulary: Vocabulary | None = None,
        rows: torch.Tensor | None = None,
        is_summed: bool = True,
    ) -> torch.Tensor:
        # Tensor parallelism says which rows of the weight a rank has.
        if labels is None:
            return logits(hidden)
        return linear_cross_entropy(
            hidden.flatten(0, -2),
            linear.weight,
            labels.flatten(),
            bias=linear.bias,
            scale=scale,
            softcap=softcap,
            ignore_index=IGNORED,
            vocabulary=vocabulary,
            kernel=kernel,
            rows=rows,
            is_summed=is_summed,
        )

    return forward


def _scale_and_softcap(config: PretrainedConfig, family: Family) -> tuple[float, float | None]:
    """Return what a family multiplies its logits by, and what it caps them at, before the loss."""
    scale = 1.0
    if family.logits_multiplied_by is not None:
        scale *= getattr(config, family.logits_multiplied_by)
    if family.logits_divided_by is not None:
        scale /= getattr(config, family.logits_divided_by)
    cap = family.logits_capped_by
    return scale, None if cap is None else getattr(config, cap)
