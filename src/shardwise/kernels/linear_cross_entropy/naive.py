"""The reference: all logits, then torch's cross entropy."""

import torch
from torch.nn import functional as F


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    scale: float = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
    is_summed: bool = True,
) -> torch.Tensor:
    """Return the loss that chunked.linear_cross_entropy returns: a scalar, or [targets]."""
    logits = F.linear(hidden, weight, bias) * scale  # [rows, V]
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if is_summed:
        return F.cross_entropy(logits, labels, ignore_index=ignore_index, reduction="sum")
    is_target = labels != ignore_index
    return F.cross_entropy(logits[is_target], labels[is_target], reduction="none")
