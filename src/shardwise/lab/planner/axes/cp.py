"""Messages that the layers of a rank send under `parallel.cp`, by closed formulas.

A mixer sends in every forward and, where a gradient reaches its core, in every backward; activation
checkpointing sends what its forward sends once more. schedule/context.py counts the messages of one
mixer; a kind of block says what it passes on (`Kind.carries`).
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shardwise.assembly.describe import Description
from shardwise.base.schedule.context import (
    Sent,
    sent_by_attention,
    sent_by_convolution,
    sent_by_recurrence,
)
from shardwise.config import RunConfig
from shardwise.lab.planner.axes.axis import AxisMessages, Traffic
from shardwise.lab.planner.divisions import Division
from shardwise.lab.planner.messages import Step
from shardwise.metrics.flops import rerun_of
from shardwise.models.counts import Unit
from shardwise.models.dtypes import product_dtype
from shardwise.models.facts import context_facts
from shardwise.models.families import family_of
from shardwise.models.kinds.attention import Attention
from shardwise.models.kinds.base import Carried
from shardwise.models.names import in_use
from shardwise.models.router_loss import routers_of
from shardwise.models.spec import LayerSpec, ModelSpec
from shardwise.parallel.sent import Messages, sums_over_copies
from shardwise.parallel.strategies import strategy_of
from shardwise.parallel.weights import Weight

STATE_ITEMSIZE = 4
"""Bytes of an element of a recurrence's transition and state, whatever the precision."""


@dataclass(frozen=True)
class RankMixer:
    """A mixer as a rank of tensor parallelism has it."""

    carried: Carried
    width: int
    """Tokens that its convolution reaches over."""
    is_attention: bool
    window: int | None
    has_backward: bool
    """Whether a gradient flows back through its core."""
    is_rerun: bool
    """Whether the backward runs its forward again."""


def mixers_of(
    cfg: RunConfig, run: Description, layer: LayerSpec, unit: Unit, weights: Sequence[Weight]
) -> Iterator[RankMixer]:
    """Yield the mixers of a layer; `weights` are those of the layer on this rank."""
    hf, shapes = run.hf, {weight.name: weight.shape for weight in weights}
    # `operators` saves what comes out of products, but nothing of a collective.
    is_rerun = rerun_of(unit, cfg.training.checkpointing) != "none"
    for block in layer.mixers:
        path = f"{layer.name}.{block.path}"
        names = {
            name.removeprefix(f"{path}.").replace("base_layer.", ""): shape
            for name, shape in shapes.items()
            if name.startswith(f"{path}.")
        }
        cores = block.kind.cores(hf.config)
        yield RankMixer(
            carried=block.kind.carries(hf.config, names),
            width=block.kind.width(in_use(hf.get_submodule(path))),
            is_attention=block.kind.is_attention,
            window=next((core.window for core in cores if isinstance(core, Attention)), None),
            has_backward=unit.core_gradient,
            is_rerun=is_rerun,
        )


def experts_of_routers(cfg: RunConfig, hf: Any, spec: ModelSpec) -> tuple[int, ...]:
    """Return the experts of each router of a part that has a load-balancing loss."""
    if not cfg.model.router_aux_loss_coef:
        return ()
    prefixes = tuple(f"{layer.name}." for layer in spec.layers)
    routers = {id(router) for router in routers_of(hf, family_of(hf))}
    return tuple(
        module.weight.shape[0]
        for name, module in hf.named_modules()
        if id(module) in routers and name.startswith(prefixes)
    )


def sent_by_layers(
    cfg: RunConfig, hf: Any, spec: ModelSpec, mixers: Iterable[RankMixer], rank: int
) -> Iterator[Sent]:
    """Yield what rank `rank` of `cp` sends for these mixers in one micro-batch."""
    num_ranks, rows = cfg.parallel.cp, cfg.training.micro_batch_size
    tokens_per_row = cfg.data.sequence_length // num_ranks
    itemsize = product_dtype(cfg).itemsize
    facts = context_facts(hf, spec)
    way, cut = facts.way_and_cut(cfg.parallel)
    shape = facts.on_rank(cfg.parallel)
    for mixer in mixers:
        carried, parts = mixer.carried, list[tuple[Sent, Sent]]()
        if carried.channels:
            token_bytes = rows * carried.channels * itemsize
            parts.append(sent_by_convolution(mixer.width, token_bytes, rank, num_ranks))
        if carried.state_numel:
            sizes = rows * carried.transition_numel, rows * carried.state_numel
            parts.append(sent_by_recurrence(*sizes, STATE_ITEMSIZE, rank, num_ranks))
        if mixer.is_attention:
            assert shape is not None
            on_rank = replace(shape, num_tokens=rows * tokens_per_row, itemsize=itemsize)
            parts.append(sent_by_attention(on_rank, cut, rank, way, mixer.window, tokens_per_row))
        for forward, backward in parts:
            yield from [forward] * (1 + mixer.is_rerun)
            yield from [backward] * mixer.has_backward


def sent_by_router_loss(cfg: RunConfig, num_experts: Iterable[int]) -> Iterator[Sent]:
    """Yield the sums over `cp` of the router loss of a part in one forward.

    They are the target tokens of each row, and each row's choices of each expert, in float32.
    """
    if cfg.model.router_aux_loss_coef:
        for numbers_per_row in (1, *num_experts):
            yield {"all-reduce": (1, 4 * cfg.training.micro_batch_size * numbers_per_row)}


class ContextMessages(AxisMessages):
    """Ranks with some tokens of each row."""

    name = "cp"
    parts = staticmethod(mixers_of)

    def messages(self, step: Step) -> Iterator[Messages]:
        """Yield what layers and the router loss send along `cp` per micro-batch and, without a
        data-parallel strategy, the sum of all trained gradients once a step.
        """
        cfg, run, m = step.cfg, step.run, step.num_microbatches
        for chunk in step.share.chunks:
            mixers, num_experts = chunk.sending["cp"], experts_of_routers(cfg, run.hf, chunk.spec)
            layers = sent_by_layers(cfg, run.hf, run.spec, mixers, step.share.context_rank)
            for sent in (*layers, *sent_by_router_loss(cfg, num_experts)):
                for kind, (calls, num_bytes) in sent.items():
                    yield Messages(kind, "cp", m * calls, m * num_bytes)
        if strategy_of(cfg).axis is None:
            yield from sums_over_copies(step, step.share.trained)

    def seconds(self, traffic: Traffic, division: Division, is_again: bool) -> float:
        """See AxisMessages."""
        sent = 2 * (division.cp - 1) / division.cp * traffic.hidden_bytes / division.tp
        cluster, span = traffic.cluster, division.tp * division.cp
        seconds = sent / cluster.link_of(span).bandwidth
        seconds += 4 * cluster.latency("send", division.cp, span)
        return traffic.num_layers / division.pp * seconds
