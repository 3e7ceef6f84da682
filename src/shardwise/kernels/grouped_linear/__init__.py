"""Linears of experts, each on the rows of its own tokens, with LoRA adapters or without."""

from shardwise.kernels.grouped_linear.fused import StackedAdapter, grouped_linear
from shardwise.kernels.grouped_linear.grouped import ROW_BYTES, takes
from shardwise.kernels.grouped_linear.rows import rows_of_experts, take_rows

__all__ = ["ROW_BYTES", "StackedAdapter", "grouped_linear", "rows_of_experts", "take_rows", "takes"]
