"""The root mean square norm with a gate, before the last projection of a recurrent mixer."""

from shardwise.kernels.gated_norm.fused import gated_norm

__all__ = ["gated_norm"]
