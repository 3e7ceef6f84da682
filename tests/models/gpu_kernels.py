"""A GPU's kernels on fake tensors of a CPU: each is noted as one launch, and computes nothing.

So layers run as they would on a GPU with `fla`, `liger_kernel` and `mamba_ssm` installed: cores,
attention, norms, gates, convolutions and LoRA by kernels, experts by grouped products.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.nn import functional as F
from transformers import PretrainedConfig

from shardwise.kernels import (
    gated_activation,
    gated_delta_rule,
    gated_norm,
    kimi_delta_attention,
    lora_linear,
    published,
    rms_norm,
    short_conv,
    state_space_duality,
)
from shardwise.kernels.grouped_linear import fused, grouped
from shardwise.kernels.grouped_linear.gradients import Needs
from shardwise.models import routed_experts
from shardwise.models.patches import lora_kernel
from tests.models.counted_operators import CountedOperators

INSTALLED = ("fla", "liger_kernel", "mamba_ssm")
"""Packages of both sides. `causal_conv1d`, which has to be compiled, is none of the extra `gpu`."""
CUDA = torch.device("cuda")
CHOSEN_BY = (
    *(gated_delta_rule, kimi_delta_attention, state_space_duality, short_conv),
    *(gated_activation, gated_norm, rms_norm),
)
ELEMENTWISE = ("conv1d", "norm", "swiglu")
"""Parts of the names of kernels that are no products."""


class _Kernel(torch.autograd.Function):
    """A kernel with a backward: one launch each, which reads and writes all once.

    `more`: what the library launches in a backward beside it, by name and tensors; `read` is what
    that one reads too. Norms copy what is not contiguous.
    """

    @staticmethod
    def forward(ctx: Any, name: str, more: Any, out: Callable[..., Any], *inputs: Any) -> Any:
        ctx.name, ctx.more = name, more
        if "norm" in name:
            inputs = tuple(x.contiguous() for x in inputs)
        ctx.save_for_backward(*inputs)
        ctx.set_materialize_grads(False)
        results = out(*inputs)
        if CountedOperators.active is not None:
            _note(name, (inputs, results))
        return results

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        needs, inputs = ctx.needs_input_grad[3:], ctx.saved_tensors
        results = [torch.empty_like(x) if need else None for x, need in zip(inputs, needs)]
        if CountedOperators.active is None:
            return None, None, None, *results
        if "norm" in ctx.name:
            gradients = tuple(g if g is None else g.contiguous() for g in gradients)
        others = ctx.more(inputs, needs)
        read = [tensors for other, tensors in others if other == "read"]
        _note(f"{ctx.name} backward", (gradients, inputs, results, read))
        for other, tensors in others:
            if other != "read":
                _note(f"{ctx.name} {other}", tensors)
        return None, None, None, *results


def _note(name: str, tensors: Any) -> None:
    if CountedOperators.active is not None:
        is_product = not any(part in name for part in ELEMENTWISE)
        CountedOperators.active.note(name, tensors, is_product=is_product)


def _nothing(inputs: Any, needs: Any) -> list[Any]:
    return []


def _in_autocast(*tensors: torch.Tensor | None) -> list[Any]:
    """Return tensors as autocast gives them to a product."""
    if not torch.is_autocast_enabled("cpu"):
        return [*tensors]
    dtype = torch.get_autocast_dtype("cpu")
    return [None if x is None else x.to(dtype) for x in tensors]


def delta_rule(name: str) -> Callable[..., Any]:
    """Return one of fla's rules, whose last state [B, N, S, H] has 32 bits."""

    def rule(q: Any, k: Any, v: Any, g: Any, beta: Any, **flags: Any) -> Any:
        def out(q: Any, k: Any, v: Any, *_: Any) -> Any:
            state = v.new_empty(len(v), v.shape[2], k.shape[3], v.shape[3], dtype=torch.float32)
            return torch.empty_like(v, memory_format=torch.contiguous_format), state

        return _Kernel.apply(name, _nothing, out, q, k, v, g, beta)

    return rule


