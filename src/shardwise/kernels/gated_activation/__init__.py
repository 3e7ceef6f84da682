"""The product of an activation and a second projection, inside a gated MLP."""

from shardwise.kernels.gated_activation.fused import gated_silu

__all__ = ["gated_silu"]
