"""Which of torch's kernels compute a model's attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from shardwise.config import RunConfig, UserError

if TYPE_CHECKING:
    from shardwise.models.causal_lm import CausalLM

BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}
_NO_KERNEL = ("No viable backend", "No available kernel")  # what torch says on a CPU, on a GPU


def apply(part: CausalLM, cfg: RunConfig, device: torch.device) -> None:
    """Let every layer's attention run on the kernel `model.sdpa_backend` alone.

    `auto` leaves torch the choice. The choice is made within the layer, so that a layer that is
    computed again in the backward chooses the same. A backward follows its forward. The first
    forward that the kernel cannot run raises UserError.
    """
    name = cfg.model.sdpa_backend
    if name != "auto":
        for layer in part.spec.layers:
            module = part.hf.get_submodule(layer.name)
            module.forward = _with_kernel(module.forward, name)


def _with_kernel(forward: Callable[..., torch.Tensor], name: str) -> Callable[..., torch.Tensor]:
    def with_kernel(*args: Any, **kwargs: Any) -> torch.Tensor:
        try:
            with sdpa_kernel(BACKENDS[name]):
                return forward(*args, **kwargs)
        except RuntimeError as error:
            if not any(sign in str(error) for sign in _NO_KERNEL):
                raise
            raise UserError(
                f"model.sdpa_backend is {name}, but that kernel cannot run this attention on this "
                "device in this dtype; use auto or math"
            ) from None

    return with_kernel
