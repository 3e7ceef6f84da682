"""The seconds of a training step, by part, on a cluster: a preset or this machine as calibrated.

Units are priced by `unit_time.py`, and messages are those of `communication.py`, over the slowest
link of their axis. A pipeline goes through the simulator.

Overlap: on a GPU, the gradient sums of ddp and those over the replicas of hsdp overlap with the
backward of the last micro-batch, and FSDP's gathers and scatters overlap with the layers. A rank
waits for messages of ZeRO, tp, cp and ep, and for those that follow the last backward. In a
pipeline, other stages wait for those of tp, cp and ep too. On a CPU, gloo's threads take time from
the one thread that computes, so nothing overlaps.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import NamedTuple, get_args

from shardwise.assembly.describe import Description
from shardwise.base.layouts import EXPERT_AXES, num_microbatches, strategy_facts
from shardwise.base.schedule.costs import Cost
from shardwise.base.schedule.simulate import step_seconds
from shardwise.config import RunConfig
from shardwise.lab.planner.calibration import FACTORS
from shardwise.lab.planner.cluster import Cluster, efficiency
from shardwise.lab.planner.communication import data_messages, step_of, within_layers
from shardwise.lab.planner.messages import Share, Total, add_up
from shardwise.lab.planner.share import Shares
from shardwise.lab.planner.unit_time import UnitSeconds, between, seconds_of_units
from shardwise.lab.planner.update import moved_bytes
from shardwise.models.alike import first_alike
from shardwise.models.dtypes import hidden_dtype
from shardwise.parallel.optimizers import update_rule_of
from shardwise.parallel.sent import When, ranks_along

RINGS = ("all-reduce", "all-gather", "reduce-scatter", "broadcast", "reduce")
"""Messages whose bytes go round all ranks."""
COPIED = ("all-gather", "reduce-scatter")
"""Messages of whose tensors FSDP and ZeRO make one and take it apart."""
ADAMW_BYTES = 10 * 4
"""Bytes that AdamW moves of an element in float32, with the gradient norm and clipping."""

HOST_MEMORY_BANDWIDTH = 5e10
"""Bytes per second of a rank's share of its host's memory, where an offloaded optimizer works:
assumed."""


@dataclass(frozen=True)
class StepTime:
    """The seconds of a step by part, on the rank that all others wait for."""

    layers: float = 0.0
    """Forward and backward of the embedding and the layers."""
    head: float = 0.0
    """Final norm, head and loss, forward and backward."""
    recomputation: float = 0.0
    reference: float = 0.0
    """Forwards without a backward, as of the model that a loss of pairs compares with, and half of
    what is sent in layers: between stages all of it waits for the first one to come through."""
    communication: float = 0.0
    """Messages that nothing hides."""
    bubble: float = 0.0
    """A rank of a pipeline waits, for others or for messages between stages."""
    host: float = 0.0
    """A GPU waits for its host, which queues its work more slowly than it is done. On presets each
    operator has one assumed price."""
    optimizer: float = 0.0
    data: float = 0.0
    """0: rows are read ahead while a step runs."""
    hidden_communication: float = 0.0
    """Messages that run while a rank computes: no part of the total."""
    elementwise: float = 0.0
    """Elementwise operators, which layers, head and recomputation count too. A calibration does not
    tell them from the rest."""

    @property
    def total(self) -> float:
        """The seconds of the step."""
        work = self.layers + self.head + self.recomputation + self.reference
        work += self.optimizer + self.data
        return work + self.communication + self.bubble + self.host


def time_of_step(
    cfg: RunConfig, run: Description, cluster: Cluster, run_shares: Shares | None = None
) -> StepTime:
    """Return the seconds of a step of the run; `run_shares`: the shares of its ranks."""
    num_ranks = prod(run.sizes.values())
    m = num_microbatches(cfg, num_ranks)
    run_shares = Shares(cfg, run) if run_shares is None else run_shares
    units = seconds_of_units(cfg, run, cluster, num_ranks)
    others_busy = 1.0
    if run.pipeline is None:
        totals = [_messages(cfg, run, cluster, run_shares.of(0))]
        shares = [run_shares.of(0)]
        busiest, bubble = list(range(len(units))), 0.0
    else:
        boundaries = run_shares.boundaries
        assert boundaries is not None
        firsts = alike_ranks(cfg, run, boundaries)
        by_rank = {rank: _messages(cfg, run, cluster, run_shares.of(rank)) for rank in {*firsts}}
        shares, totals = [run_shares.of(rank) for rank in by_rank], [*by_rank.values()]
        waits = [by_rank[rank].within_layers / m for rank in firsts]
        busiest, bubble, others_busy = _pipeline(cfg, run, cluster, units, boundaries, waits)
        if cluster.calibration is not None:
            # While others wait, a rank computes nearly as fast as alone.
            alone = seconds_of_units(cfg, run, cluster, 1)
            pairs = zip(alone, units, strict=True)
            units = [between(*pair, others_busy) for pair in pairs]
            busiest, bubble, others_busy = _pipeline(cfg, run, cluster, units, boundaries, waits)
    messages = max(totals, key=sum)
    forwards = m * sum(units[i].forward for i in busiest)
    backwards = m * sum(units[i].backward for i in busiest)
    again = m * sum(units[i].recomputed for i in busiest)
    hidden = 0.0
    if not _is_cpu(cluster):
        hidden = min(messages.beside_layers, forwards + backwards)
        hidden += min(messages.last_backward, backwards / m, forwards + backwards - hidden)
    taken = hidden * cluster.device.assumed["taken_by_messages"] * (cluster.calibration is None)
    calibration = cluster.calibration
    jitter = others_busy * calibration.jitter if calibration and num_ranks > 1 else 0.0
    head = [i for i in busiest if i == len(units) - 1]
    reference = 0.0
    if cfg.num_evaluations:
        others = forwards / m * (run.sizes["pp"] - 1)
        reference = cfg.num_evaluations * (forwards + others + messages.within_layers / 2)
    return StepTime(
        layers=m * sum(units[i].forward + units[i].backward for i in busiest if i not in head),
        head=m * sum(units[i].forward + units[i].backward for i in head),
        recomputation=again,
        reference=reference,
        communication=max(0.0, sum(messages) - hidden) + taken + jitter * (forwards + backwards),
        bubble=bubble,
        host=_waits_for_host([units[i] for i in busiest], m),
        optimizer=max(_optimizer(cfg, run, cluster, share) for share in shares),
        hidden_communication=hidden,
        elementwise=m * sum(units[i].elementwise for i in busiest),
    )


def _waits_for_host(units: Sequence[UnitSeconds], num_microbatches: int) -> float:
    """Return the seconds of a step in which a GPU waits for its host, from first to last pass.

    Both begin together. The host queues one pass after the other, and none ends before it is queued
    as a whole. Of many micro-batches either the host or the GPU is the slower one in all but one.
    """
    passes = [(unit.forward, unit.host_forward) for unit in units]
    passes += [(unit.backward + unit.recomputed, unit.host_backward) for unit in reversed(units)]
    computed, queued = (sum(part) for part in zip(*passes, strict=True))
    one, left, queued_before = computed, computed, 0.0
    for seconds, host_seconds in passes:
        left -= seconds
        queued_before += host_seconds
        one = max(one, queued_before + left)
    return one - computed + (num_microbatches - 1) * max(0.0, queued - computed)


def alike_ranks(cfg: RunConfig, run: Description, boundaries: Sequence[int]) -> list[int]:
    """Return for each rank of a pipeline the first one that has like layers."""
    assert run.pipeline is not None
    alike = first_alike(run.hf, run.spec, cfg.training.checkpointing)
    kinds = ["embedding", *(str(alike[layer.name]) for layer in run.spec.layers), "head"]
    sorts: dict[tuple[tuple[str, ...], ...], int] = {}
    firsts = []
    for rank in range(run.pipeline.num_ranks):
        places = [boundaries[c : c + 2] for c in run.pipeline.chunks_of(rank)]
        rank_kinds = tuple(tuple(kinds[low:high]) for low, high in places)
        firsts.append(sorts.setdefault(rank_kinds, rank))
    return firsts


def _message(cluster: Cluster, kind: str, num_ranks: int, span: int, num_bytes: float) -> float:
    """Return the seconds of one message: a kind of `FACTORS`.

    `span`: neighbouring ranks among which its ranks lie.
    """
    if cluster.calibration is not None:
        return cluster.calibration.message_seconds(kind, num_ranks, num_bytes)
    # NCCL's rings use the ports of all ranks of a node that take part, as its authors say in
    # github.com/NVIDIA/nccl-tests/issues/277. Other messages leave through the sender's own port.
    ports = 1
    if kind.removesuffix(" of weights") in RINGS:
        ports = max(1, cluster.per_node * num_ranks // span)
    link = cluster.link_of(span, ports)
    latency = cluster.latency(kind, num_ranks, span)
    return latency + num_bytes * FACTORS[kind](num_ranks) / link.bandwidth


class MessageSeconds(NamedTuple):
    """The seconds of a rank's messages in a step, but those between stages."""

    within_layers: float
    """Messages of tp, cp and ep, and the few numbers of a step: they are waited for."""
    copies: float
    """Copies of what is gathered and scattered, which nothing hides: FSDP and ZeRO make them."""
    waited: float
    """Messages of data parallelism, while nothing is computed."""
    beside_layers: float
    last_backward: float


