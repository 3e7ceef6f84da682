"""torch's fused operators of attention, which scaled_dot_product_attention calls too.

They give the log-sum-exp along with the output, and their backward takes both as they are.
"""

import torch
from torch.nn import functional as F

aten = torch.ops.aten
Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return output and log-sum-exp of q on all keys, on those where `mask` is true, or causally.

    `mask` is bool, [T, T'] or [B, 1, T, T']; a query must see a key. With `causal`, T' = T.
    """
    size, (q, k, v) = v.shape[-1], to_one_size(q, k, v)
    bias = None if mask is None else _bias(mask, q)
    if q.is_cuda:
        compute = flash if _is_flash(q, bias) else efficient
        out, lse = compute(q, k, v, bias, causal, scale)
    else:
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal, attn_mask=bias, scale=scale
        )
    return out[..., :size], lse


def backward(
    grad_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    scale: float,
) -> Tensors:
    """Return the gradients of q, k and v; `out` and `lse` are those on all blocks of keys.

    A finite number stands for the `lse` of a query that sees no key.
    """
    key_size, value_size = q.shape[-1], v.shape[-1]
    q, k, v, grad_out, out = to_one_size(q, k, v, grad_out, out)
    bias = None if mask is None else _bias(mask, q)
    if q.is_cuda:
        compute = flash_backward if _is_flash(q, bias) else efficient_backward
        grad_q, grad_k, grad_v = compute(grad_out, q, k, v, out, lse, bias, causal, scale)
    else:
        grad_q, grad_k, grad_v = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad_out, q, k, v, out, lse, 0.0, causal, attn_mask=bias, scale=scale
        )
    return grad_q[..., :key_size], grad_k[..., :key_size], grad_v[..., :value_size]


def to_one_size(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Pad heads with zeros to one size that every kernel takes, a multiple of 8: scores stay."""
    size = -(-max(x.shape[-1] for x in tensors) // 8) * 8
    return tuple(x if x.shape[-1] == size else F.pad(x, (0, size - x.shape[-1])) for x in tensors)


def _bias(mask: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Return 0 where a key is seen and -inf elsewhere, in q's dtype, [B, N, T, T'].

    Rows begin at multiples of 16 elements, as the kernels on CUDA ask.
    """
    width = mask.shape[-1]
    bias = q.new_zeros(*mask.shape[:-1], -(-width // 16) * 16)[..., :width]
    bias.masked_fill_(~mask, -torch.inf)
    return bias.expand(len(q), q.shape[1], *mask.shape[-2:])


# ------------------------------------------------------------------------------------------ on CUDA


def _is_flash(q: torch.Tensor, bias: torch.Tensor | None) -> bool:
    return bias is None and q.element_size() == 2 and q.shape[-1] <= 256


def flash(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None,
    causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return output and log-sum-exp by FlashAttention: 16 bits, no mask, heads of up to 256."""
    assert bias is None
    return aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, scale=scale)[:2]


def flash_backward(
    grad_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    bias: torch.Tensor | None,
    causal: bool,
    scale: float,
) -> Tensors:
    """Return the gradients of q, k and v by FlashAttention."""
    assert bias is None
    random = torch.zeros(2, dtype=torch.uint64, device=q.device)  # read with dropout only
    blocks = (None, None, q.shape[2], k.shape[2])
    rest = (0.0, causal, random, random)
    return aten._scaled_dot_product_flash_attention_backward(
        grad_out, q, k, v, out, lse.contiguous(), *blocks, *rest, scale=scale
    )


def efficient(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None,
    causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return output and log-sum-exp by the kernel that takes masks and float32 too."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    out, lse, *_ = aten._scaled_dot_product_efficient_attention(
        q, k, v, bias, True, 0.0, causal, scale=scale
    )
    return out, lse[..., : q.shape[2]]  # padded to a multiple of 32 queries


def efficient_backward(
    grad_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    bias: torch.Tensor | None,
    causal: bool,
    scale: float,
) -> Tensors:
    """Return the gradients of q, k and v by the same kernel."""
    heads = k.shape[1], -1
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    lse = F.pad(lse, (0, -lse.shape[-1] % 32), value=torch.inf)
    random = torch.zeros((), dtype=torch.int64, device=q.device)  # read with dropout only
    wanted = [True, True, True, False]
    grad_q, grad_k, grad_v, _ = aten._scaled_dot_product_efficient_attention_backward(
        grad_out, q, k, v, bias, out, lse, random, random, 0.0, wanted, causal, scale=scale
    )
    return grad_q, grad_k.unflatten(1, heads).sum(2), grad_v.unflatten(1, heads).sum(2)
