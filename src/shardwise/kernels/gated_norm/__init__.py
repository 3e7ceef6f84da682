"""The root mean square norm with a gate, before the last projection of a recurrent mixer."""

import torch

from shardwise.kernels import published
from shardwise.kernels.gated_norm import fused
from shardwise.kernels.gated_norm.fused import Activation
from shardwise.kernels.published import backend_of

backend = backend_of("fla", when_compiled=False)


def gated_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    gate: torch.Tensor,
    eps: float,
    activation: Activation = "silu",
) -> torch.Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight * activation(gate), in x's dtype.

    x and gate are [..., H] and weight [H]; the mean is over the last dim. It computes in float32
    (float64 of float64) and rounds once. transformers' torch code rounds the normed x of some
    families too. On a GPU with `fla` installed its kernel computes it, as `rms_norm` says.
    """
    by = published if backend(x.device, x.dtype) == "fla" else fused
    return by.gated_norm(x, weight, gate, eps, activation)
