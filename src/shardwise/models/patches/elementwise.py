"""Norms and gated MLPs by the project's kernels, which keep what goes in, and nothing after it.

Families have a class of their own with the same forward. A module is recognised by the code of its
forward, so one that computes anything else keeps its own. The modules in it are called as before.
"""

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from types import CellType, CodeType, FunctionType, MethodType, SimpleNamespace
from typing import Any

import torch
import transformers
from torch import nn
from torch.nn import functional as F

from shardwise.config import RunConfig
from shardwise.kernels import gated_activation, rms_norm
from shardwise.kernels.gated_activation import gated_silu
from shardwise.kernels.gated_activation.clamped import clamped_gate
from shardwise.kernels.gated_norm import gated_norm
from shardwise.models.causal_lm import CausalLM
from shardwise.models.dtypes import product_dtype
from shardwise.models.routed_experts import has_silu


def apply(part: CausalLM, cfg: RunConfig, device: torch.device) -> None:
    """Let norms and gated MLPs of a part compute by the project's kernels."""
    use_kernels(part.hf)


def use_kernels(hf: nn.Module) -> None:
    """Replace the forward of every module of a model whose class has the code of one of OURS, and
    the gate of experts.
    """
    for module in hf.modules():
        ours = OURS.get(_code_of(type(module)))
        if ours is not None and has_silu(module):
            module.forward = MethodType(ours, module)
        elif code_of(getattr(type(module), GATE, None)) == CLAMPED:
            setattr(module, GATE, MethodType(_clamped_gate, module))


def backends(cfg: RunConfig, device: torch.device) -> dict[str, str]:
    """Return what computes norms and gates on a GPU: torch where layers are compiled. On a CPU it
    always does, and nothing is returned.
    """
    if device.type != "cuda":
        return {}
    dtype = product_dtype(cfg)
    used = {"norms": rms_norm.backend, "gates": gated_activation.backend}
    is_compiled = cfg.training.is_compiled
    return {n: "torch" if is_compiled else by(device, dtype) for n, by in used.items()}


def reference(path: str) -> Any:
    """Return a function of a family, such as `llama.apply_rotary_pos_emb`, or a class with its
    methods, to look at their code.

    It is compiled from its text alone: a run imports the modules of its own family and no others.
    """
    family, _, name = path.partition(".")
    folder = Path(transformers.__file__).parent / "models" / family
    text = (folder / f"modeling_{family}.py").read_text(encoding="utf-8")
    found = re.search(rf"^(class|def) {name}\b.*?(?=^[\w@#]|\Z)", text, re.MULTILINE | re.DOTALL)
    assert found is not None, f"transformers has no {path}"
    # An attribute of an imported name has instructions of its own.
    imports = re.findall(r"^(?:from|import) [^(\n]*(?:\([^)]*\))?", text, re.MULTILINE)
    text = "\n".join([*imports, found[0]])
    (code,) = _codes_in(compile(text, path, "exec", dont_inherit=True))
    if found[1] == "def":
        return _function(code)
    return SimpleNamespace(**{method.co_name: _function(method) for method in _codes_in(code)})


def _codes_in(code: CodeType) -> list[CodeType]:
    return [constant for constant in code.co_consts if isinstance(constant, CodeType)]


def _function(code: CodeType) -> FunctionType:
    return FunctionType(code, {}, closure=tuple(CellType() for _ in code.co_freevars))


def _code_of(cls: Any) -> tuple[object, ...]:
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


def _mlp_of_phi3(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    return self.down_proj(gated_silu(*self.gate_up_proj(hidden_states).chunk(2, dim=-1)))


def _mlp_of_falcon_h1(self: Any, x: torch.Tensor) -> torch.Tensor:
    gate, up = self.gate_proj(x) * self.gate_multiplier, self.up_proj(x)
    return self.down_proj(gated_silu(gate, up)) * self.down_multiplier


def _norm(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    return rms_norm.rms_norm(hidden_states, self.weight, self.variance_epsilon)


def _layer_norm(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    weight = self.weight
    normed = F.layer_norm(hidden_states, weight.shape, weight, None, self.variance_epsilon)
    return normed.to(hidden_states.dtype)


def _norm_around_one(self: Any, x: torch.Tensor) -> torch.Tensor:
    return rms_norm.rms_norm(x, self.weight, self.eps, offset=1.0)


def _gated_norm(self: Any, hidden_states: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    return gated_norm(hidden_states, self.weight, gate, self.variance_epsilon, self.activation)


def _clamped_gate(self: Any, gate_up: torch.Tensor) -> torch.Tensor:
    return clamped_gate(gate_up, self.alpha, self.limit)


REPLACED: dict[str, Callable[..., torch.Tensor]] = {
    "llama.LlamaMLP": _mlp,
    "seed_oss.SeedOssMLP": _mlp,  # a rule refuses its dropout
    "lfm2.Lfm2MLP": _mlp_of_lfm2,
    "granitemoehybrid.GraniteMoeHybridMLP": _mlp_of_granite,
    "phi3.Phi3MLP": _mlp_of_phi3,
    "falcon_h1.FalconH1MLP": _mlp_of_falcon_h1,
    "llama.LlamaRMSNorm": _norm,
    "nemotron_h.NemotronHRMSNorm": _norm,
    "olmo2.Olmo2RMSNorm": _norm,
    "cohere2.Cohere2LayerNorm": _layer_norm,
    "qwen3_next.Qwen3NextRMSNorm": _norm_around_one,
    "qwen3_next.Qwen3NextRMSNormGated": _gated_norm,
    "kimi_linear.KimiLinearRMSNormGated": _gated_norm,
}
"""The forwards, by a class of transformers whose code they replace."""
OURS = {_code_of(reference(path)): ours for path, ours in REPLACED.items()}
"""The forwards, by that code."""
GATE = "_apply_gate"
CLAMPED = code_of(getattr(reference("gpt_oss.GptOssExperts"), GATE))
"""The code of the gate of experts that `_clamped_gate` computes."""
