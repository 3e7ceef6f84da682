"""The forget gate of Kimi Delta Attention, with gradients that stay finite."""

from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from shardwise.config import RunConfig
from shardwise.models.causal_lm import CausalLM

GATES = ("KimiLinearForgetGate", "Glm5NextTextForgetGate")
"""transformers' classes that compute `where(g > 20, g, log(1 + exp(g)))`: from 89 on, where exp
overflows, the branch that is not taken has the gradient 0 times infinity, which is NaN."""


def apply(part: CausalLM, cfg: RunConfig, device: torch.device) -> None:
    """Let every such gate of a part compute torch's softplus."""
    use_finite_gates(part.hf)


def use_finite_gates(hf: nn.Module) -> None:
    """Let every such gate of a model compute torch's softplus, which is the same function."""
    for module in hf.modules():
        is_safe = getattr(module, "safe_gate_lower_bound", None) is not None
        if type(module).__name__ in GATES and not is_safe:
            module.forward = MethodType(_forward, module)


def _forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    """Return the log of the decay of each channel, [B, T, N, H] float32, of hidden [B, T, D]."""
    g = self.f_b_proj(self.f_a_proj(hidden_states)).float() + self.dt_bias.float()
    g = g.unflatten(-1, (-1, self.head_dim))
    return -self.A_log.float().exp().view(1, 1, -1, 1) * F.softplus(g)
