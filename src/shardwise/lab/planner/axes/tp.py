"""Messages of tensor parallelism that mixers and feed-forwards cause, by closed formulas."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from shardwise.assembly.describe import Description
from shardwise.base.schedule.context import MessageKind
from shardwise.config import RunConfig
from shardwise.lab.planner.axes.axis import AxisMessages, Traffic
from shardwise.lab.planner.divisions import Division
from shardwise.lab.planner.messages import ChunkShare, Step
from shardwise.metrics.flops import rerun_of
from shardwise.models.counts import Unit
from shardwise.models.dtypes import hidden_dtype, product_dtype
from shardwise.models.spec import LayerSpec
from shardwise.models.tensor_cuts import BlockSplit, unwrapped
from shardwise.models.tensor_plan import cut_rows, split_blocks
from shardwise.parallel.sent import Messages
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


class TensorMessages(AxisMessages):
    """Ranks with a part of each weight, which add up partial sums."""

    name = "tp"
    parts = staticmethod(blocks_of)

    def messages(self, step: Step) -> Iterator[Messages]:
        """Yield what tensor parallelism sends per micro-batch, and its gradients once a step.

        Besides `_moves`, some blocks sum a few numbers per token within, DoRA sums the squares of
        rows of which each rank has a part, and the loss sums three numbers per target: the largest
        logit, then the sum of exponentials with the target's logit. Once a step gradients are
        summed of which each rank has a partial sum, and those of rows that several ranks hold,
        segment by segment.
        """
        m = step.num_microbatches
        for chunk in step.share.chunks:
            moves = _moves_with_tokens if step.cfg.parallel.sequence_parallel else _moves
            for kind, number, itemsize in moves(chunk, hidden_dtype(step.cfg).itemsize):
                yield Messages(kind, "tp", m * number, m * number * step.hidden_numel * itemsize)
            for block in chunk.sending["tp"]:
                times = m * (1 + block.has_backward + block.is_rerun)
                for num_bytes in block.bytes_within:
                    yield Messages("all-reduce", "tp", times, times * step.num_tokens * num_bytes)
                times = m * (1 + block.is_rerun)
                for num_rows in block.cut_rows:
                    yield Messages("all-reduce", "tp", times, times * 4 * num_rows)
            if chunk.spec.last:
                calls = 2 * sum(map(bool, step.num_targets))  # without a target there is no logit
                yield Messages("all-reduce", "tp", calls, sum(step.num_targets) * 3 * 4)
        if partial := [weight for weight in step.share.trained if weight.has_partial_gradient]:
            numels = [weight.padded_numel // step.num_pieces(weight) for weight in partial]
            yield Messages("all-reduce", "tp", 1, 4 * sum(numels))
        for weight in step.share.trained:
            for numel in weight.shared_numels:
                yield Messages("all-reduce", "tp", 1, 4 * numel // step.num_pieces(weight))

    def seconds(self, traffic: Traffic, division: Division, is_again: bool) -> float:
        """See AxisMessages."""
        # Summed are the outputs of two blocks, and the gradients of their inputs. A forward that
        # runs again ends before the last sum. With sequence parallelism a sum is two messages, and
        # inputs are gathered again, too.
        num_sums, summed = 4 + is_again, 2 * (traffic.output_bytes + traffic.hidden_bytes)
        if is_again:
            summed += (
                traffic.hidden_bytes + traffic.output_bytes / 2
                if division.is_sequence
                else traffic.output_bytes
            )
        num_messages = 2 * num_sums if division.is_sequence else num_sums
        sent = 2 * (division.tp - 1) / division.tp * summed / division.cp
        kind = "all-gather" if division.is_sequence else "all-reduce"
        latency = traffic.cluster.latency(kind, division.tp, division.tp)
        each = sent / traffic.ring(division.tp).bandwidth + num_messages * latency
        return traffic.num_layers / division.pp * each


Moves = Iterator[tuple[MessageKind, int, int]]
"""Kind and number of a micro-batch's messages [B, T, D], and bytes of an element."""


def _moves(chunk: ChunkShare, itemsize: int) -> Moves:
    """Yield the sums of the embedding's rows, of each block's output and, in the backward, of its
    input's gradient, and of the gradient of the head's input.
    """
    yield "all-reduce", int(chunk.spec.first), itemsize
    for block in chunk.sending["tp"]:
        if block.is_sharded:
            yield "all-reduce", 1 + block.reruns_output, block.output_itemsize
            yield "all-reduce", int(block.needs_input_gradient), itemsize
    yield "all-reduce", int(chunk.needs_head_gradient), itemsize


def _moves_with_tokens(chunk: ChunkShare, itemsize: int) -> Moves:
    """Yield the moves of sequence parallelism, where ranks have their tokens between blocks.

    The sums of `_moves` around blocks and head are reduce-scatters. An all-gather comes before each
    block and, in the backward, before what follows it. One more comes at the end of a stage, or
    before the head, and one in the backward of a stage's start.
    """
    yield "all-reduce", int(chunk.spec.first), itemsize
    for block in chunk.sending["tp"]:
        yield "all-gather", 1 + block.is_rerun, itemsize
        yield "all-gather", int(block.has_backward), block.output_itemsize
        if block.is_sharded:
            yield "reduce-scatter", 1 + block.reruns_output, block.output_itemsize
            yield "reduce-scatter", int(block.needs_input_gradient), itemsize
    yield "reduce-scatter", int(chunk.needs_head_gradient), itemsize
    if chunk.spec.layers or chunk.spec.last:
        yield "all-gather", 1 + chunk.needs_input_gradient, itemsize
