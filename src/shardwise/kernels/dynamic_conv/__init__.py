"""A causal depthwise convolution whose kernels differ from token to token."""

from shardwise.kernels.dynamic_conv.shifted import dynamic_conv

__all__ = ["dynamic_conv"]
