"""Messages of tensor parallelism that mixers and feed-forwards cause, by closed formulas."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from shardwise.assembly.describe import Description
from shardwise.config import RunConfig
from shardwise.metrics.flops import rerun_of
from shardwise.models.counts import Unit
from shardwise.models.dtypes import hidden_dtype, product_dtype
from shardwise.models.spec import LayerSpec
from shardwise.models.tensor_cuts import BlockSplit, unwrapped
from shardwise.models.tensor_plan import cut_rows, split_blocks

if TYPE_CHECKING:
    from shardwise.parallel.weights import Weight


@dataclass(frozen=True)
class BlockMessages:
    """Messages of tensor parallelism that a mixer or a feed-forward causes."""

    is_sharded: bool
    """Whether each rank computes a partial sum of its output; otherwise all of it."""
    needs_input_gradient: bool
    has_backward: bool
    is_rerun: bool
    """Whether the backward runs its forward again."""
    reruns_output: bool
    """Whether that includes the sum of its output, as something after it in the layer runs too."""
    output_itemsize: int
    """Bytes of an element of its output, which autocast halves unless experts are added up."""
    bytes_within: tuple[int, ...]
    """Bytes per token of each sum over ranks that lies within the block."""
    cut_rows: tuple[int, ...] = ()
    """Rows of each of its matrices whose lengths DoRA takes, where a rank has a part of each."""


def blocks_of(
    cfg: RunConfig, run: Description, layer: LayerSpec, unit: Unit, weights: Sequence[Weight]
) -> Iterator[BlockMessages]:
    """Yield the blocks of a layer; `weights` are those of the layer on this rank."""
    splits = split_blocks(run.hf, layer, cfg.parallel.tp)
    # `operators` saves what comes out of products, but nothing of a collective.
    reruns_layer = rerun_of(unit, cfg.training.checkpointing) != "none"
    kinds = [block.kind for block in layer.blocks]
    last_norm = f"{layer.name}.{layer.norms.after}."
    ends_with_norm = any(weight.name.startswith(last_norm) for weight in weights)
    for kind, (path, split) in zip(kinds, splits.items(), strict=True):
        output_dtype = hidden_dtype(cfg) if kind.experts else product_dtype(cfg)
        prefix = f"{layer.name}.{path}."
        module = run.hf.get_submodule(prefix.removesuffix("."))
        products = [weight for weight in unit.weights if weight.name.startswith(prefix)]
        # What meets the input first has an input gradient only where the input has one.
        needs_input_gradient = all(weight.input_gradient for weight in products)
        is_trained = any(w.is_trained for w in weights if w.name.startswith(prefix))
        is_last = path == [*splits][-1]
        yield BlockMessages(
            is_sharded=split is not None,
            needs_input_gradient=needs_input_gradient,
            has_backward=needs_input_gradient or is_trained,
            is_rerun=reruns_layer,
            # A recomputation ends with the last tensor that the backward needs.
            reruns_output=reruns_layer and (not is_last or ends_with_norm),
            output_itemsize=output_dtype.itemsize,
            bytes_within=tuple(_bytes_within(module, split, product_dtype(cfg).itemsize)),
            cut_rows=() if split is None else cut_rows(module, split),
        )


def _bytes_within(module: nn.Module, split: BlockSplit | None, itemsize: int) -> Iterator[int]:
    """Yield the bytes per token of each sum within a block: of squares, or of a linear's output."""
    if split is not None:
        yield from (4 * split.norm_groups for _ in split.norms)
        for name in split.summed:
            yield itemsize * unwrapped(module.get_submodule(name)).out_features
