"""The project's cores in the mixers of transformers, and of its own families.

A mixer looks its core up among the global names of its module. Its forward is run with the same
code and other globals: projections, norms and names stay those of the model. `Kind.functions` says
which names, and what takes their place.
"""

import inspect
from collections.abc import Callable, Mapping
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from shardwise.config import RunConfig, UserError
from shardwise.kernels.recurrence import Tokens
from shardwise.kernels.rotary import (
    rotate,
    rotate_halves,
    rotate_neighbours,
    rotate_pairs,
    rotate_repeated,
)
from shardwise.models.causal_lm import CausalLM
from shardwise.models.dtypes import product_dtype
from shardwise.models.kinds.base import Kind
from shardwise.models.names import in_use
from shardwise.models.patches.elementwise import code_of, reference
from shardwise.models.spec import ModelSpec

ROTATED = {
    "llama.apply_rotary_pos_emb": rotate,
    "qwen3_next.apply_rotary_pos_emb": rotate,  # of some of the features of a head
    "phi3.apply_rotary_pos_emb": rotate,
    "olmo2.apply_rotary_pos_emb": rotate,  # in float32
    "gpt_oss.apply_rotary_pos_emb": rotate_halves,
    "glm4.apply_rotary_pos_emb": rotate_neighbours,
    "ernie4_5.apply_rotary_pos_emb": rotate_neighbours,  # in float32
    "cohere2.apply_rotary_pos_emb": rotate_repeated,
    "deepseek_v3.apply_rotary_pos_emb_interleave": rotate_pairs,
}
"""The project's functions by those of transformers."""
ROTATIONS = {code_of(reference(path)): ours for path, ours in ROTATED.items()}
"""The project's functions by that code."""

REGISTRY = "ALL_ATTENTION_FUNCTIONS"
"""The name under which a mixer finds transformers' functions of attention."""
Attention = Callable[..., tuple[torch.Tensor, None]]
"""attention(tokens, module, q, k, v, mask, *, scaling, ...), as in transformers' registry."""


def apply(part: CausalLM, cfg: RunConfig, device: torch.device) -> None:
    """Let every mixer of a part compute its core by the functions of its kind."""
    use_cores(part.hf, part.spec, part.tokens)


def use_cores(hf: nn.Module, spec: ModelSpec, tokens: Callable[[], Tokens]) -> None:
    """Replace the cores of all mixers of `hf`; `tokens` gives the tokens of the micro-batch."""
    # Layers of one class share their forward, so that compiled ones share code.
    forwards: dict[tuple[object, str], Callable[..., Any]] = {}
    for layer in spec.layers:
        for block in layer.mixers:
            mixer = in_use(hf.get_submodule(f"{layer.name}.{block.path}"))
            forward = _forward_of(mixer)
            key = forward, block.kind.name
            if key not in forwards:
                names: dict[str, Any] = {
                    n: _with_tokens(c, tokens) for n, c in block.kind.functions.items()
                }
                if core := names.pop(REGISTRY, None):
                    # Context parallelism has put its own there before.
                    registry = forward.__globals__[REGISTRY]
                    if not isinstance(registry, _Registry):
                        registry = _Registry(_with_window(core, block.kind, hf))
                    names[REGISTRY] = registry
                forwards[key] = _with_names(forward, names)
            mixer.forward = MethodType(forwards[key], mixer)


def use_attention(
    hf: PreTrainedModel, spec: ModelSpec, tokens: Callable[[], Tokens], attention: Attention
) -> None:
    """Let every attention of `hf` be computed by a function of the tokens of the micro-batch.

    The window is that of the layer's kind: some classes, Qwen2-MoE's among them, give it to their
    mask alone.
    """
    # Compiled code of a class is kept in the globals of one forward, so its layers share that.
    forwards: dict[tuple[object, Kind], Callable[..., Any]] = {}
    for layer in spec.layers:
        for block in layer.attention:
            mixer = in_use(hf.get_submodule(f"{layer.name}.{block.path}"))
            forward = _forward_of(mixer)
            key = forward, block.kind
            if key not in forwards:
                core = _with_window(_with_tokens(attention, tokens), block.kind, hf)
                forwards[key] = _with_names(forward, {REGISTRY: _Registry(core)})
            mixer.forward = MethodType(forwards[key], mixer)


