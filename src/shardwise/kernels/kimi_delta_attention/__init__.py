"""Kimi Delta Attention: the gated delta rule with a decay for each channel of a key."""

import torch

from shardwise.kernels import published
from shardwise.kernels.gated_delta_rule.naive import State
from shardwise.kernels.kimi_delta_attention import chunked, naive
from shardwise.kernels.published import backend_of
from shardwise.kernels.recurrence import Recurrence, by_matrix, by_transposed_matrix

backend = backend_of("fla", only_16_bits=True)
FLA = ("kda", "chunk_kda", "fused_recurrent_kda")


def kimi_delta_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: State = None,
    documents: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output of each token [B, T, N, H] and the state after the last token [B, N, S, H].

    Keys have S features and values H. q, k [B, T, N, S] are normalised here to length 1, and q is
    divided by sqrt(S). v [B, T, N, H]; g [B, T, N, S], the logarithm of the decay of each channel
    of a key, is at most 0; beta [B, T, N] lies in [0, 1]; state [B, N, S, H], zeros if None. Each
    token does

        state <- diag(e^g) state
        state <- state + beta k (v - state^T k)^T
        output = state^T q

    Where `documents` [B, T] changes from one token to the next, the state before the latter is 0;
    `state` is that of the first token's document.

    The output has v's dtype. Sums and the state are float32, or float64 if v is.
    Source: Kimi Team, "Kimi Linear", arXiv 2510.26692, equation 1.

    On a GPU with `fla` installed its kernels compute it if v has 16 bits.
    They refuse S above 256.
    """
    if backend(v.device, v.dtype) == "fla":
        return published.delta_rule(FLA, q, k, v, g, beta, state, documents)
    rule = naive if v.shape[1] == 1 else chunked
    return rule.kimi_delta_attention(q, k, v, g, beta, state, documents)


RECURRENCE = Recurrence(
    run=kimi_delta_attention,
    summary=chunked.summary,
    grad_before=chunked.grad_before,
    pass_on=by_matrix,
    pass_back=by_transposed_matrix,
)
