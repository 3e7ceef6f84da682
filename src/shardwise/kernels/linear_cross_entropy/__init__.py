"""The head and its cross entropy in one: what a language model spends most of its memory on if they are apart."""

from shardwise.kernels.linear_cross_entropy.chunked import Kernel, kernel_of, linear_cross_entropy
from shardwise.kernels.linear_cross_entropy.vocabulary import Vocabulary

__all__ = ["Kernel", "Vocabulary", "kernel_of", "linear_cross_entropy"]
