"""Norms and gated MLPs by the project's kernels, which keep what goes in, and nothing after it.

Families have a class of their own with the same forward. A module is recognised by the code of its
forward, so one that computes anything else keeps its own. The modules in it are called as before.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1MLP
from transformers.models.granitemoehybrid.modeling_granitemoehybrid import GraniteMoeHybridMLP
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearRMSNormGated
from transformers.models.lfm2.modeling_lfm2 import Lfm2MLP
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHRMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.models.qwen3_next.modeling_qwen3_next import (
    Qwen3NextRMSNorm,
    Qwen3NextRMSNormGated,
)
from transformers.models.seed_oss.modeling_seed_oss import SeedOssMLP

from shardwise.config import RunConfig
from shardwise.kernels import gated_activation, rms_norm
from shardwise.kernels.gated_activation import gated_silu
from shardwise.kernels.gated_norm import gated_norm
from shardwise.models.dtypes import autocast_dtype
from shardwise.models.routed_experts import has_silu

if TYPE_CHECKING:
    from shardwise.models.causal_lm import CausalLM


def apply(part: CausalLM, cfg: RunConfig, device: torch.device) -> None:
    """Let norms and gated MLPs of a part compute by the project's kernels."""
    use_kernels(part.hf)


def use_kernels(hf: nn.Module) -> None:
    """Replace the forward of every module of a model whose class has the code of one of OURS."""
    for module in hf.modules():
        ours = OURS.get(_code_of(type(module)))
        if ours is not None and has_silu(module):
            module.forward = MethodType(ours, module)


def backends(cfg: RunConfig, device: torch.device) -> dict[str, str]:
    """Return what computes norms and gates on a GPU: torch where layers are compiled. On a CPU it
    always does, and nothing is returned.
    """
    if device.type != "cuda":
        return {}
    dtype = autocast_dtype(cfg.training.precision) or getattr(torch, cfg.model.dtype)
    used = {"norms": rms_norm.backend, "gates": gated_activation.backend}
    is_compiled = cfg.training.compile != "none"
    return {n: "torch" if is_compiled else by(device, dtype) for n, by in used.items()}


def _code_of(cls: type[nn.Module]) -> tuple[object, ...]:
    """Return what the forward of a class does, with that of the method that some norms call."""
    return code_of(cls.forward), code_of(getattr(cls, "_norm", None))


def code_of(function: Any) -> tuple[object, ...]:
    """Return what a function does: its instructions, and the names and constants in them."""
    code = getattr(inspect.unwrap(function), "__code__", None) if function else None
    if code is None:
        return ()
    constants = tuple(x for x in code.co_consts if x is None or x != function.__doc__)
    return code.co_code, code.co_names, code.co_varnames, constants


def _mlp(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.down_proj(gated_silu(self.gate_proj(x), self.up_proj(x)))


def _mlp_of_lfm2(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.w2(gated_silu(self.w1(x), self.w3(x)))


def _mlp_of_granite(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    return self.output_linear(gated_silu(*self.input_linear(hidden_states).chunk(2, dim=-1)))


def _mlp_of_falcon_h1(self: Any, x: torch.Tensor) -> torch.Tensor:
    gate, up = self.gate_proj(x) * self.gate_multiplier, self.up_proj(x)
    return self.down_proj(gated_silu(gate, up)) * self.down_multiplier


def _norm(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    return rms_norm.rms_norm(hidden_states, self.weight, self.variance_epsilon)


def _norm_around_one(self: Any, x: torch.Tensor) -> torch.Tensor:
    return rms_norm.rms_norm(x, self.weight, self.eps, offset=1.0)


def _gated_norm(self: Any, hidden_states: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    return gated_norm(hidden_states, self.weight, gate, self.variance_epsilon, self.activation)


OURS: dict[tuple[object, ...], Callable[..., torch.Tensor]] = {
    _code_of(LlamaMLP): _mlp,
    _code_of(SeedOssMLP): _mlp,  # a rule refuses its dropout
    _code_of(Lfm2MLP): _mlp_of_lfm2,
    _code_of(GraniteMoeHybridMLP): _mlp_of_granite,
    _code_of(FalconH1MLP): _mlp_of_falcon_h1,
    _code_of(LlamaRMSNorm): _norm,
    _code_of(NemotronHRMSNorm): _norm,
    _code_of(Olmo2RMSNorm): _norm,
    _code_of(Qwen3NextRMSNorm): _norm_around_one,
    _code_of(Qwen3NextRMSNormGated): _gated_norm,
    _code_of(KimiLinearRMSNormGated): _gated_norm,
}
"""The forwards, by the code of those that they replace."""
