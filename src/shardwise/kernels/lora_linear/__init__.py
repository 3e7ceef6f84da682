"""Frozen linears with LoRA adapters, in as few passes over their input as possible."""

from shardwise.kernels.lora_linear.backend import Backend
from shardwise.kernels.lora_linear.fused import BackwardHalf, Linear, lora_linear

__all__ = ["Backend", "BackwardHalf", "Linear", "lora_linear"]
