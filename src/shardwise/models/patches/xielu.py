"""Apertus' activation xIELU, whose derivative does not jump below 0."""

from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers.activations import XIELUActivation

from shardwise.config import RunConfig
from shardwise.models.causal_lm import CausalLM


def apply(part: CausalLM, cfg: RunConfig, device: torch.device) -> None:
    """Let every such activation of a part compute the function as it was published."""
    use_smooth_activations(part.hf)


def use_smooth_activations(hf: nn.Module) -> None:
    """Replace the forward of every xIELU of a model (https://arxiv.org/abs/2411.13010).

    transformers computes `expm1(min(x, -1e-6)) - x` below 0. From -1e-6 to 0 its derivative is -1
    in place of 0, so a number there has another gradient once it is rounded otherwise.
    """
    for module in hf.modules():
        if isinstance(module, XIELUActivation):
            module.forward = MethodType(_forward, module)


def _forward(self: Any, input: torch.Tensor) -> torch.Tensor:
    """Return `p x^2 + beta x` of x above 0, and `n (e^x - 1 - x) + beta x` of x below."""
    p, n = F.softplus(self.alpha_p), self.beta + F.softplus(self.alpha_n)
    return p * F.relu(input).square() + n * (F.elu(input) - input) + self.beta * input
