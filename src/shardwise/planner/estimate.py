"""Cheap estimates that order candidates, and lower bounds of memory that reject them.

They know a model by a few sums over its units. Nothing that a user reads comes from here: what
survives is computed by `peak.py` and `step_time.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.models.expert_plan import experts_of
from shardwise.planner.candidates import Candidate, Division, Question, Subject
from shardwise.planner.cluster import Link

EFFICIENCY = 0.5
"""The share of the peak rate that is assumed of products."""
SECONDS_OF_A_LAYER = 2e-4
"""What starting the kernels of a layer's forward and backward takes."""
HOST_BANDWIDTH = 25e9
"""Bytes per second between a device and its host."""


@dataclass
class Estimates:
    """What candidates of one question take, roughly."""

    question: Question
    subject: Subject

    def __post_init__(self) -> None:
        cfg, device = self.question.cfg, self.question.cluster.device
        rates = device.flops
        precision = (
            "bfloat16" if "bfloat16" in (cfg.training.precision, cfg.model.dtype) else "float32"
        )
        self.rate = EFFICIENCY * rates.get(precision, max(rates.values()))
        self.rows = cfg.training.global_batch_size
        self.weights = self.subject.total("weight_bytes")
        self.gradients = self.subject.total("gradient_bytes")
        self.states = self.subject.total("optimizer_bytes")
        self.hidden = self.subject.units[1].output_bytes
        self.tied = (0, 0, 0)
        """The weights, gradients and states that embedding and head have in common, which count at
        either end."""
        if self.subject.facts.is_tied:
            end = self.subject.units[0]
            self.tied = end.weight_bytes, end.gradient_bytes, end.optimizer_bytes
        modules = [module for _, module in experts_of(self.subject.run.hf, self.subject.run.spec)]
        self.experts = sum({p: p.nbytes for m in modules for p in m.parameters()}.values())
        """Bytes of the weights that `ep` spreads."""
        self.largest = max(unit.weight_bytes for unit in self.subject.units)
        trained = sum(u.parameters for u in self.subject.units if u.trainable)
        is_lora = cfg.lora is not None
        self.reduced = 2 * self.gradients if is_lora else 4 * trained
        """Bytes of all gradients as they are summed, in float32."""

    def ring(self, num_ranks: int, inside: int = 1) -> Link:
        """Return the slowest link of a ring of ranks, each with so many neighbours inside it.

        Between nodes it goes through the ports of all its ranks in a node.
        """
        cluster = self.question.cluster
        return cluster.link_of(num_ranks * inside, max(1, cluster.per_node // inside))

    def state_bytes(self, division: Division, offload: str = "none") -> float:
        """Return a lower bound of the states on the fullest rank."""
        return sum(self._states(division, offload))

    def least_bytes(self, candidate: Candidate) -> float:
        """Return a lower bound of the memory of the fullest rank."""
        division, rows = candidate.division, candidate.micro_batch_size
        kept = self.subject.totals[str(candidate.recomputation)].kept
        # The first rank of a pipeline keeps as many micro-batches as there are stages.
        num_micro = self.rows / division.num_data / rows
        in_flight = min(1.0, num_micro / division.pp)
        activations = kept * rows * in_flight / (division.tp * division.cp)
        others, gradients = self._states(division, candidate.offload)
        is_sharded = division.data == "fsdp2" and division.shards * division.cp > 1
        if is_sharded and not candidate.is_resharded:
            others += (self.weights - self.tied[0] - self.largest) / division.pp / division.tp
        if division.pp > 1 or num_micro <= 1:
            # The first gradients come when no forward is left that keeps more.
            return others + max(gradients, activations)
        return others + gradients + activations

    def order_of_size(self, candidate: Candidate) -> tuple[float, int, bool]:
        """Return by what candidates are ordered that need little memory.

        Of equal bounds the schedule comes first that keeps least: the others have further chunks of
        micro-batches in flight.
        """
        return self.least_bytes(candidate), candidate.num_virtual, candidate.schedule == "zbv"

    def _states(self, division: Division, offload: str) -> tuple[float, float]:
        """Return lower bounds of the weights and optimizer states, and of the gradients."""
        local = division.pp * division.tp
        shards = division.num_data * division.cp
        if division.data == "fsdp2":
            shards = division.shards * division.cp
        tied = self.tied if division.pp == 1 else (0, 0, 0)
        weights, gradients, states = (
            total - double
            for total, double in zip((self.weights, self.gradients, self.states), tied, strict=True)
        )
        # Ranks of `ep` are among the shards. Of what these leave whole it spreads the experts.
        if division.data == "fsdp2":
            weights /= shards
        else:
            weights -= self.experts * (1 - 1 / division.ep)
        gradients /= shards if division.data in ("fsdp2", "zero2") else division.ep
        states /= shards if division.data in ("fsdp2", "zero1", "zero2") else division.ep
        if offload != "none":
            states = 0.0
        if offload == "all":
            weights = gradients = 0.0
        if division.data == "fsdp2" and shards > 1:
            weights += self.largest / division.pp / division.ep
        return (weights + states) / local, gradients / local

    def least_seconds(self, division: Division) -> float:
        """Return a lower bound of the estimates of a division's candidates."""
        flops = min(total.flops for total in self.subject.totals.values())
        return flops * self.rows / self.question.num_ranks / self.rate + self._tensor(division, 4)

    def seconds(self, candidate: Candidate) -> float:
        """Return roughly how long a step takes."""
        division, size = candidate.division, candidate.micro_batch_size
        num_micro = max(1, self.rows // (division.num_data * size))
        total = self.subject.totals[str(candidate.recomputation)]
        compute = total.flops * self.rows / self.question.num_ranks / self.rate
        num_layers = len(self.subject.units) / division.pp
        compute += num_micro * num_layers * SECONDS_OF_A_LAYER
        tensor = self._tensor(division, 6 if candidate.recomputation == "full" else 4)
        halves = 3 if candidate.schedule == "zbv" else 1
        idle = (division.pp - 1) / (num_micro * candidate.num_virtual * halves)
        sent = self._data(candidate, num_micro)
        covering = compute if division.data == "fsdp2" else compute / num_micro
        if candidate.offload != "none":
            sent += self.states / (division.num_data * HOST_BANDWIDTH)
        return (compute + tensor) * (1 + idle) + max(0.0, sent - covering)

    def _tensor(self, division: Division, num_sums: int) -> float:
        """Return the seconds of what tensor and context parallelism send, with nothing beside."""
        rows, layers = self.rows / division.num_data, len(self.subject.units) / division.pp
        seconds = 0.0
        if division.tp > 1:
            sums = num_sums * 2 * (division.tp - 1) / division.tp * self.hidden / division.cp
            link = self.ring(division.tp)
            seconds += layers * rows * (sums / link.bandwidth + num_sums * link.latency)
        if division.cp > 1:
            sent = 2 * (division.cp - 1) / division.cp * self.hidden / division.tp
            link = self.question.cluster.link_of(division.tp * division.cp)
            seconds += layers * rows * (sent / link.bandwidth + 4 * link.latency)
        return seconds

    def _data(self, candidate: Candidate, num_micro: int) -> float:
        """Return the seconds of what data parallelism sends."""
        division = candidate.division
        local, together = division.pp * division.tp, division.num_data * division.cp
        link = self.ring(together, inside=division.tp)
        reduced = self.reduced / local
        if division.data != "fsdp2":
            times = num_micro if division.data == "zero2" else 1
            share = (together - 1) / together
            return (1 + times) * share * reduced / link.bandwidth
        shards = division.shards * division.cp
        inner = self.ring(shards, inside=division.tp)
        share = (shards - 1) / shards
        gathers = num_micro * (2 if candidate.is_resharded else 1)
        times = num_micro
        if division.pp > 1:
            times = 1
            gathers = gathers if candidate.is_resharded else 1
        inside = share * (gathers * self.weights / local + times * reduced) / inner.bandwidth
        replicas = division.replicas
        across = 2 * (replicas - 1) / replicas * reduced / shards / link.bandwidth
        num_messages = (gathers + times) * len(self.subject.units) / division.pp
        return inside + across + num_messages * inner.latency
