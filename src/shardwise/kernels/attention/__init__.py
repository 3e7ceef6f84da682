"""Softmax attention of some queries on some keys of a row, which can be merged with that on others.

Tensors have heads before tokens. q is [B, N, T, H]; k and v have K heads, each for N / K heads of
q, and v may have another size than q and k. Along with its output each query has the logarithm of
its sum of exponentials (log-sum-exp, `lse` [B, N, T], float32, or float64 of float64 inputs): it is
all that is needed to merge outputs on several blocks of keys, and to compute the backward of a
block by itself from what the merged output and log-sum-exp are. A query that sees no key has the
output 0 and the log-sum-exp -inf.

Source: Dao, "FlashAttention-2", arXiv 2307.08691, section 2.3 and algorithm 2.
"""

from shardwise.kernels.attention.blocks import Merged, attend, attend_backward
from shardwise.kernels.attention.naive import Sight

__all__ = ["Merged", "Sight", "attend", "attend_backward"]
