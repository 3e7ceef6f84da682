"""The bytes that a rank sends in one training step, by closed formulas, under every layout.

m are the micro-batches of a step, BTD the bytes of a micro-batch's hidden states. Gradients and the
few numbers of a step are summed in float32, weights are gathered in their own dtype. Sizes are
those of the tensors that a collective is given; `bytes_leaving` says what a ring sends of them. An
axis that `cp` joins is named as the mesh has it, `dp_shard_cp` of `dp_shard` and `cp` together, or
`cp` where it has no other ranks.

Numbers of calls are exact as long as gradients that are summed together fit in one bucket (25 MiB
under zero and ddp, whose first one has 1 MiB). The loss is the chunked one.
tests/parallel/test_communication.py counts the collectives of real steps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from shardwise.assembly.describe import Description
from shardwise.config import RunConfig
from shardwise.layouts import num_microbatches
from shardwise.models.dtypes import hidden_dtype
from shardwise.models.expert_plan import experts_by_layer
from shardwise.parallel.mesh import context_joins_of
from shardwise.planner.context import sent_by_layers, sent_by_router_loss
from shardwise.planner.share import Chunk, Share, Weight
from shardwise.planner.units import flat_parameters, flat_spans, left_whole, shard_axis, units_of
from shardwise.schedule.context import MessageKind

Total = dict[tuple[str, str], tuple[int, int]]
"""(kind, mesh axis) -> calls, and bytes of their whole tensors together."""


@dataclass(frozen=True)
class Messages:
    """Collectives of one kind over one mesh axis, and the bytes of their whole tensors together."""

    kind: MessageKind
    axis: str
    calls: int
    num_bytes: int


@dataclass(frozen=True)
class Step:
    """A training step of one rank."""

    cfg: RunConfig
    run: Description
    share: Share
    sizes: Mapping[str, int]
    """Ranks along each axis of the mesh."""
    num_microbatches: int
    num_tokens: int
    """Tokens of a micro-batch on the rank."""
    num_targets: Sequence[int]
    """Tokens with a label in each micro-batch, on the rank."""

    @property
    def replicas(self) -> str:
        """The axis of ddp's and ZeRO's ranks, as Mesh.replicas."""
        return joined_axis(self.cfg, "dp_replicate", self.sizes)

    @property
    def shards(self) -> str:
        """The axis of FSDP's ranks, as Mesh.shards."""
        return joined_axis(self.cfg, "dp_shard", self.sizes)

    def size(self, axis: str) -> int:
        """Return the number of ranks along an axis, which may be a joined one."""
        return ranks_along(axis, self.sizes)

    @property
    def hidden_numel(self) -> int:
        """The elements of a micro-batch's hidden states [B, T, D]."""
        return self.num_tokens * self.share.chunks[0].spec.hidden_size

    @property
    def hidden_bytes(self) -> int:
        """The bytes of hidden states between blocks."""
        return self.hidden_numel * hidden_dtype(self.cfg).itemsize


def messages_of_step(
    cfg: RunConfig, run: Description, share: Share, num_targets: Sequence[int] | None = None
) -> Total:
    """Return what a rank with this share sends, along the axes that have more than one rank.

    `num_targets`: tokens with a label in each micro-batch, on the rank; by default all tokens.
    """
    knows_loss = cfg.parallel.tp == 1 or cfg.training.loss != "plain"
    assert cfg.parallel.ep == 1, "what expert parallelism sends is not among the formulas"
    assert knows_loss, "what gathering all logits sends is not among the formulas"
    m = num_microbatches(cfg, prod(run.sizes.values()))
    num_tokens = cfg.training.micro_batch_size * cfg.data.sequence_length // cfg.parallel.cp
    if num_targets is None:
        num_targets = [num_tokens] * m
    step = Step(cfg, run, share, run.sizes, m, num_tokens, num_targets)
    formulas = [_numbers, _pipeline, _tensor, _context]
    if cfg.parallel.data != "single":
        formulas.append(DATA_FORMULAS[cfg.parallel.data])
    messages = (message for formula in formulas for message in formula(step))
    return add_up(message for message in messages if step.size(message.axis) > 1)


def joined_axis(cfg: RunConfig, axis: str, sizes: Mapping[str, int]) -> str:
    """Return the name of a data axis together with `cp`, if `cp` joins it."""
    if sizes["cp"] == 1 or axis != context_joins_of(cfg):
        return axis
    return f"{axis}_cp" if sizes[axis] > 1 else "cp"


