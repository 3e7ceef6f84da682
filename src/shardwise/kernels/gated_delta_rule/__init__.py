"""The gated delta rule, of a state per head that forgets, and that corrects what it stores under a key."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from shardwise.kernels.gated_delta_rule import chunked, naive
from shardwise.kernels.gated_delta_rule.naive import State


def gated_delta_rule(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, state: State = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """What each token reads, [B, T, N, V] in v's dtype, and the state after the last one, [B, N, K, V] float32.

    q, k [B, T, N, K] are normalised here, and q divided by sqrt(K); v [B, T, N, V]; g <= 0 (the log of the decay) and
    beta in [0, 1], [B, T, N]; state [B, N, K, V], zero if None. Of a token: S <- e^g S, S <- S + beta k (v - S^T k)^T,
    and out = S^T q (Yang et al., arXiv 2412.06464, equation 10). Sums are in float32, or float64 of float64.

    On a GPU fla's kernels compute it where the package is installed and v has 16 bits, which is what they take.
    """
    if v.is_cuda and v.element_size() == 2 and find_spec("fla"):
        fla: Any = import_module("fla.ops.gated_delta_rule")
        # The recurrent kernel has no backward.
        step = v.shape[1] == 1 and not torch.is_grad_enabled()
        rule = fla.fused_recurrent_gated_delta_rule if step else fla.chunk_gated_delta_rule
        q, k, beta = (x.to(v.dtype) for x in (q, k, beta))
        flags = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
        return rule(q, k, v, g=g, beta=beta, initial_state=state, **flags)
    return (naive if v.shape[1] == 1 else chunked).gated_delta_rule(q, k, v, g, beta, state)
