"""A frozen linear with a LoRA adapter in as few passes over its input as can be."""

from shardwise.kernels.lora_linear.fused import Linear, lora_linear

__all__ = ["Linear", "lora_linear"]