def mamba2_scan(x: Any, dt: Any, a: Any, b: Any, c: Any, *_: Any, **flags: Any) -> Any:
    """Stand for mamba_ssm's scan of Mamba2."""

    def out(x: Any, dt: Any, a: Any, b: Any, *_: Any) -> Any:
        state = x.new_empty(*x.shape[::2], x.shape[3], b.shape[3], dtype=torch.float32)
        return torch.empty_like(x, memory_format=torch.contiguous_format), state

    biases = [flags[name] for name in ("D", "dt_bias") if flags.get(name) is not None]
    results = _Kernel.apply("mamba_chunk_scan_combined", _nothing, out, x, dt, a, b, c, *biases)
    return results if flags.get("return_final_states") else results[0]


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attn_mask: Any = None, *_: Any, **flags: Any
) -> torch.Tensor:
    """Stand for scaled_dot_product_attention [B, N, T, H]; its output lies as [B, T, N, H]."""

    def out(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        return v.new_empty(len(q), q.shape[2], q.shape[1], v.shape[3]).transpose(1, 2)

    masks = [] if attn_mask is None else [attn_mask]
    inputs = [*_in_autocast(q, k, v), *masks]
    return _Kernel.apply("scaled_dot_product_attention", _nothing, out, *inputs)


def depthwise(x: Any, weight: Any, bias: Any = None, padding: int = 0, **_: Any) -> torch.Tensor:
    """Stand for torch's convolution of channels [B, D, T], each by itself: an elementwise operator.

    A CPU would go from channel to channel.
    """

    def out(x: torch.Tensor, weight: torch.Tensor, *_: Any) -> torch.Tensor:
        return x.new_empty(*x.shape[:2], x.shape[2] + 2 * padding - weight.shape[2] + 1)

    assert len(weight) == x.shape[1]
    return _Kernel.apply("conv1d", _nothing, out, *_in_autocast(x, weight, bias))


def _like_first(x: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


class LigerNorm:
    """Stand for liger_kernel's norm, whose backward fills the gradient with zeros first."""

    @staticmethod
    def apply(x: Any, weight: Any, *_: Any) -> torch.Tensor:
        """Return what the norm gives."""

        def more(inputs: Any, needs: Any) -> list[Any]:
            return [("zeros", inputs[0])] + [("sum", ()), ("cast", ())] * needs[1]

        return _Kernel.apply("rms_norm", more, _like_first, x, weight)


def rms_norm_gated(x: Any, gate: Any, weight: Any, bias: None, **_: Any) -> torch.Tensor:
    """Stand for fla's norm with a gate, which adds up the gradient of a frozen weight too."""
    more = [("sum", ()), ("cast", ())]
    return _Kernel.apply("norm_gated", lambda *_: more, _like_first, x, weight, gate)


def swiglu(gate: Any, up: Any) -> torch.Tensor:
    """Stand for fla's gated activation."""
    return _Kernel.apply("swiglu", _nothing, _like_first, gate, up)


def convolution(x: Any, weight: Any, bias: Any, activation: Any, **_: Any) -> tuple[Any, None]:
    """Stand for fla's convolution, which computes what goes into its activation once more."""

    def more(inputs: Any, needs: Any) -> list[Any]:
        y = torch.empty_like(x)
        again = [("forward", (x, y)), ("read", y)] if activation else []
        return [*again, *[("sum", ()), ("cast", ())] * (1 + (bias is not None))]

    return _Kernel.apply("conv1d", more, _like_first, x, weight, bias), None


class _TritonKernel:
    """What `triton.jit` makes of a function here."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.name, self.fn = function.__name__, self
        self.best_config = SimpleNamespace(all_kwargs=dict)

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        if CountedOperators.active is None:
            return _launched
        return lambda *args, **options: _note(self.name, args)


def _launched(*args: Any, **options: Any) -> None:
    """Stand for a launch that nobody counts."""


def triton_backend() -> ModuleType:
    """Return kernels/lora_linear/triton.py as it is, with kernels that are noted."""
    triton = mock.MagicMock()
    triton.jit = _TritonKernel
    triton.autotune = lambda *_, **__: lambda kernel: kernel
    with mock.patch.dict(sys.modules, {"triton": triton, "triton.language": triton.language}):
        backend = import_module("shardwise.kernels.lora_linear.triton")
    for name in ("triton", "triton_kernels"):
        delattr(lora_linear, name)
    backend.missing = lambda device: None  # ty: ignore[invalid-assignment]
    return backend


def output(x: Any, weight: Any, a: Any, b: Any, scale: float, ends: Any) -> torch.Tensor:
    """Compute kernels/grouped_linear's operator by the code of a GPU."""
    return grouped.forward(x, weight, a, b, scale, ends)


def gradients(*args: Any) -> Sequence[torch.Tensor | None]:
    """Compute the other one."""
    *inputs, needs = args
    return grouped.backward(*inputs, Needs(*needs))


@contextmanager
def kernels_of_a_gpu(config: PretrainedConfig) -> Iterator[None]:
    """Let layers of a model that is built and run within use a GPU's kernels."""
    layers = import_module(type(config).__module__.replace(".configuration_", ".modeling_"))
    gated, kda = delta_rule("chunk_gated_delta_rule"), delta_rule("chunk_kda")
    package = SimpleNamespace(
        chunk_gated_delta_rule=gated,
        chunk_kda=kda,
        mamba_chunk_scan_combined=mamba2_scan,
        LigerRMSNormFunction=LigerNorm,
        rms_norm_gated=rms_norm_gated,
        swiglu=swiglu,
        causal_conv1d=convolution,
    )
    in_transformers = {
        "torch_chunk_gated_delta_rule": gated,
        "chunk_kimi_delta_attention": kda,
        "mamba2_chunk_scan": mamba2_scan,
    }
    backend = triton_backend()
    with ExitStack() as patches:

        def put(owner: Any, name: str, value: Any) -> None:
            patches.enter_context(mock.patch.object(owner, name, value))

        put(published, "import_module", lambda name: package)
        put(published, "_is_there", lambda name: name in INSTALLED)
        for core in CHOSEN_BY:
            put(core, "backend", lambda device, dtype, of=core.backend: of(CUDA, dtype))
        put(lora_kernel, "load_backend", lambda name: backend)
        put(routed_experts, "takes", lambda device, *sizes: grouped.takes(CUDA, *sizes))
        put(fused, "output", output)
        put(fused, "gradients", gradients)
        put(F, "scaled_dot_product_attention", attention)
        put(F, "conv1d", depthwise)
        for name in in_transformers.keys() & vars(layers).keys():
            put(layers, name, in_transformers[name])
        yield
