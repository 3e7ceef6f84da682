"""The bytes that a rank sends in one training step, by closed formulas, under every layout.

m are the micro-batches of a step, BTD the bytes of a micro-batch's hidden states. Gradients and the
few numbers of a step are summed in float32, weights are gathered in their own dtype. Sizes are
those of the tensors that a collective is given; `bytes_leaving` says what a ring sends of them. An
axis that `cp` joins is named as the mesh has it, `dp_shard_cp` of `dp_shard` and `cp` together, or
`cp` where it has no other ranks. Of experts that `ep` spreads, `dp_expert` has the copies.

Numbers of calls are exact as long as gradients that are summed together fit in one bucket (25 MiB
under zero and ddp, whose first one has 1 MiB). The loss is the chunked one.
tests/parallel/test_communication.py counts the collectives of real steps.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import chain
from math import prod

from torch import nn

from shardwise.assembly.describe import Description
from shardwise.base.layouts import num_microbatches
from shardwise.config import RunConfig
from shardwise.lab.planner.axes import AXES
from shardwise.lab.planner.messages import Share, Step, Total, add_up, sizes_of
from shardwise.models.expert_plan import experts_by_layer
from shardwise.models.spec import ModelSpec
from shardwise.parallel.sent import Messages, ranks_along
from shardwise.parallel.strategies import strategy_of


def messages_of_step(
    cfg: RunConfig,
    run: Description,
    share: Share,
    num_targets: Sequence[int] | None = None,
    num_received: Mapping[str, int] | None = None,
) -> Total:
    """Return the sums of what `each_message` yields, by kind and axis."""
    return add_up(each_message(cfg, run, share, num_targets, num_received))


def each_message(
    cfg: RunConfig,
    run: Description,
    share: Share,
    num_targets: Sequence[int] | None = None,
    num_received: Mapping[str, int] | None = None,
) -> Iterator[Messages]:
    """Return what a rank with this share sends, along the axes that have more than one rank.

    For the arguments see `step_of`.
    """
    step = step_of(cfg, run, share, num_targets, num_received)
    return chain(within_layers(step), data_messages(step))


def step_of(
    cfg: RunConfig,
    run: Description,
    share: Share,
    num_targets: Sequence[int] | None = None,
    num_received: Mapping[str, int] | None = None,
) -> Step:
    """Return the step of a rank with this share.

    `num_targets`: tokens with a label in each micro-batch, on the rank; by default all tokens.
    `num_received`: rows that routers of all ranks of `ep` send to this rank's experts in the step,
    by the path of the experts; by default as many as this rank's tokens have.
    """
    assert unknown(cfg) is None, "the formulas do not know all that such a run sends"
    m = num_microbatches(cfg, prod(run.sizes.values()))
    num_tokens = cfg.training.micro_batch_size * cfg.data.sequence_length // cfg.parallel.cp
    if num_targets is None:
        num_targets = [num_tokens] * m
    if num_received is None:
        mixtures = [mixture for chunk in share.chunks for mixture in chunk.sending["ep"]]
        num_received = {mixture.path: m * num_tokens * mixture.top_k for mixture in mixtures}
    sizes = sizes_of(cfg, run)
    data = cfg, share.chunks, share.trained, sizes, m
    return Step(*data, run, share, num_tokens, num_targets, num_received)


def within_layers(step: Step) -> Iterator[Messages]:
    """Yield the messages of all axes but those of data: a rank waits for each of them."""
    used = [axis.messages for axis in AXES if step.sizes[axis.name] > 1]
    for formula in (_numbers, *used):
        yield from _along_ranks(step, formula)


def data_messages(step: Step) -> Iterator[Messages]:
    """Yield the messages of data parallelism: gradients, and weights that are gathered."""
    yield from _along_ranks(step, strategy_of(step.cfg).messages)


def _along_ranks(step: Step, formula: Callable[[Step], Iterator[Messages]]) -> Iterator[Messages]:
    return (message for message in formula(step) if step.size(message.axis) > 1)


def unknown(cfg: RunConfig) -> str | None:
    """Return what a run of a listed family sends or keeps that no formula knows, and how to do
    without it; None if they know all.
    """
    training, parallel = cfg.training, cfg.parallel
    if cfg.model.attention in ("eager", "math"):
        return f"whole scores (model.attention {cfg.model.attention}); set attention to auto"
    if parallel.tp > 1 and training.loss == "plain":
        return "what gathers all logits over tp (training.loss plain); set loss to chunked"
    if training.is_fp8 and (parallel.tp > 1 or parallel.cp > 1):
        return (
            f"the scales that ranks of tp or cp share (training.matmul {training.matmul}); set "
            "matmul to default"
        )
    return None


def bytes_leaving(total: Total, sizes: Mapping[str, int]) -> int:
    """Return the bytes that leave one rank where every collective runs around a ring.

    `sizes`: see `sizes_of`.
    """
    parts = [
        ring_bytes(kind, num_bytes, ranks_along(axis, sizes))
        for (kind, axis), (_, num_bytes) in total.items()
    ]
    return round(sum(parts))


def ring_bytes(kind: str, num_bytes: int, num_ranks: int) -> float:
    """Return the bytes of a collective's whole tensors that leave one of n ranks around a ring.

    Of an all-reduced tensor that is 2 (n-1)/n, of any other but what is sent as it is (n-1)/n; of
    rows for experts, where as many go to each rank.
    """
    if kind == "send":
        return num_bytes
    rounds = 2 if kind == "all-reduce" else 1
    return num_bytes * rounds * (num_ranks - 1) / num_ranks


def _numbers(step: Step) -> Iterator[Messages]:
    """Yield the few numbers of a step.

    The number of targets (int64) is summed over the data axes, the loss over these and stages, and
    the squares of the gradient norm over each set of axes that trained weights are sharded over,
    then over stages. The tokens of each expert and those dropped [L, E + 1], of all layers that
    have experts, are summed over data axes and stages.
    """
    axis_sets: set[tuple[str, ...]] = set()
    for chunk in step.share.chunks:
        unsharded = strategy_of(step.cfg).left_whole(step.cfg, chunk)
        for weight in chunk.unlike:
            if weight.is_trained:
                axes = [] if weight in unsharded else [step.data_axis(weight)]
                if weight.ep_dim is not None:
                    axes.append("ep")
                if weight.tp_dim is not None:
                    axes.append("tp")
                axis_sets.add(tuple(axes))
    for axis in ("dp_replicate", "dp_shard"):
        yield Messages("all-reduce", axis, 1, 8)
    for axes in (("pp", step.replica_axis, step.shard_axis), ("pp",), *axis_sets):
        for axis in axes:
            yield Messages("all-reduce", axis, 1, 4)
    if sizes := _experts_by_layer(step.run.hf, step.run.spec):
        num_bytes = 4 * len(sizes) * (max(sizes.values()) + 1)
        for axis in ("pp", step.replica_axis, step.shard_axis):
            yield Messages("all-reduce", axis, 1, num_bytes)


@lru_cache(maxsize=1)
def _experts_by_layer(hf: nn.Module, spec: ModelSpec) -> Mapping[str, int]:
    return experts_by_layer(hf, spec)
