"""Kimi Delta Attention: the gated delta rule with a decay for each channel of a key."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from shardwise.kernels.gated_delta_rule.naive import State
from shardwise.kernels.kimi_delta_attention import chunked, naive
from shardwise.kernels.packed import packed
from shardwise.kernels.recurrence import Recurrence, by_matrix, by_transposed_matrix, wide


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
        return _by_fla(q, k, v, g, beta, state, documents)
    rule = naive if v.shape[1] == 1 else chunked
    return rule.kimi_delta_attention(q, k, v, g, beta, state, documents)


def backend(device: torch.device, dtype: torch.dtype) -> str:
    """Return what computes the rule for values of a dtype on a device: `fla` or `torch`."""
    has_kernels = device.type == "cuda" and dtype.itemsize == 2 and find_spec("fla")
    return "fla" if has_kernels else "torch"


def _by_fla(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: State,
    documents: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    fla: Any = import_module("fla.ops.kda")
    # The recurrent kernel has no backward.
    one_step = v.shape[1] == 1 and not torch.is_grad_enabled()
    rule = fla.fused_recurrent_kda if one_step else fla.chunk_kda
    inputs = [x.to(v.dtype) for x in (q, k, v)] + [g, beta.to(v.dtype)]
    state = None if state is None else wide(state)  # in float32, or the kernel refuses it
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


RECURRENCE = Recurrence(
    run=kimi_delta_attention,
    summary=chunked.summary,
    of_before=chunked.of_before,
    pass_on=by_matrix,
    pass_back=by_transposed_matrix,
)