def _messages(cfg: RunConfig, run: Description, cluster: Cluster, share: Share) -> MessageSeconds:
    """Return the seconds of a rank's messages. Those between stages are the simulator's."""
    step = step_of(cfg, run, share)
    within = _message_seconds(add_up(within_layers(step)), cluster, step.sizes, "")
    data_parallelism = [*data_messages(step)]
    copies = 0.0
    if cluster.calibration is None and not _is_cpu(cluster):  # measured else
        copied = sum(m.num_bytes for m in data_parallelism if m.kind in COPIED)
        copies = 2 * copied / cluster.device.reached_bandwidth  # read and written
    waited, beside, last = (
        _message_seconds(
            add_up(message for message in data_parallelism if message.when == when),
            *(cluster, step.sizes, " of weights"),
        )
        for when in get_args(When)
    )
    beside += _over_host(cfg, run, cluster, share)
    return MessageSeconds(within, copies, waited, beside, last)


def _message_seconds(
    messages: Total, cluster: Cluster, sizes: Mapping[str, int], copies: str
) -> float:
    """Return the seconds of all messages but those between stages.

    `copies`: what the kinds of gathers and scatters are called that copy tensors besides.
    """
    seconds = 0.0
    for (kind, axis), (calls, num_bytes) in messages.items():
        if kind == "send" and axis == "pp":
            continue
        priced = kind
        if kind in COPIED:
            priced = f"{kind}{copies}"
        elif axis == "cp" and kind == "send":
            priced = "exchange"
        num_ranks, span = ranks_along(axis, sizes), _span(sizes, axis)
        seconds += calls * _message(cluster, priced, num_ranks, span, num_bytes / calls)
    return seconds


