"""Bytes that an optimizer moves in an update, and those that gradients need before it."""

from collections.abc import Iterable

from shardwise.config import RunConfig
from shardwise.parallel.optimizers import update_rule_of
from shardwise.parallel.reduce import BUCKET_ELEMENTS
from shardwise.parallel.weights import Weight, gradient_bytes


def moved_bytes(cfg: RunConfig, numels: Iterable[tuple[Weight, int]]) -> int:
    """Return the bytes that an update of so many elements of each weight reads and writes: weights,
    gradients and states, and the gradients before it, for their norm and clipping.
    """
    passes = 1 if cfg.optimizer.max_grad_norm is None else 3
    return sum(
        update_rule_of(cfg).moved_by_element(weight) * n
        + passes * gradient_bytes(cfg, n, weight.itemsize)
        for weight, n in numels
    )


def summed_bytes(cfg: RunConfig, weights: Iterable[Weight]) -> int:
    """Return the most bytes that `reduce.sum_gradients` needs, which joins gradients."""
    most = joined = 0
    for weight in weights:
        joined += weight.numel
        # Gradients in 16 bits are copied to float32 before they are joined.
        copies = 4 if gradient_bytes(cfg, 1, weight.itemsize) == 4 else 8
        most = max(most, joined * copies)
        if joined >= BUCKET_ELEMENTS:
            joined = 0
    return most
