"""Frozen linears with LoRA adapters, in as few passes over their input as possible."""

from shardwise.kernels.lora_linear.backend import LoraBackend
from shardwise.kernels.lora_linear.fused import Linear, lora_linear
from shardwise.kernels.lora_linear.operators import load_backend

__all__ = ["Linear", "LoraBackend", "load_backend", "lora_linear"]