def _span(sizes: Mapping[str, int], axis: str) -> int:
    """Return among how many neighbouring ranks an axis lies: its own and those inside it.

    Ranks of `ep` are neighbours but for those of `tp`, and `dp_expert` lies outside of them.
    """
    inner = axis.removesuffix("_cp")
    names = [name for name in sizes if (name in EXPERT_AXES) == (inner in EXPERT_AXES)]
    span = prod(sizes[name] for name in names[names.index(inner) :])
    return span * sizes["tp"] if inner in EXPERT_AXES else span


def _is_cpu(cluster: Cluster) -> bool:
    """Return whether the devices are CPUs, which have no memory beside their host's."""
    return "bfloat16" not in cluster.device.flops


def _optimizer(cfg: RunConfig, run: Description, cluster: Cluster, share: Share) -> float:
    """Return the seconds of the update of a rank's shards, with the norm and clipping before it."""
    is_sharded = "optimizer" in strategy_facts(cfg.parallel).sharded
    numels = [(w, w.shard_numel(0) if is_sharded else w.numel) for w in share.trained]
    moved = moved_bytes(cfg, numels)
    flops, dtype = update_rule_of(cfg).products(cfg, share.trained)
    calibration, is_offloaded = cluster.calibration, cfg.parallel.offloads
    if calibration is not None and (_is_cpu(cluster) or not is_offloaded):
        per_tensor, per_element = calibration.for_busy(prod(run.sizes.values())).optimizer
        # It was measured with AdamW in float32, and with both.
        seconds = per_tensor * len(numels) + per_element * moved / ADAMW_BYTES
        return seconds + flops / calibration.best_rate
    if _is_cpu(cluster) or not is_offloaded:
        seconds = moved / cluster.device.reached_bandwidth
        rate = cluster.device.rate(dtype) * cluster.device.assumed["product"]
        return seconds + flops / rate
    update = moved / (HOST_MEMORY_BANDWIDTH * efficiency("memory"))
    if cfg.parallel.offload == "all":  # gradients and weights are there
        return update
    # Gradients go down, and updated weights come up.
    copied = sum(2 * number * weight.itemsize for weight, number in numels)
    return copied / cluster.host.bandwidth + update


