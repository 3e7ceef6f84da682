"""Cheap estimates that order candidates, and lower bounds of memory that reject them.

They know a model by a few sums over its units. Nothing that a user reads comes from here: what
survives is computed by `peak.py` and `step_time.py`.
"""

import math
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

from shardwise.base.layouts import axis_sizes, replicated
from shardwise.config import Parallel, RunConfig
from shardwise.lab.planner.axes import AXES
from shardwise.lab.planner.axes.axis import Traffic
from shardwise.lab.planner.candidates import Candidate, Question, Subject, recomputations
from shardwise.lab.planner.choices import Recomputed, as_checkpointing, is_budget
from shardwise.lab.planner.divisions import Division, layout_name, most_sharded
from shardwise.lab.planner.exact import usable_bytes
from shardwise.lab.planner.unit_time import seconds_of_units
from shardwise.lab.planner.units import memory_of_unit
from shardwise.models.alike import first_alike
from shardwise.models.dtypes import hidden_dtype, product_dtype
from shardwise.models.expert_plan import experts_of
from shardwise.models.quantise import as_stored
from shardwise.parallel.weights import are_few

ALIKE = 0.9
"""The least error of a layout's estimates over that of the few that were compared. It was chosen
with the questions of tools/plan_search.py in view, and decides nothing but what is computed."""


class Kept(NamedTuple):
    """Bytes that forwards keep for their backwards."""

    fixed: float
    """Bytes whatever the rows, such as weights that autocast has cast."""
    each: float
    """Bytes of each row of a micro-batch."""

    def of(self, rows: float) -> float:
        """Return the bytes of a micro-batch of so many rows."""
        return self.fixed + rows * self.each


