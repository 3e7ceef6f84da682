"""Attention whose scores are capped: c tanh(s / c) of a score s, which no fused operator computes.

All scores of the queries and keys of one call are in memory, in 32 bits; products have the dtype of
the inputs on a GPU.
Source: Gemma Team, "Gemma 2", arXiv 2408.00118, section 2.
"""

import torch


@torch.library.custom_op("shardwise::capped_attention", mutates_args=())
def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, scale: float, cap: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return output and log-sum-exp as operators.forward does; checkpointing keeps them."""
    scores = _capped(q, k, scale, cap).mul_(cap).masked_fill_(~mask, -torch.inf)
    peak = scores.amax(-1, keepdim=True)
    shares = scores.sub_(peak).exp_()
    total = shares.sum(-1, keepdim=True)
    out = _product(_by_keys(shares, v), v).view(*q.shape[:-1], v.shape[-1]).div_(total)
    return out.to(q.dtype), peak.add_(total.log()).squeeze(-1)


@forward.register_fake
def _(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: object
) -> tuple[torch.Tensor, torch.Tensor]:
    wide = torch.promote_types(q.dtype, torch.float32)
    return q.new_empty(*q.shape[:-1], v.shape[-1]), q.new_empty(q.shape[:-1], dtype=wide)


@torch.library.custom_op("shardwise::capped_attention_gradients", mutates_args=())
def backward(
    grad_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    cap: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of q, k and v as operators.backward does, in the dtype of sums."""
    capped = _capped(q, k, scale, cap)
    shares = (capped * cap).sub_(lse[..., None]).exp_().masked_fill_(~mask, 0.0)
    grad_v = _product(_by_keys(shares, v).mT, _by_keys(grad_out, v))
    rows = (grad_out.to(lse.dtype) * out).sum(-1, keepdim=True)
    grad_scores = _product(_by_keys(grad_out, v), v.mT).view(shares.shape).sub_(rows)
    slope = capped.square_().neg_().add_(1)  # of c tanh(s / c)
    grad_scores.mul_(shares).mul_(slope).mul_(scale)
    grad_q = _product(_by_keys(grad_scores, k), k).view(q.shape)
    return grad_q, _product(_by_keys(grad_scores, k).mT, _by_keys(q, k)), grad_v


@backward.register_fake
def _(
    grad_out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: object
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    wide = torch.promote_types(q.dtype, torch.float32)
    grad_q, grad_k, grad_v = (x.new_empty(x.shape, dtype=wide) for x in (q, k, v))
    return grad_q, grad_k, grad_v


def _capped(q: torch.Tensor, k: torch.Tensor, scale: float, cap: float) -> torch.Tensor:
    """Return tanh(s / c) of all scores, [B, N, T, T']."""
    scores = _product(_by_keys(q, k), k.mT).view(*q.shape[:-1], k.shape[2])
    return scores.mul_(scale / cap).tanh_()


def _by_keys(x: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Return [B, N, T, X] as [B, K, N / K T, X]: the queries of a key's heads one after the other.

    A sum over them is one over heads too.
    """
    return x.unflatten(1, (k.shape[1], -1)).flatten(2, 3)


def _product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return products of matrices with 32 bits, of factors in the dtype of y on a GPU."""
    if y.is_cuda and y.element_size() == 2:
        factors = x.to(y.dtype).flatten(0, 1), y.flatten(0, 1)
        return torch.bmm(*factors, out_dtype=torch.float32).unflatten(0, y.shape[:2])
    wide = torch.promote_types(y.dtype, torch.float32)
    return x.to(wide) @ y.to(wide)