def _over_host(cfg: RunConfig, run: Description, cluster: Cluster, share: Share) -> float:
    """Return the seconds in which shards that stay on the host come up to be gathered.

    Gradients go down after each backward.
    """
    if cfg.parallel.offload != "all" or _is_cpu(cluster):
        return 0.0
    m = num_microbatches(cfg, prod(run.sizes.values()))
    times = m * (2 if cfg.parallel.reshard_after_forward else 1)
    up = times * sum(w.shard_numel(0) * w.itemsize for w in share.weights)
    down = m * sum(w.shard_numel(0) * w.itemsize for w in share.trained)
    return (up + down) / cluster.host.bandwidth


def _pipeline(
    cfg: RunConfig,
    run: Description,
    cluster: Cluster,
    units: list[UnitSeconds],
    boundaries: Sequence[int],
    waits: Sequence[float],
) -> tuple[list[int], float, float]:
    """Return the units of the busiest rank, and the seconds of the step in which it waits for
    others.

    Then the share of the step in which the other ranks compute. `waits`: the seconds in which each
    rank waits for messages within the layers of a micro-batch, as many in each unit, half of them
    in the forward.
    """
    pipeline = run.pipeline
    assert pipeline is not None
    tokens = cfg.training.micro_batch_size * cfg.data.sequence_length // cfg.parallel.cp
    num_bytes = tokens * run.spec.hidden_size * hidden_dtype(cfg).itemsize
    message = _message(cluster, "send", 2, prod(run.sizes.values()), num_bytes)
    chunks: list[Cost] = []
    for chunk, (low, high) in enumerate(pairwise(boundaries)):
        rank = pipeline.rank_of(chunk)
        in_all = sum(boundaries[c + 1] - boundaries[c] for c in pipeline.chunks_of(rank))
        wait = waits[rank] * (high - low) / in_all
        backward = wait / 2 + sum(u.backward + u.recomputed for u in units[low:high])
        in_weight_half = sum(u.weight_gradients for u in units[low:high])
        chunks.append(
            Cost(
                name=f"units {low} to {high - 1}",
                forward_seconds=wait / 2 + sum(u.forward for u in units[low:high]),
                input_seconds=backward - in_weight_half,
                weight_seconds=in_weight_half,
                activation_bytes=0,
                output_bytes=num_bytes,
                output_seconds=message,
                backward=backward > 0,
            )
        )
    seconds, busy = step_seconds(pipeline, chunks)
    rank = busy.index(max(busy))
    places = [i for c in pipeline.chunks_of(rank) for i in range(boundaries[c], boundaries[c + 1])]
    num_ranks = prod(run.sizes.values())
    others = num_ranks // len(busy) * sum(busy) - busy[rank]
    return places, max(0.0, seconds - busy[rank]), others / (num_ranks - 1) / seconds
