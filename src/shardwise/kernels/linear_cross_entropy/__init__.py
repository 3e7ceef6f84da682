"""The linear head and its cross entropy in one: apart, they need most of a model's memory."""

from shardwise.kernels.linear_cross_entropy.chunked import Kernel, kernel_of, linear_cross_entropy
from shardwise.kernels.linear_cross_entropy.vocabulary import Vocabulary

__all__ = ["Kernel", "Vocabulary", "kernel_of", "linear_cross_entropy"]
