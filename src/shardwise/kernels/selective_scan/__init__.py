"""The selective scan of Mamba: a state per channel, each element of which decays by itself."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from shardwise.kernels.recurrence import Recurrence, by_factor
from shardwise.kernels.selective_scan import chunked


def selective_scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor,
    z: torch.Tensor,
    bias: torch.Tensor,
    state: torch.Tensor | None = None,
    documents: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output of each token [B, T, D] and the state after the last token [B, D, S].

    The letters are those of the paper: x [B, T, D]; dt [B, T, D], the time step before its bias [D]
    and softplus; a [D, S], at most 0; b and c [B, T, S]; d [D]; z [B, T, D], the gate before its
    SiLU. `state` [B, D, S] is zeros if None. Each token does

        dt <- softplus(dt + bias)
        state <- e^(dt a) state + (dt x) b^T
        output = (state c + d x) silu(z)

    Where `documents` [B, T] changes from one token to the next, the state before the latter is 0;
    `state` is that of the first token's document.

    The output has x's dtype. Sums and the state are float32, or float64 if x is.
    Source: Gu and Dao, "Mamba", arXiv 2312.00752, section 3.

    On a GPU with `mamba_ssm` installed its kernel computes it, if there are neither documents nor a
    state, which it does not take. Then the last state has no gradient.
    """
    is_plain = state is None and documents is None
    if is_plain and backend(x.device, x.dtype) == "mamba_ssm":
        return _by_mamba_ssm(x, dt, a, b, c, d, z, bias)
    return chunked.selective_scan(x, dt, a, b, c, d, z, bias, state, documents)


def backend(device: torch.device, dtype: torch.dtype) -> str:
    """Return what computes the scan for x of a dtype on a device: `mamba_ssm` or `torch`."""
    has_kernel = device.type == "cuda" and dtype != torch.float64 and find_spec("mamba_ssm")
    return "mamba_ssm" if has_kernel else "torch"


def _by_mamba_ssm(
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor,
    z: torch.Tensor,
    bias: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    mamba_ssm: Any = import_module("mamba_ssm.ops.selective_scan_interface")
    # The kernel has tokens last, one dtype for all that differs between tokens, and float32 for
    # what does not.
    x, dt, b, c, z = (y.to(x.dtype).transpose(1, 2) for y in (x, dt, b, c, z))
    out, last = mamba_ssm.selective_scan_fn(
        x,
        dt,
        a.float(),
        b,
        c,
        D=d.float(),
        z=z,
        delta_bias=bias.float(),
        delta_softplus=True,
        return_last_state=True,
    )
    return out.transpose(1, 2), last.detach()


RECURRENCE = Recurrence(
    run=selective_scan,
    summary=chunked.summary,
    of_before=chunked.of_before,
    pass_on=by_factor,
    pass_back=by_factor,
)