def ranks_along(axis: str, sizes: Mapping[str, int]) -> int:
    """Return the number of ranks along an axis, which may be a joined one."""
    parts = (axis.removesuffix("_cp"), "cp") if axis.endswith("_cp") else (axis,)
    return prod(sizes[part] for part in parts)


def add_up(messages: Iterable[Messages]) -> Total:
    """Return the sums of calls and bytes by kind and axis."""
    calls, num_bytes = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for message in messages:
        calls[message.kind, message.axis] += message.calls
        num_bytes[message.kind, message.axis] += message.num_bytes
    return {key: (number, num_bytes[key]) for key, number in calls.items() if number}


def bytes_leaving(total: Total, sizes: Mapping[str, int]) -> int:
    """Return the bytes that leave one rank where every collective runs around a ring of n ranks.

    Of an all-reduced tensor that is 2 (n-1)/n, of any other but what is sent as it is (n-1)/n.
    """
    rounds = {"all-reduce": 2, "all-gather": 1, "reduce-scatter": 1, "all-to-all": 1}
    leaving = 0.0
    for (kind, axis), (_, num_bytes) in total.items():
        n = ranks_along(axis, sizes)
        leaving += num_bytes if kind == "send" else num_bytes * rounds[kind] * (n - 1) / n
    return round(leaving)


def _numbers(step: Step) -> Iterator[Messages]:
    """Yield the few numbers of a step.

    The number of targets (int64) is summed over the data axes, the loss over these and stages, and
    the squares of the gradient norm over each set of axes that trained weights are sharded over,
    then over stages. The tokens of each expert and those dropped [L, E + 1], of all layers that
    have experts, are summed over data axes and stages.
    """
    data = step.replicas if shard_axis(step.cfg) == "dp_replicate" else step.shards
    axis_sets: set[tuple[str, ...]] = set()
    for chunk in step.share.chunks:
        unsharded = left_whole(step.cfg, chunk, step.size(data))
        for weight in chunk.weights:
            if weight.is_trained:
                axes = [] if weight in unsharded else [data]
                if weight.tp_dim is not None:
                    axes.append("tp")
                axis_sets.add(tuple(axes))
    for axis in ("dp_replicate", "dp_shard"):
        yield Messages("all-reduce", axis, 1, 8)
    for axes in (("pp", step.replicas, step.shards), ("pp",), *axis_sets):
        for axis in axes:
            yield Messages("all-reduce", axis, 1, 4)
    if sizes := experts_by_layer(step.run.hf, step.run.spec):
        num_bytes = 4 * len(sizes) * (max(sizes.values()) + 1)
        for axis in ("pp", step.replicas, step.shards):
            yield Messages("all-reduce", axis, 1, num_bytes)


def _ddp(step: Step) -> Iterator[Messages]:
    """Yield the sums of all trained gradients, once a step: one for each dtype of weights, unless a
    pipeline or tensor parallelism sums them after the last backward.
    """
    sums_after = step.sizes["pp"] > 1 or step.sizes["tp"] > 1
    num_sums = 1 if sums_after else _num_dtypes(step.share.trained)
    yield Messages("all-reduce", step.replicas, num_sums, _float32_bytes(step.share.trained))


def _zero(step: Step) -> Iterator[Messages]:
    """Yield the reduce-scatter of trained gradients, once a step or, in stage 2, a micro-batch, and
    the all-gather of the updated weights, one of each for each dtype of weights.
    """
    n = step.size(step.replicas)
    unsharded = [weight for weight in step.share.trained if weight.shard_dim(n) is None]
    sharded = [weight for weight in step.share.trained if weight not in unsharded]
    times = 1 if step.cfg.parallel.data == "zero1" else step.num_microbatches
    num_dtypes = _num_dtypes(sharded)
    num_bytes = times * _float32_bytes(sharded, n)
    yield Messages("reduce-scatter", step.replicas, times * num_dtypes, num_bytes)
    yield Messages("all-gather", step.replicas, num_dtypes, _weight_bytes(sharded, n))
    if unsharded:
        yield Messages("all-reduce", step.replicas, 1, _float32_bytes(unsharded))


