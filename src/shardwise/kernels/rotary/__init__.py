"""Rotary positions of queries and keys."""

from shardwise.kernels.rotary.fused import (
    rotate,
    rotate_halves,
    rotate_neighbours,
    rotate_pairs,
    rotate_repeated,
)

__all__ = ["rotate", "rotate_halves", "rotate_neighbours", "rotate_pairs", "rotate_repeated"]
