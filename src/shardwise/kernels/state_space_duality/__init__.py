"""The scan of Mamba2: a state per head, which decays by one factor a token."""

import torch

from shardwise.kernels import published
from shardwise.kernels.published import backend_of, dtype_of_products
from shardwise.kernels.recurrence import Recurrence, by_factor
from shardwise.kernels.state_space_duality import chunked

backend = backend_of("mamba_ssm", only_16_bits=True)


def mamba2_scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor,
    state: torch.Tensor | None = None,
    documents: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output of each token [B, T, N, H] and the state after the last token [B, N, H, S].

    The letters are those of the paper: x [B, T, N, H]; dt [B, T, N], the size of the time step
    (after its softplus), at least 0; a [N], at most 0; b and c [B, T, K, S], each of which N / K
    heads share; d [N]. `state` [B, N, H, S] is zeros if None. Each token does

        state <- e^(dt a) state + dt x b^T
        output = state c + d x

    Where `documents` [B, T] changes from one token to the next, the state before the latter is 0;
    `state` is that of the first token's document.

    The output has x's dtype. Sums and the state are float32, or float64 if x is.
    Source: Dao and Gu, "Transformers are SSMs", arXiv 2405.21060, sections 6 and 7.

    On a GPU with `mamba_ssm` installed its kernels compute it if x has 16 bits, or autocast lets
    products have them: of float32, theirs have 10 bits after the point.
    """
    dtype = dtype_of_products(x)
    if backend(x.device, dtype) == "mamba_ssm":
        out, last = published.mamba2_scan(x.to(dtype), dt, a, b, c, d, state, documents)
        return out.to(x.dtype), last
    return chunked.mamba2_scan(x, dt, a, b, c, d, state, documents)


RECURRENCE = Recurrence(
    run=mamba2_scan,
    summary=chunked.summary,
    grad_before=chunked.grad_before,
    pass_on=by_factor,
    pass_back=by_factor,
)