def _fsdp1(step: Step) -> Iterator[Messages]:
    """Yield, per micro-batch, what fsdp2 sends, of flat parameters.

    A unit with nothing trained in it or below is not gathered for a backward, nor is the outer
    flat parameter of the root, which stays gathered.
    """
    n, m = step.size(step.shards), step.num_microbatches
    (chunk,) = step.share.chunks
    has_backward = False
    for unit in units_of(chunk, "fsdp1"):
        has_backward = has_backward or bool(unit.trained)
        flat = flat_parameters(unit, step.cfg.parallel.fsdp1_wrap)
        for weights in flat:
            is_kept = unit.is_kept and weights is flat[-1]
            gathers = 2 * m if has_backward and not is_kept else m
            numel = -(-flat_spans(weights)[-1][1] // n) * n
            num_bytes = numel * weights[0].itemsize
            yield Messages("all-gather", step.shards, gathers, gathers * num_bytes)
            if any(weight.is_trained for weight in weights):
                yield Messages("reduce-scatter", step.shards, m, m * 4 * numel)
    if trained := [weight for weight in left_whole(step.cfg, chunk, n) if weight.is_trained]:
        yield Messages("all-reduce", step.shards, 1, _float32_bytes(trained))


def _fsdp2(step: Step) -> Iterator[Messages]:
    """Yield, per micro-batch and unit, an all-gather for the forward, another one for the backward,
    and the reduce-scatter of trained gradients, whose shards are summed over replicas once a step.

    The backward ends at the lowest unit with something trained, and has gathered the unit below it
    ahead. In a pipeline gradients are reduce-scattered once a step, and a backward leaves the
    weights gathered for what comes next: they are gathered at first, and after every forward.
    """
    n, m = step.size(step.shards), step.num_microbatches
    in_pipeline = step.sizes["pp"] > 1
    for chunk in step.share.chunks:
        unsharded = left_whole(step.cfg, chunk, n)
        units = units_of(chunk, "fsdp2")
        lowest = 0
        if not chunk.needs_input_gradient:
            lowest = next((i for i, unit in enumerate(units) if unit.trained), len(units) + 1)
        for i, unit in enumerate(units):
            is_freed = step.cfg.parallel.reshard_after_forward and not unit.is_kept
            backward_gathers = m if is_freed and i >= lowest - 1 else 0
            stays_gathered = in_pipeline and (backward_gathers or not is_freed)
            gathers = (1 if stays_gathered else m) + backward_gathers
            sharded = [weight for weight in unit.weights if weight not in unsharded]
            num_bytes = _weight_bytes(sharded, n)
            yield Messages("all-gather", step.shards, gathers, gathers * num_bytes)
            if trained := [weight for weight in sharded if weight.is_trained]:
                times, num_bytes = 1 if in_pipeline else m, _float32_bytes(trained, n)
                yield Messages("reduce-scatter", step.shards, times, times * num_bytes)
                yield Messages("all-reduce", step.replicas, 1, num_bytes // n)
        if trained := [weight for weight in unsharded if weight.is_trained]:
            for axis in (step.replicas, step.shards):
                yield Messages("all-reduce", axis, 1, _float32_bytes(trained))


def _tensor(step: Step) -> Iterator[Messages]:
    """Yield what tensor parallelism sends per micro-batch, and its gradients once a step.

    Besides `_moves`, some blocks sum a few numbers per token within, and the loss sums three
    numbers per target: the largest logit, then the sum of exponentials with the target's logit.
    Once a step gradients are summed of which each rank has a partial sum, and those of rows that
    several ranks hold, segment by segment.
    """
    m, n = step.num_microbatches, step.size(step.shards)
    for chunk in step.share.chunks:
        moves = _moves_with_tokens if step.cfg.parallel.sequence_parallel else _moves
        for kind, number, itemsize in moves(chunk, hidden_dtype(step.cfg).itemsize):
            yield Messages(kind, "tp", m * number, m * number * step.hidden_numel * itemsize)
        for block in chunk.blocks:
            times = m * (1 + block.has_backward + block.is_rerun)
            for num_bytes in block.bytes_within:
                yield Messages("all-reduce", "tp", times, times * step.num_tokens * num_bytes)
        if chunk.spec.last:
            calls = 2 * sum(map(bool, step.num_targets))  # without a target there is no logit
            yield Messages("all-reduce", "tp", calls, sum(step.num_targets) * 3 * 4)
    if partial := [weight for weight in step.share.trained if weight.has_partial_gradient]:
        yield Messages("all-reduce", "tp", 1, _float32_bytes(partial, n) // n)
    for weight in step.share.trained:
        for numel in weight.shared_numels:
            yield Messages("all-reduce", "tp", 1, 4 * numel // n)


Moves = Iterator[tuple[MessageKind, int, int]]
"""Kind and number of a micro-batch's messages [B, T, D], and bytes of an element."""


def _moves(chunk: Chunk, itemsize: int) -> Moves:
    """Yield the sums of the embedding's rows, of each block's output and, in the backward, of its
    input's gradient, and of the gradient of the head's input.
    """
    yield "all-reduce", int(chunk.spec.first), itemsize
    for block in chunk.blocks:
        if block.is_sharded:
            yield "all-reduce", 1 + block.reruns_output, block.output_itemsize
            yield "all-reduce", int(block.needs_input_gradient), itemsize
    yield "all-reduce", int(chunk.needs_head_gradient), itemsize


def _moves_with_tokens(chunk: Chunk, itemsize: int) -> Moves:
    """Yield the moves of sequence parallelism, where ranks have their tokens between blocks.

    The sums of `_moves` around blocks and head are reduce-scatters. An all-gather comes before each
    block and, in the backward, before what follows it. One more comes at the end of a stage, or
    before the head, and one in the backward of a stage's start.
    """
    yield "all-reduce", int(chunk.spec.first), itemsize
    for block in chunk.blocks:
        yield "all-gather", 1 + block.is_rerun, itemsize
        yield "all-gather", int(block.has_backward), block.output_itemsize
        if block.is_sharded:
            yield "reduce-scatter", 1 + block.reruns_output, block.output_itemsize
            yield "reduce-scatter", int(block.needs_input_gradient), itemsize
    yield "reduce-scatter", int(chunk.needs_head_gradient), itemsize
    if chunk.spec.layers or chunk.spec.last:
        yield "all-gather", 1 + chunk.needs_input_gradient, itemsize


def _pipeline(step: Step) -> Iterator[Messages]:
    """Yield BTD per micro-batch and cut between ranks: hidden states up, and their gradient down.

    Once a step the first and the last stage exchange their gradients of a tied weight.
    """
    calls = 0
    for chunk in step.share.chunks:
        calls += chunk.sends + (chunk.receives and chunk.needs_input_gradient)
    calls *= step.num_microbatches
    yield Messages("send", "pp", calls, calls * step.hidden_bytes)
    if step.share.tied is not None:
        n = step.size(step.shards)
        yield Messages("send", "pp", 1, _weight_bytes([step.share.tied], n) // n)


def _context(step: Step) -> Iterator[Messages]:
    """Yield what layers and the router loss send along `cp` per micro-batch and, without a
    data-parallel strategy, the sum of all trained gradients once a step.
    """
    if step.sizes["cp"] == 1:
        return
    cfg, run, m = step.cfg, step.run, step.num_microbatches
    for chunk in step.share.chunks:
        layers = sent_by_layers(cfg, run.hf, run.spec, chunk.mixers, step.share.context_rank)
        for sent in (*layers, *sent_by_router_loss(cfg, chunk.router_experts)):
            for kind, (calls, num_bytes) in sent.items():
                yield Messages(kind, "cp", m * calls, m * num_bytes)
    if cfg.parallel.data == "single":
        yield Messages("all-reduce", "cp", 1, _float32_bytes(step.share.trained))


DATA_FORMULAS: Mapping[str, Callable[[Step], Iterator[Messages]]] = {
    "ddp": _ddp,
    "zero1": _zero,
    "zero2": _zero,
    "fsdp1": _fsdp1,
    "fsdp2": _fsdp2,
}


def _num_dtypes(weights: Iterable[Weight]) -> int:
    """Return how many dtypes weights have; those of two dtypes share no bucket."""
    return len({weight.itemsize for weight in weights})


def _weight_bytes(weights: Iterable[Weight], num_shards: int = 1) -> int:
    """Return the bytes of weights, each padded to equal shards, in its dtype."""
    return sum(weight.itemsize * weight.padded_numel(num_shards) for weight in weights)


def _float32_bytes(weights: Iterable[Weight], num_shards: int = 1) -> int:
    """Return the bytes of the weights' gradients in float32, each padded to equal shards."""
    return sum(4 * weight.padded_numel(num_shards) for weight in weights)
