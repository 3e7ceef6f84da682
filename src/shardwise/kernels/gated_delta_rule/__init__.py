"""The gated delta rule: a state per head that decays, and that corrects what a key has stored."""

import torch

from shardwise.kernels import published
from shardwise.kernels.gated_delta_rule import chunked, naive
from shardwise.kernels.gated_delta_rule.naive import State
from shardwise.kernels.published import backend_of
from shardwise.kernels.recurrence import Recurrence, by_matrix, by_transposed_matrix

backend = backend_of("fla", only_16_bits=True)
FLA = ("gated_delta_rule", "chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule")


def gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: State = None,
    documents: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output of each token [B, T, N, H] and the state after the last token [B, N, S, H].

    Keys have S features and values H. q, k [B, T, K, S] are normalised here to length 1, and q is
    divided by sqrt(S); each of the K heads stands for N / K heads of the rest. v [B, T, N, H]; g
    [B, T, N], the logarithm of the decay, is at most 0; beta [B, T, N] lies in [0, 1]; state
    [B, N, S, H], zeros if None. Each token does

        state <- e^g state
        state <- state + beta k (v - state^T k)^T
        output = state^T q

    Where `documents` [B, T] changes from one token to the next, the state before the latter is 0.

    The output has v's dtype. Sums and the state are float32, or float64 if v is.
    Source: Yang et al., "Gated Delta Networks", arXiv 2412.06464, equation 10.

    On a GPU with `fla` installed its kernels compute it if v has 16 bits: they take no other dtype.
    """
    if backend(v.device, v.dtype) == "fla":
        return published.delta_rule(FLA, q, k, v, g, beta, state, documents)
    rule = naive if v.shape[1] == 1 else chunked
    return rule.gated_delta_rule(q, k, v, g, beta, state, documents)


RECURRENCE = Recurrence(
    run=gated_delta_rule,
    summary=chunked.summary,
    grad_before=chunked.grad_before,
    pass_on=by_matrix,
    pass_back=by_transposed_matrix,
)
