"""Memory that an optimizer needs while it updates the weights of a rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import prod

from shardwise.base.layouts import strategy_facts
from shardwise.config import RunConfig
from shardwise.models.eight_bit import chunk_numel
from shardwise.models.matrices import muon_dtype
from shardwise.parallel.muon import STEPS
from shardwise.parallel.reduce import BUCKET_ELEMENTS
from shardwise.parallel.weights import Weight, gradient_bytes


def update_bytes(cfg: RunConfig, numels: Mapping[Weight, int], is_gloo: bool) -> int:
    """Return the most bytes that the update needs, beside weights, gradients and states.

    `numels`: the elements that this rank updates of each trained weight. AdamW needs none, except
    copies of shards that are not contiguous. torch's SGD adds weights that decay to copies of
    gradients: of one weight after the other on a CPU, and of all together on a GPU.
    """
    name = cfg.optimizer.name
    if name == "adamw":
        return sum(n * w.itemsize for w, n in numels.items() if _is_strided(cfg, w))
    if name == "adamw8bit":
        return max(_in_8_bits(weight, numel) for weight, numel in numels.items())
    if name == "muon":
        return max(_of_muon(cfg, weight, numel) for weight, numel in numels.items())
    if not cfg.optimizer.weight_decay:
        return 0
    sizes = [numel * weight.itemsize for weight, numel in numels.items()]
    if is_gloo:
        return max(sizes)
    return sum(sizes) if cfg.parallel.offload == "none" else 0


def _is_strided(cfg: RunConfig, weight: Weight) -> bool:
    """Return whether zero's shard is a view along a later dim: see `by_element.AdamW`."""
    sharded = strategy_facts(cfg.parallel).sharded
    is_view = "optimizer" in sharded and "weights" not in sharded
    return is_view and weight.shard_dim is not None and prod(weight.shape[: weight.shard_dim]) > 1


def moved_bytes(cfg: RunConfig, numels: Iterable[tuple[Weight, int]]) -> int:
    """Return the bytes that an update of so many elements of each weight reads and writes: weights,
    gradients and states, and the gradients before it, for their norm and clipping.
    """
    passes = 1 if cfg.optimizer.max_grad_norm is None else 3
    return sum(
        _moved_by_element(cfg.optimizer.name, weight) * n
        + passes * gradient_bytes(cfg, n, weight.itemsize)
        for weight, n in numels
    )


def _moved_by_element(name: str, weight: Weight) -> int:
    """Return the bytes of one element: weight and each moment read and written, gradient read."""
    size = weight.itemsize
    if name == "sgd":
        return 3 * size
    if weight.is_selected and name == "adamw8bit":
        return 3 * size + 4
    return (5 if weight.is_selected and name == "muon" else 7) * size


def orthogonalising_flops(cfg: RunConfig, weights: Iterable[Weight]) -> int:
    """Return the FLOPs in which Muon makes matrices orthogonal: every rank each matrix as a whole.

    A step of the iteration multiplies X X^T = A, A A, and (b A + c A A) X.
    """
    if cfg.optimizer.name != "muon":
        return 0
    total = 0
    for weight in weights:
        if weight.is_selected:
            rows, columns = sorted(weight.shape[-2:])
            matrices = weight.numel // (rows * columns)
            total += matrices * STEPS * (4 * rows**2 * columns + 2 * rows**3)
    return total


def _in_8_bits(weight: Weight, numel: int) -> int:
    """Return the bytes that 8-bit AdamW needs to update a weight; 0 for what AdamW updates.

    Of a chunk of rows they are both moments in float32, and while one of them is read or rounded
    its codes in 32 bits and a tensor like it; in 16 bits also the gradient and the weight in
    float32, of which the latter is gone when moments are rounded.
    """
    if not weight.is_selected or not numel:
        return 0
    return min(numel, chunk_numel(weight.shape)) * (13 if weight.itemsize == 4 else 20)


def _of_muon(cfg: RunConfig, weight: Weight, numel: int) -> int:
    """Return the bytes that Muon needs to update a matrix; 0 for what AdamW updates.

    In turn they are the update in the weight's dtype and in that of products; the matrix, which is
    gathered where a rank has a shard of it, with two like it and two Gram matrices; and what is
    added to the weight.
    """
    if not weight.is_selected:
        return 0
    size, dtype = weight.itemsize, muon_dtype(cfg.training.precision).itemsize
    is_cut = numel < weight.numel and (weight.shard_dim or 0) >= len(weight.shape) - 2
    multiplied = weight.numel if is_cut else numel
    grams = multiplied // prod(weight.shape[-2:]) * min(weight.shape[-2:]) ** 2
    in_products = (3 * multiplied + 2 * grams + numel * is_cut) * dtype
    if size == dtype:
        return in_products
    return max(numel * (size + dtype), in_products, numel * (2 * dtype + size))


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
