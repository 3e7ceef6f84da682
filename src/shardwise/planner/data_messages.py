"""What each data-parallel strategy sends in a training step, by closed formulas."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from shardwise.layouts import is_wrapped
from shardwise.models.matrices import muon_dtype
from shardwise.planner.messages import Messages, Step
from shardwise.planner.units import flat_parameters, flat_spans, left_whole, units_of
from shardwise.planner.weights import Weight


def _ddp(step: Step) -> Iterator[Messages]:
    """Yield the sums of all trained gradients, once a step: by torch's wrapper one for each dtype
    of weights, while the last backward runs.
    """
    if not is_wrapped(step.cfg, (weight.itemsize for weight in step.share.trained)):
        yield from sums_over_copies(step, step.share.trained)
        return
    num_bytes = sum(4 * weight.numel for weight in step.share.trained)
    calls = _num_dtypes(step.share.trained)
    yield Messages("all-reduce", step.replica_axis, calls, num_bytes, when="last backward")


def _zero(step: Step) -> Iterator[Messages]:
    """Yield the reduce-scatter of trained gradients, once a step or, in stage 2, a micro-batch, and
    the all-gather of the updated weights, one of each for each dtype of weights.
    """
    times = 1 if step.cfg.parallel.data == "zero1" else step.num_microbatches
    sharded = [weight for weight in step.share.trained if weight.shard_dim is not None]
    for weights in _dense_and_experts(sharded):
        axis, num_dtypes = step.data_axis(weights[0]), _num_dtypes(weights)
        num_bytes = times * _float32_bytes(weights)
        yield Messages("reduce-scatter", axis, times * num_dtypes, num_bytes)
        yield Messages("all-gather", axis, num_dtypes, _weight_bytes(weights))
    unsharded = [weight for weight in step.share.trained if weight.shard_dim is None]
    yield from sums_over_copies(step, unsharded)


def _fsdp1(step: Step) -> Iterator[Messages]:
    """Yield, per micro-batch, what fsdp2 sends, of flat parameters.

    A unit with nothing trained in it or below is not gathered for a backward, nor is the outer
    flat parameter of the root, which stays gathered.
    """
    n, m = step.size(step.shard_axis), step.num_microbatches
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
            num_bytes *= gathers
            yield Messages("all-gather", step.shard_axis, gathers, num_bytes, when="layers")
            if any(weight.is_trained for weight in weights):
                yield Messages("reduce-scatter", step.shard_axis, m, m * 4 * numel, when="layers")
    yield from sums_over_copies(step, left_whole(step.cfg, chunk))


def _fsdp2(step: Step) -> Iterator[Messages]:
    """Yield, per micro-batch and unit, an all-gather for the forward, another one for the backward,
    and the reduce-scatter of trained gradients, whose shards are summed over replicas once a step.
    Experts that `ep` spreads have messages of their own, in the same unit.

    The backward ends at the lowest unit with something trained, and has gathered the unit below it
    ahead: where the lowest unit has one message, only the last one of the unit below. In a pipeline
    gradients are reduce-scattered once a step, and a backward leaves the weights gathered for what
    comes next: they are gathered at first, and after every forward.
    """
    m, in_pipeline = step.num_microbatches, step.sizes["pp"] > 1
    for chunk in step.share.chunks:
        unsharded = left_whole(step.cfg, chunk)
        units = units_of(chunk, "fsdp2")
        groups = [
            _dense_and_experts(weight for weight in unit.weights if weight not in unsharded)
            for unit in units
        ]
        lowest = 0
        if not chunk.needs_input_gradient:
            lowest = next((i for i, unit in enumerate(units) if unit.trained), len(units) + 1)
        for i, unit in enumerate(units):
            is_freed = step.cfg.parallel.reshard_after_forward and not unit.is_kept
            for weights in groups[i]:
                is_ahead = i == lowest - 1 and (len(groups[lowest]) > 1 or weights is groups[i][-1])
                backward_gathers = m if is_freed and (i >= lowest or is_ahead) else 0
                stays_gathered = in_pipeline and (backward_gathers or not is_freed)
                gathers = (1 if stays_gathered else m) + backward_gathers
                axis = step.data_axis(weights[0])
                num_bytes = gathers * _weight_bytes(weights)
                yield Messages("all-gather", axis, gathers, num_bytes, when="layers")
                if trained := [weight for weight in weights if weight.is_trained]:
                    num_bytes, shard = (size := _float32_bytes(trained)), size // step.size(axis)
                    times, when, at_last = m, "layers", "last backward"
                    if in_pipeline:
                        times, when, at_last = 1, "waited", "waited"
                    num_bytes *= times
                    yield Messages("reduce-scatter", axis, times, num_bytes, when=when)
                    yield Messages("all-reduce", step.replica_axis, 1, shard, when=at_last)
        yield from sums_over_copies(step, unsharded)
        if step.cfg.optimizer.name == "muon":
            yield from _gathered_updates(step, [w for w in chunk.weights if w not in unsharded])


def _gathered_updates(step: Step, weights: Iterable[Weight]) -> Iterator[Messages]:
    """Yield an all-gather of each matrix's momentum, in the dtype in which Muon multiplies.

    A stack that is cut between its experts is not gathered.
    """
    itemsize = muon_dtype(step.cfg.training.precision).itemsize
    for weight in weights:
        dim = weight.shard_dim
        is_cut = dim is not None and dim >= len(weight.shape) - 2
        if weight.is_selected and weight.is_trained and is_cut:
            num_bytes = weight.padded_numel * itemsize
            yield Messages("all-gather", step.data_axis(weight), 1, num_bytes)


DATA_FORMULAS: Mapping[str, Callable[[Step], Iterator[Messages]]] = {
    "ddp": _ddp,
    "zero1": _zero,
    "zero2": _zero,
    "fsdp1": _fsdp1,
    "fsdp2": _fsdp2,
}


def sums_over_copies(step: Step, weights: Iterable[Weight]) -> Iterator[Messages]:
    """Yield the sums of trained gradients over all ranks with the same part of them, once a step.

    Those of dense weights have one message for each axis, those of experts another.
    """
    for trained in _dense_and_experts(weight for weight in weights if weight.is_trained):
        for axis in step.copy_axes(trained[0]):
            yield Messages("all-reduce", axis, 1, sum(4 * weight.numel for weight in trained))


def _dense_and_experts(weights: Iterable[Weight]) -> list[list[Weight]]:
    """Return the weights that `ep` leaves whole, and those of experts, which go by themselves.

    The first weight's group comes first, as where torch gathers a unit.
    """
    groups: dict[bool, list[Weight]] = {}
    for weight in weights:
        groups.setdefault(weight.ep_dim is None, []).append(weight)
    return [*groups.values()]


def _num_dtypes(weights: Iterable[Weight]) -> int:
    """Return how many dtypes weights have; those of two dtypes share no bucket."""
    return len({weight.itemsize for weight in weights})


def _weight_bytes(weights: Iterable[Weight]) -> int:
    """Return the bytes of weights, each padded to equal shards, in its dtype."""
    return sum(weight.itemsize * weight.padded_numel for weight in weights)


def _float32_bytes(weights: Iterable[Weight]) -> int:
    """Return the bytes of the weights' gradients in float32, each padded to equal shards."""
    return sum(4 * weight.padded_numel for weight in weights)
