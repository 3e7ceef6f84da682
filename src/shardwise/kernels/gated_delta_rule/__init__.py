"""The gated delta rule: a state per head that decays, and that corrects what a key has stored."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from shardwise.kernels.gated_delta_rule import chunked, naive
from shardwise.kernels.gated_delta_rule.naive import State


def gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: State = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output of each token [B, T, N, H] and the state after the last token [B, N, S, H].

    Keys have S features and values H. q, k [B, T, K, S] are normalised here to length 1, and q is
    divided by sqrt(S); each of the K heads stands for N / K heads of the rest. v [B, T, N, H]; g
    [B, T, N], the logarithm of the decay, is at most 0; beta [B, T, N] lies in [0, 1]; state
    [B, N, S, H], zeros if None. Each token does

        state <- e^g state
        state <- state + beta k (v - state^T k)^T
        output = state^T q

    The output has v's dtype. Sums and the state are float32, or float64 if v is.
    Source: Yang et al., "Gated Delta Networks", arXiv 2412.06464, equation 10.

    On a GPU with `fla` installed its kernels compute it if v has 16 bits: they take no other dtype.
    """
    if v.is_cuda and v.element_size() == 2 and find_spec("fla"):
        q, k = (x.repeat_interleave(v.shape[2] // k.shape[2], 2) for x in (q, k))
        fla: Any = import_module("fla.ops.gated_delta_rule")
        # The recurrent kernel has no backward.
        one_step = v.shape[1] == 1 and not torch.is_grad_enabled()
        rule = fla.fused_recurrent_gated_delta_rule if one_step else fla.chunk_gated_delta_rule
        q, k, beta = (x.to(v.dtype) for x in (q, k, beta))
        flags = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
        return rule(q, k, v, g=g, beta=beta, initial_state=state, **flags)
    return (naive if v.shape[1] == 1 else chunked).gated_delta_rule(q, k, v, g, beta, state)
