"""The gated activation as autograd differentiates it, which keeps the activation too."""

import torch
from torch.nn import functional as F


def gated_silu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up [..., F], each factor in its own dtype."""
    return F.silu(gate) * up
