"""A frozen linear with a LoRA adapter in as few passes over its input as can be."""

from shardwise.kernels.lora_linear.backend import Backend
from shardwise.kernels.lora_linear.fused import BackwardHalf, Linear, lora_linear

__all__ = ["Backend", "BackwardHalf", "Linear", "lora_linear"]