@dataclass
class Estimates(Traffic):
    """Rough memory and time of the candidates of one question."""

    question: Question
    subject: Subject

    def __post_init__(self) -> None:
        cfg, run = self.question.cfg, self.subject.run
        self.num_layers = len(self.subject.units) - 2
        self.cluster = self.question.cluster
        bandwidth = self.cluster.device.reached_bandwidth
        self.adding_seconds = 3 * self.subject.total("gradient_bytes") / bandwidth
        """Seconds of adding the gradients of a micro-batch to a sum."""
        weight_seconds = self.subject.total("weight_seconds")
        self.left_idle = 1 - 2 * weight_seconds / self.subject.total("seconds")
        """The share of a pipeline's idle time that gradients of weights do not fill where they may
        come later: see docs/concepts/pipeline-parallelism.md."""
        self.choices = {str(c): c for c in ("none", *recomputations(self.question))}
        """The choices of recomputation by their texts."""
        self.rows = cfg.training.global_batch_size
        self.weight_bytes = self.subject.total("weight_bytes")
        self.gradient_bytes = self.subject.total("gradient_bytes")
        self.optimizer_bytes = self.subject.total("optimizer_bytes")
        layers = self.subject.units[1:-1]
        self.hidden_bytes = layers[0].output_bytes
        self.output_bytes = (
            self.hidden_bytes / hidden_dtype(cfg).itemsize * product_dtype(cfg).itemsize
        )
        self.tied_bytes = (0, 0, 0)
        """The weights, gradients and states that embedding and head have in common, which count at
        either end."""
        if self.subject.facts.is_tied:
            end = self.subject.units[0]
            self.tied_bytes = end.weight_bytes, end.gradient_bytes, end.optimizer_bytes
        modules = [m for _, m in experts_of(as_stored(run.hf, cfg.model.base), run.spec)]
        self.expert_bytes = sum({p: p.nbytes for m in modules for p in m.parameters()}.values())
        """Bytes of the weights that `ep` spreads."""
        top_k = run.hf.config.num_experts_per_tok if modules else 0
        self.routed_bytes = 2 * len(modules) * top_k * self.hidden_bytes
        self.largest_unit_bytes = max(unit.weight_bytes for unit in self.subject.units)
        trained = sum(u.parameters for u in self.subject.units if u.trainable)
        is_lora = cfg.lora is not None
        self.reduced_bytes = 2 * self.gradient_bytes if is_lora else 4 * trained
        """Bytes of all gradients as they are summed, in float32."""
        layers = [unit.weight_bytes for unit in self.subject.units[1:-1]]
        self.are_few = are_few(self.reduced_bytes, layers)
        self.time_errors: dict[tuple[str, bool], float] = {}
        """The least time that was computed of a candidate over its estimate, by `_sort_of`."""
        self.byte_errors: dict[tuple[str, bool, str], float] = {}
        """The least memory that was computed over its lower bound, also by the recomputation."""
        # Hundreds of candidates of a division ask for the same.
        self._states, self.work = cache(self._states_of), cache(self._seconds_of_work)
        self._row, self.kept = cache(self._seconds_of_a_row), cache(self._kept_of)

    def _seconds_of_a_row(self, choice: Recomputed, ep: int) -> tuple[float, float, float]:
        """Return the seconds of a row in all layers, and in the head, on one device, and those of
        its host.

        `ep`: it has so many devices' tokens for its share of the experts, whose weights it reads as
        often as those of all experts for its own.
        """
        question, run = self.question, self.subject.run
        # A budget chooses layers that take as long as if nothing was computed again, or longer.
        checkpointing = "none" if is_budget(choice) else as_checkpointing(choice)
        training = replace(
            question.cfg.training,
            micro_batch_size=1,
            checkpointing=checkpointing,
            global_batch_size=ep,  # one micro-batch, which is added to nothing
        )
        parallel = replace(replicated(), ep=ep) if ep > 1 else Parallel()
        one = replace(question.cfg, parallel=parallel, training=training)
        run = replace(run, sizes=axis_sizes(one, ep))
        units = seconds_of_units(one, run, question.cluster, question.cluster.num_devices)
        *layers, head = (unit.total for unit in units)
        return sum(layers), head, sum(unit.host_forward + unit.host_backward for unit in units)

    def state_bytes(self, division: Division, offload: str = "none") -> float:
        """Return a lower bound of the states on the fullest rank."""
        return sum(self._states(division, offload))

    def least_bytes(self, candidate: Candidate) -> float:
        """Return a lower bound of the memory of the fullest rank."""
        division, rows = candidate.division, candidate.micro_batch_size
        num_micro = self.rows / division.num_data / rows
        activations = self._activations(division, candidate.recomputation, num_micro).of(rows)
        others, gradients = self._states(division, candidate.offload)
        is_sharded = "weights" in division.strategy.sharded and division.num_sharing > 1
        gathered, has_stages = 0.0, division.pp > 1
        # torch's stage of a pipeline never frees what it has gathered.
        if is_sharded and (has_stages or not candidate.is_resharded):
            is_whole = division.ep == division.num_sharing  # each rank has its experts
            experts = 0 if is_whole else self.expert_bytes / division.ep
            whole = self.weight_bytes - self.tied_bytes[0] - self.expert_bytes + experts
            gathered = (whole - self.largest_unit_bytes) / division.pp / division.tp
            if candidate.is_resharded:  # a forward frees a unit as it keeps its activations
                gathered = max(0.0, gathered - activations / min(division.pp, num_micro))
        if num_micro > division.pp:
            return others + gathered + gradients + activations
        # The first gradients come when no forward is left, and without a pipeline a backward frees
        # what was gathered.
        if not has_stages:
            return others + max(gradients, gathered + activations)
        return others + gathered + max(gradients, activations)

    def most_rows(self, division: Division, offload: str) -> float:
        """Return an upper bound of the rows of a micro-batch that fits, as far as bounds tell."""
        others, _ = self._states(division, offload)
        free = usable_bytes(self.question) - others
        ways = [self._activations(division, choice, 1.0) for choice in self.choices.values()]
        return max((free - kept.fixed) / kept.each if kept.each else math.inf for kept in ways)

    def _activations(self, division: Division, recomputation: Recomputed, num_micro: float) -> Kept:
        """Return a lower bound of what the forwards of the fullest rank keep."""
        training, tp, hidden = self.question.cfg.training, division.tp, self.hidden_bytes
        if training.offload_activations and self.question.device_type == "cuda":
            return Kept(0.0, 0.0)
        kept, _ = self.kept(str(recomputation), division.cp)
        share = self._in_flight(division.pp, num_micro)
        # Without sequence parallelism every rank of `tp` keeps all of a layer's input. The first
        # layer may keep none.
        inputs = 0.0 if division.is_sequence else hidden / division.cp * (self.num_layers - 1)
        inputs = min(kept.each, inputs)
        fixed = share * kept.fixed / tp
        each = share * (inputs + (kept.each - inputs) / tp)
        if recomputation == "full":  # its first backward computes a layer again, but its input
            _, layer = self.kept("none", division.cp)
            fixed += layer.fixed / tp
            each += max(0.0, layer.each - hidden / division.cp) / tp
        return Kept(fixed, each)

    def _kept_of(self, recomputation: str, cp: int) -> tuple[Kept, Kept]:
        """Return what all units but the head keep on a rank of `cp`, and each layer at least.

        The head takes few rows at a time where many would be large.
        """
        cfg, choice = self.question.cfg, self.choices[recomputation]
        # What a budget chooses keeps as much as if all was computed again, or more.
        checkpointing = "full" if is_budget(choice) else as_checkpointing(choice)
        parallel = Parallel(cp=cp, cp_attention=cfg.parallel.cp_attention)
        device = self.question.device_type
        training = replace(cfg.training, checkpointing=checkpointing, device=device)
        one_row, two_rows = (
            self._kept_by_units(
                replace(cfg, parallel=parallel, training=replace(training, micro_batch_size=rows))
            )
            for rows in (1, 2)
        )
        each = [two - one for one, two in zip(one_row, two_rows, strict=True)]
        fixed = [one - row for one, row in zip(one_row, each, strict=True)]
        return Kept(sum(fixed), sum(each)), Kept(min(fixed[1:]), min(each[1:]))

    def _kept_by_units(self, cfg: RunConfig) -> list[int]:
        """Return the bytes that each unit but the head keeps; of like layers one is looked at."""
        run, found = self.subject.run, dict[object, int]()
        alike = first_alike(run.hf, run.spec, cfg.training.checkpointing)
        kept = [memory_of_unit(cfg, run.hf, run.spec, 0).kept]
        for place, layer in enumerate(run.spec.layers, 1):
            key = alike[layer.name], self.subject.counts.units[place - 1].backward
            if key not in found:
                found[key] = memory_of_unit(cfg, run.hf, run.spec, place).kept
            kept.append(found[key])
        return kept

    def _in_flight(self, pp: int, num_micro: float) -> float:
        """Return how many micro-batches a rank keeps at least, times its share of the layers.

        The first stages of a pipeline keep most: as many as there are stages from them on. The ends
        may have a layer less than the others, for the embedding and the head. A stage is taken to
        have layers of the average size.
        """
        if pp == 1:
            return 1.0
        each = (self.num_layers + 2) // pp
        second = each * min(pp - 1, num_micro) if pp > 2 else 0
        return max((each - 1) * min(pp, num_micro), second) / self.num_layers

    def order_of_size(self, candidate: Candidate) -> tuple[float, int, bool]:
        """Return by what candidates are ordered that need little memory.

        Of equal bounds the schedule comes first that keeps least: the others have further chunks of
        micro-batches in flight.
        """
        return self.least_bytes(candidate), candidate.num_virtual, candidate.schedule == "zbv"

    def _states_of(self, division: Division, offload: str) -> tuple[float, float]:
        """Return lower bounds of the weights and optimizer states, and of the gradients."""
        local = division.pp * division.tp
        shards, sharded = division.num_sharing, division.strategy.sharded
        tied = self.tied_bytes if division.pp == 1 else (0, 0, 0)
        weights, gradients, states = (
            total - double
            for total, double in zip(
                (self.weight_bytes, self.gradient_bytes, self.optimizer_bytes), tied, strict=True
            )
        )
        # Ranks of `ep` are among the shards. Of what these leave whole it spreads the experts.
        if "weights" in sharded:
            weights /= shards
        else:
            weights -= self.expert_bytes * (1 - 1 / division.ep)
        gradients /= self._shards_of_gradients(division)
        states /= shards if "optimizer" in sharded else division.ep
        if offload != "none":
            states = 0.0
        if offload == "all":
            weights = gradients = 0.0
        if "weights" in sharded and shards > division.ep:
            weights += self.largest_unit_bytes / division.pp / division.ep
        return (weights + states) / local, gradients / local

    def least_seconds(self, division: Division) -> float:
        """Return a lower bound of the estimates of a division's candidates.

        What is computed again takes no time away.
        """
        return sum(self.work(division, "none"))

    def seconds(self, candidate: Candidate) -> float:
        """Return roughly how long a step takes."""
        division, size = candidate.division, candidate.micro_batch_size
        num_micro = max(1, self.rows // (division.num_data * size))
        computed, within = self.work(division, str(candidate.recomputation))
        *_, host = self._row(self.choices[str(candidate.recomputation)], division.ep)
        computed = max(computed, num_micro * host / division.pp)
        idle = (division.pp - 1) / (num_micro * candidate.num_virtual)
        if candidate.schedule == "zbv":
            idle *= self.left_idle
        sent = self._data(candidate, num_micro)
        is_sharded = "weights" in division.strategy.sharded
        covering = computed if is_sharded else computed / num_micro
        if candidate.offload != "none":
            shards = division.num_sharing if is_sharded else 1
            copied = self.optimizer_bytes / (division.pp * division.tp * shards)
            sent += copied / self.question.cluster.host.bandwidth
        added = (num_micro - 1) * self.adding_seconds / division.pp / division.tp
        added /= self._shards_of_gradients(division)
        return (computed + within) * (1 + idle) + added + max(0.0, sent - covering)

    def compare(self, candidate: Candidate, num_bytes: float, seconds: float | None) -> None:
        """Take note of a memory that was computed exactly, and of a time where it was, too."""
        sort, choice = _sort_of(candidate), str(candidate.recomputation)
        _lower(self.byte_errors, (*sort, choice), num_bytes / self.least_bytes(candidate))
        if seconds is not None:
            _lower(self.time_errors, sort, seconds / self.seconds(candidate))

    def may_beat(self, candidate: Candidate, seconds: float) -> bool:
        """Return whether a candidate may fit and take no more than so many seconds.

        The errors of the estimates that were compared decide. Those of one layout are alike, within
        ALIKE, and so are those of its memory for one choice of recomputation.
        """
        sort, choice = _sort_of(candidate), str(candidate.recomputation)
        least = min(self.time_errors.values(), default=1.0)
        known = self.time_errors.get(sort)
        if (least if known is None else ALIKE * known) * self.seconds(candidate) > seconds:
            return False
        error = max(1.0, ALIKE * self.byte_errors.get((*sort, choice), 1.0))
        return error * self.least_bytes(candidate) <= usable_bytes(self.question)

    def _seconds_of_work(self, division: Division, recomputation: str) -> tuple[float, float]:
        """Return the seconds of a rank in its layers, and in messages that it waits for there."""
        layers, head, _ = self._row(self.choices[recomputation], division.ep)
        if division.pp > 1:  # the last stage has a layer less, in place of the head
            head = max(0.0, head - layers / self.num_layers)
        seconds = (layers / division.pp + head) / division.tp / division.cp
        is_again = recomputation == "full"
        axes = (axis for axis in AXES if getattr(division, axis.name) > 1)
        within = sum(axis.seconds(self, division, is_again) for axis in axes)
        rows = self.rows / division.num_data
        return rows * seconds, rows * within

    def _data(self, candidate: Candidate, num_micro: int) -> float:
        """Return the seconds of what data parallelism sends."""
        division = candidate.division
        local, together = division.pp * division.tp, division.num_data * division.cp
        link = self.ring(together, inside=division.tp)
        reduced, weights = self.reduced_bytes / local, self.weight_bytes / local
        if division.ep > 1:  # a rank gathers no experts but its own
            share = 1 - self.expert_bytes / self.weight_bytes * (1 - 1 / division.ep)
            reduced, weights = share * reduced, share * weights
        if "weights" not in division.strategy.sharded:
            times = num_micro if self._is_reduced_in_each(division) else 1
            share = (together - 1) / together
            return (1 + times) * share * reduced / link.bandwidth
        shards = division.num_sharing
        inner = self.ring(shards, inside=division.tp)
        share = (shards - 1) / shards
        gathers = num_micro * (2 if candidate.is_resharded else 1)
        times = num_micro if self._is_reduced_in_each(division) else 1
        if division.pp > 1:
            gathers = gathers if candidate.is_resharded else 1
        inside = share * (gathers * weights + times * reduced) / inner.bandwidth
        replicas = division.replicas
        across = 2 * (replicas - 1) / replicas * reduced / shards / link.bandwidth
        num_messages = (gathers + times) * len(self.subject.units) / division.pp
        latency = self.cluster.latency("all-gather", shards, shards * division.tp)
        return inside + across + num_messages * latency

    def _shards_of_gradients(self, division: Division) -> int:
        """Return among how many ranks gradients are divided as they are added up."""
        return division.num_sharing if self._is_reduced_in_each(division) else division.ep

    def _is_reduced_in_each(self, division: Division) -> bool:
        """Return whether each backward of a micro-batch reduces its gradients."""
        return division.strategy.reduces_each(division.pp, self.are_few)


def _sort_of(candidate: Candidate) -> tuple[str, bool]:
    """Return what candidates have in common whose estimates are alike in their errors: the layout,
    and whether gathered weights are freed.
    """
    return layout_name(most_sharded(candidate.division)), candidate.is_resharded


def _lower(least: dict[Any, float], key: Any, value: float) -> None:
    """Keep a value that is the least of its key so far."""
    least[key] = min(value, least.get(key, value))
