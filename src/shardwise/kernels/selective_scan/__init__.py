"""The selective scan of Mamba: a state per channel, each element of which decays by itself."""

import torch

from shardwise.kernels import published
from shardwise.kernels.published import backend_of
from shardwise.kernels.recurrence import Recurrence, by_factor
from shardwise.kernels.selective_scan import chunked

backend = backend_of("mamba_ssm")


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
        return published.selective_scan(x, dt, a, b, c, d, z, bias)
    return chunked.selective_scan(x, dt, a, b, c, d, z, bias, state, documents)


RECURRENCE = Recurrence(
    run=selective_scan,
    summary=chunked.summary,
    grad_before=chunked.grad_before,
    pass_on=by_factor,
    pass_back=by_factor,
)