class _Registry:
    """Stands for transformers' registry of attention, and has one function."""

    def __init__(self, attention: Callable[..., Any]) -> None:
        self.attention = attention

    def get_interface(self, name: str, default: Callable[..., Any]) -> Callable[..., Any]:
        return self.attention


def backends(spec: ModelSpec, cfg: RunConfig, device: torch.device) -> dict[str, str]:
    """Return what computes each core of a model, by the core's name.

    Raises UserError where a slow one would run on a GPU and `model.slow_cores` does not allow it.
    """
    dtype = product_dtype(cfg)
    kinds = {block.kind for layer in spec.layers for block in layer.mixers}
    used = {backend.core: backend for kind in kinds for backend in kind.backends}
    isolated, is_cut = cfg.data.keeps_documents_apart, cfg.parallel.cp > 1
    chosen = {
        core: used[core].chosen(device, dtype)
        if (used[core].takes_documents or not isolated) and (used[core].takes_state or not is_cut)
        else "torch"
        for core in sorted(used)
    }
    slow = [core for core in chosen if chosen[core] == "torch" and used[core].is_slow_in_torch]
    if device.type == "cuda" and slow and cfg.model.slow_cores == "refuse":
        name = str(dtype).removeprefix("torch.")
        if isolated:
            name += " with isolated documents"
        if is_cut:
            name += " with parallel.cp"
        raise UserError(
            f"no installed package computes the {slow[0]} in {name} on this GPU, and plain torch "
            "is slow; install the extra `gpu` and use bfloat16, or set model.slow_cores to allow"
        )
    return chosen


def _forward_of(mixer: nn.Module) -> Any:
    """Return the function that a mixer runs: its class's, or what `_with_names` made of that."""
    return inspect.unwrap(getattr(mixer.forward, "__func__", mixer.forward))


def _with_names(forward: Any, new: Mapping[str, Any]) -> Callable[..., Any]:
    """Return the forward of mixers of one class, with other objects under some global names.

    Rotary positions that have the code of one of ROTATIONS are computed by the project's kernel.
    """
    unknown = new.keys() - set(forward.__code__.co_names)
    assert not unknown, f"{forward.__qualname__} calls no {', '.join(sorted(unknown))}"
    names = forward.__globals__ | new
    for name in ("apply_rotary_pos_emb", "apply_rotary_pos_emb_interleave"):
        if name in names:
            names[name] = ROTATIONS.get(code_of(names[name]), names[name])
    # torch.compile would look the functions up in the module of this name.
    names.pop("__name__", None)
    assert forward.__kwdefaults__ is None
    # It knows a function by its code: one of other names must not be taken for this one.
    code = forward.__code__.replace()
    return FunctionType(code, names, forward.__name__, forward.__defaults__, forward.__closure__)


def _refuse_padding(hf: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise UserError where a caller's mask hides tokens, which places alone do not."""
    mask = kwargs.get("attention_mask")
    if isinstance(mask, torch.Tensor) and not bool(mask.all()):
        raise UserError(
            f"{type(hf).__name__}: attention_mask hides tokens, and attention here sees all up to "
            "its own; give rows without padding, or load the model by transformers"
        )


def _with_window(core: Callable[..., Any], kind: Kind, hf: Any) -> Callable[..., Any]:
    """Return a function of attention that has its kind's window; no masks are made for it."""
    # transformers makes masks for the implementations that it knows.
    if hf.config._attn_implementation != "shardwise":
        hf.config._attn_implementation = "shardwise"
        hf.register_forward_pre_hook(_refuse_padding, with_kwargs=True)
    window = getattr(kind.cores(hf.config)[0], "window", None)

    return lambda *args, **kwargs: core(*args, **{**kwargs, "sliding_window": window})


def _with_tokens(core: Callable[..., Any], tokens: Callable[[], Tokens]) -> Callable[..., Any]:
    return lambda *args, **kwargs: core(tokens(), *args, **kwargs)
