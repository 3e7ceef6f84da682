"""The root mean square norm of layers, of queries and of keys."""

import torch

from shardwise.kernels import published
from shardwise.kernels.published import backend_of
from shardwise.kernels.rms_norm import fused

backend = backend_of("liger_kernel", when_compiled=False)


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float = 0.0
) -> torch.Tensor:
    """Return x / sqrt(mean(x^2) + eps) * (offset + weight), in x's dtype.

    x is [..., H] and weight [H]; the mean is over the last dim, the offset 0 or 1. It computes in
    float32 (float64 of float64) and rounds once; transformers' torch code rounds the normed x of
    some families too.

    On a GPU with `liger_kernel` installed its kernels compute it, except in float64 and in compiled
    code, whose compiler fuses it.
    """
    if backend(x.device, x.dtype) == "liger_kernel":
        return published.rms_norm(x, weight, eps, offset)
    return fused.rms_norm(x, weight, eps, offset)
