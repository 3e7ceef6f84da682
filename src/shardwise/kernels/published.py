"""Kernels that others have published, where they are installed: fla, liger_kernel, mamba_ssm,
causal_conv1d.
"""

import sys
from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from shardwise.kernels.packed import packed
from shardwise.kernels.recurrence import begins

Backend = Callable[[torch.device, torch.dtype], str]
"""Returns what computes an operation for values of a dtype on a device: a package, or `torch`."""


def backend_of(*packages: str, only_16_bits: bool = False, when_compiled: bool = True) -> Backend:
    """Return what says which package's kernels compute: the first one there is.

    None of them takes float64. `when_compiled`: in code that torch compiles, too.
    """

    def backend(device: torch.device, dtype: torch.dtype) -> str:
        takes_it = dtype.itemsize == 2 if only_16_bits else dtype != torch.float64
        if device.type != "cuda" or not takes_it:
            return "torch"
        if not when_compiled and torch.compiler.is_compiling():
            return "torch"
        return next(filter(_is_there, packages), "torch")

    return backend


def _is_there(package: str) -> bool:
    if package in sys.modules:
        return sys.modules[package] is not None
    return _spec_of(package) is not None


_spec_of = cache(find_spec)  # which looks in all folders


def dtype_of_products(x: torch.Tensor) -> torch.dtype:
    """Return the dtype in which autocast multiplies x; its own without autocast, and float64."""
    device = x.device.type
    if x.dtype == torch.float64 or not torch.is_autocast_enabled(device):
        return x.dtype
    return torch.get_autocast_dtype(device)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float) -> torch.Tensor:
    """Compute the root mean square norm by liger_kernel, in float32, rounded once.

    Its backward would write into the gradient that it is given, which others may read.
    """
    norm: Any = import_module("liger_kernel.ops.rms_norm").LigerRMSNormFunction
    return norm.apply(x, weight, eps, offset, "gemma", False)


def gated_norm(
    x: torch.Tensor, weight: torch.Tensor, gate: torch.Tensor, eps: float, activation: str
) -> torch.Tensor:
    """Compute the norm with a gate by fla."""
    fla: Any = import_module("fla.modules.norm.fused_norm_gate")
    return fla.rms_norm_gated(x, gate, weight, None, activation=activation, eps=eps)


def gated_silu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Compute silu(gate) * up by fla."""
    fla: Any = import_module("fla.modules.activations")
    return fla.swiglu(gate, up)


def delta_rule(
    names: tuple[str, str, str],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor | None,
    documents: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute a delta rule by fla; `names`: a module, its rule by chunks and that by tokens."""
    fla: Any = import_module(f"fla.ops.{names[0]}")
    # The recurrent kernel has no backward.
    one_step = v.shape[1] == 1 and not torch.is_grad_enabled()
    rule = getattr(fla, names[2] if one_step else names[1])
    if k.shape[2] < v.shape[2]:
        q, k = (x.repeat_interleave(v.shape[2] // k.shape[2], 2) for x in (q, k))
    inputs = [x.to(v.dtype) for x in (q, k, v)] + [g, beta.to(v.dtype)]
    state = None if state is None else state.float()  # the kernels refuse another dtype
    flags: dict[str, Any] = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
    if documents is None:
        q, k, v, g, beta = inputs
        return rule(q, k, v, g=g, beta=beta, initial_state=state, **flags)
    ends = packed(documents)
    q, k, v, g, beta = (x.flatten(0, 1)[None] for x in inputs)
    state = ends.states_of(state)
    flags["cu_seqlens"] = ends.cu_seqlens
    if not one_step:
        flags["cu_seqlens_cpu"] = ends.cu_seqlens_on_host
    out, last = rule(q, k, v, g=g, beta=beta, initial_state=state, **flags)
    return out.view(documents.shape + out.shape[2:]), last.index_select(0, ends.lasts)


def selective_scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor,
    z: torch.Tensor,
    bias: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute Mamba's scan by mamba_ssm; the last state has no gradient."""
    mamba_ssm: Any = import_module("mamba_ssm.ops.selective_scan_interface")
    # The kernel has tokens last, one dtype for all that differs between tokens, and float32 for
    # what does not.
    x, dt, b, c, z = (y.to(x.dtype).transpose(1, 2) for y in (x, dt, b, c, z))
    flags: dict[str, Any] = {"delta_softplus": True, "return_last_state": True}
    out, last = mamba_ssm.selective_scan_fn(
        x, dt, a.float(), b, c, D=d.float(), z=z, delta_bias=bias.float(), **flags
    )
    return out.transpose(1, 2), last.detach()


def mamba2_scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor,
    state: torch.Tensor | None,
    documents: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the scan of Mamba2 by mamba_ssm."""
    mamba_ssm: Any = import_module("mamba_ssm.ops.triton.ssd_combined")
    # The kernels give `initial_states` to document 0.
    numbers = None if documents is None else begins(documents).cumsum(1).to(torch.int32)
    flags: dict[str, Any] = {"chunk_size": 256, "return_final_states": True}
    return mamba_ssm.mamba_chunk_scan_combined(
        x, dt, a, b.to(x.dtype), c.to(x.dtype), D=d, initial_states=state, seq_idx=numbers, **flags
    )


def short_conv_of_fla(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    earlier: torch.Tensor | None,
    documents: torch.Tensor | None,
) -> torch.Tensor:
    """Compute the short convolution by fla."""
    fla: Any = import_module("fla.modules.causal_conv1d")
    (rows, tokens, _), flags = x.shape, dict[str, Any]()
    if earlier is not None:
        x = torch.cat([earlier.to(x.dtype), x], 1)
    if documents is not None:
        ends = packed(documents)
        flags = {"cu_seqlens": ends.cu_seqlens, "cu_seqlens_cpu": ends.cu_seqlens_on_host}
        x = x.flatten(0, 1)[None]
    out, _ = fla.causal_conv1d(x, weight, bias, activation=activation, **flags)
    out = out.view(rows, -1, out.shape[-1])
    return out if earlier is None else out[:, -tokens:]


def short_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    earlier: torch.Tensor | None,
    documents: torch.Tensor | None,
) -> torch.Tensor:
    """Compute the short convolution by causal_conv1d."""
    kernel: Any = import_module("causal_conv1d").causal_conv1d_fn
    tokens, numbers = x.shape[1], None
    if documents is not None:
        # The kernel gives 0 for numbers below 0. Its earlier releases leave out the initial states
        # where documents are given, so these tokens become part of the row.
        numbers = begins(documents).cumsum(1, dtype=torch.int32)
        if earlier is not None:
            x, earlier = torch.cat([earlier.to(x.dtype), x], 1), None
    if x.stride(2) != 1 or x.stride(0) % 8 or x.stride(1) % 8:
        x = x.contiguous()
    out = kernel(
        x.transpose(1, 2),
        weight,
        None if bias is None else bias.to(weight.dtype),
        seq_idx=numbers,
        initial_states=None if earlier is None else earlier.to(x.dtype).transpose(1, 2),
        activation=activation,
    )
    out = out.transpose(1, 2)
    return out if out.shape[1] == tokens else out[:, -tokens:]
