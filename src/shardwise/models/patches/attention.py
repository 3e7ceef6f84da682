"""Choice of what computes attention: a kernel of torch's, or another form of transformers."""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import PreTrainedModel
from transformers.utils import is_flash_attn_2_available

from shardwise.config import RunConfig, UserError
from shardwise.models.causal_lm import CausalLM
from shardwise.models.dtypes import product_dtype

BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}
_NO_KERNEL = ("No viable backend", "No available kernel")  # what torch says on a CPU, on a GPU


def apply(part: CausalLM, cfg: RunConfig, device: torch.device) -> None:
    """Let every layer's attention run by `model.attention` alone.

    `auto` and `sdpa` leave torch the choice of its kernel. The choice is made within the layer, so
    that a layer that is computed again in the backward chooses the same. A backward follows its
    forward. The first forward that the kernel cannot run raises UserError.
    """
    name = cfg.model.attention
    if name in ("eager", "flash_attention_2"):
        _set(part.hf, name, cfg, device)
    elif name in BACKENDS:
        for layer in part.spec.layers:
            module = part.hf.get_submodule(layer.name)
            module.forward = _with_kernel(module.forward, name)


def backends(cfg: RunConfig) -> dict[str, str]:
    """Return what computes attention; nothing where that is left to transformers and torch."""
    return {} if cfg.model.attention == "auto" else {"attention": cfg.model.attention}


def _set(hf: PreTrainedModel, name: str, cfg: RunConfig, device: torch.device) -> None:
    """Let transformers compute attention by its form of this name; UserError where it cannot."""
    why = None
    if name == "flash_attention_2":
        if device.type != "cuda":
            why = f"it computes on a CUDA GPU alone, and this run is on {device.type}; use sdpa"
        elif not is_flash_attn_2_available():
            why = "the package flash-attn is not installed; install it, or use sdpa"
        elif product_dtype(cfg) == torch.float32:
            why = "it has no kernel for float32 products; compute in bfloat16, or use sdpa"
    if why is None:
        try:
            hf.set_attn_implementation(name)
        except (ImportError, ValueError) as error:  # transformers' refusal of this class
            why = f"{' '.join(str(error).split())}; use sdpa"
        if hf.config._attn_implementation != name:
            why = why or f"transformers has no such form of {type(hf).__name__}; use sdpa"
    if why is not None:
        raise UserError(f"model.attention is {name}, but {why}")


def _with_kernel(forward: Callable[..., torch.Tensor], name: str) -> Callable[..., torch.Tensor]:
    def with_kernel(*args: Any, **kwargs: Any) -> torch.Tensor:
        try:
            with sdpa_kernel(BACKENDS[name]):
                return forward(*args, **kwargs)
        except RuntimeError as error:
            if not any(sign in str(error) for sign in _NO_KERNEL):
                raise
            raise UserError(
                f"model.attention is {name}, but that kernel cannot run this attention on this "
                "device in this dtype; use auto or math"
            ) from None

    return with_kernel
