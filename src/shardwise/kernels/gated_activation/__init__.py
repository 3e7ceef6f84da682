"""The product of an activation and a second projection, inside a gated MLP."""

import torch

from shardwise.kernels import published
from shardwise.kernels.gated_activation import fused
from shardwise.kernels.published import backend_of

backend = backend_of("fla", when_compiled=False)


def gated_silu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up [..., F], in the dtype that both have.

    The backward keeps gate and up alone. On a GPU with `fla` installed its kernel computes it, as
    `rms_norm` says, and rounds once; torch's operators round silu before the product.
    """
    by = published if backend(gate.device, gate.dtype) == "fla" else fused
    return by.gated_silu(gate, up)
