"""The layouts that a run may have on a cluster: every one that no rule refuses.

A candidate is a small tuple, which becomes a run file only if `search.py` takes a closer look.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import product
from math import inf
from typing import Any, Literal, NamedTuple

from shardwise.assembly.costs import counted_costs
from shardwise.assembly.describe import Description, describe
from shardwise.base.layouts import Facts, ModelFacts, parallel_of, replicated
from shardwise.base.schedule.costs import Cost
from shardwise.config import Parallel, RunConfig, UserError, require, rules
from shardwise.lab.planner import HERE
from shardwise.lab.planner.choices import Recomputed, as_checkpointing, hashable
from shardwise.lab.planner.cluster import Cluster
from shardwise.lab.planner.divisions import (
    Division,
    divisors,
    is_meant,
    layout_name,
    with_two_ranks,
)
from shardwise.lab.planner.memory import require_memory
from shardwise.models.alike import counts_of, first_alike
from shardwise.models.counts import ModelCounts
from shardwise.models.dtypes import product_dtype
from shardwise.parallel.strategies import STRATEGIES

SCHEDULES = (("1f1b", 1), ("interleaved-1f1b", 2), ("interleaved-1f1b", 4), ("zbv", 2))
"""Schedules that are tried, each with its stages per rank. gpipe and looped-bfs have the bubble of
1f1b and of interleaved-1f1b, and keep more activations."""
RECOMPUTATION = ("none", "operators", "full")
"""From the fastest and largest to the slowest and smallest."""


@dataclass(frozen=True)
class Question:
    """A run whose layout is open, and the devices that it may use."""

    cfg: RunConfig
    cluster: Cluster
    fixed: frozenset[str] = frozenset()
    """Keys that stay as the run file has them, such as `parallel.tp`."""
    wanted: Mapping[str, tuple[int, ...]] | None = None
    """The parts of the only layout in question, each with its sizes, () where they are open."""

    @property
    def num_ranks(self) -> int:
        """Devices, each of which has a rank."""
        return self.cluster.num_devices

    @property
    def device_type(self) -> Literal["cpu", "cuda"]:
        """Whose kernels a rank runs."""
        if (calibration := self.cluster.calibration) is not None:
            return calibration.device
        return "cpu" if self.cluster.device.name == "CPU-core" else "cuda"

    def is_short_of_memory(self, candidate: "Candidate") -> bool:
        """Return whether a candidate takes time for memory: by itself it computes layers again, or
        offloads.
        """
        for key, value in (
            ("training.checkpointing", candidate.recomputation),
            ("parallel.offload", candidate.offload),
        ):
            if value != "none" and key not in self.fixed:
                return True
        return False

    def values(self, key: str, offered: Any) -> Any:
        """Return the values of a key that are tried: those offered, or the one that is fixed."""
        section, _, name = key.partition(".")
        return (getattr(getattr(self.cfg, section), name),) if key in self.fixed else offered


class Candidate(NamedTuple):
    """A division of the devices, and how a rank works in it."""

    division: Division
    schedule: str
    num_virtual: int
    is_resharded: bool
    offload: str
    micro_batch_size: int
    recomputation: Recomputed
    """A choice, the kinds of layers that are recomputed, or layers by number or by a budget."""
    split: tuple[int, ...] | None = None
    """Layers of each stage of a pipeline. None: as the run file says, or evenly."""

    def run_file(self, question: Question) -> RunConfig:
        """Return the run under this layout."""
        cfg, is_pipeline = question.cfg, self.division.pp > 1
        given = cfg.parallel
        limit = given.memory_limit_gib
        is_given = isinstance(limit, list) and len(limit) == self.division.pp
        is_given |= is_pipeline and isinstance(limit, float | int)
        has_speeds = is_pipeline and len(given.speeds or ()) == self.division.pp
        parallel = replace(
            self.division.parallel(given),
            # Keys that need an axis or a split have no meaning without it.
            memory_limit_gib=limit if is_given and "parallel.split" in question.fixed else None,
            speeds=given.speeds if has_speeds else None,
            cp_attention=given.cp_attention if self.division.cp > 1 else "auto",
            fsdp1_wrap=given.fsdp1_wrap if self.division.strategy.is_flat else "separate",
            schedule=self.schedule,
            virtual_stages=self.num_virtual if is_pipeline and self.num_virtual > 1 else None,
            split=question.values("parallel.split", ["uniform" if is_pipeline else "balanced"])[0],
            reshard_after_forward=self.is_resharded,
            offload=self.offload,
        )
        training = replace(
            cfg.training,
            micro_batch_size=self.micro_batch_size,
            checkpointing=as_checkpointing(self.recomputation),
        )
        return replace(cfg, parallel=parallel, training=training)


@dataclass(frozen=True)
class Subject:
    """A model, and what is computed of it once for all candidates."""

    run: Description
    facts: ModelFacts
    counts: ModelCounts
    units: tuple[Cost, ...]
    """Costs of one row, without recomputation; seconds are FLOPs."""

    @property
    def weight_bytes(self) -> float:
        """Bytes of all weights. A tied one, which counts at either end, counts once."""
        is_tied = self.facts.is_tied
        return self.total("weight_bytes") - (self.units[0].weight_bytes if is_tied else 0)

    def total(self, name: str) -> float:
        """Return the sum of a field of `Cost` over the units."""
        return sum(getattr(unit, name) for unit in self.units)


def subject_of(question: Question) -> Subject:
    """Read a model on meta; UserError where no layout of it can be planned."""
    cfg = question.cfg
    require_memory(cfg)
    _require_calibrated(question)
    training = replace(
        cfg.training,
        micro_batch_size=1,
        checkpointing="none",
        device="auto",
        check_copies_every=0,  # on one process there are none
    )
    one = replace(cfg, parallel=Parallel(), training=training)
    run = describe(one, 1)
    facts = run.facts
    if not facts.is_listed:
        raise UserError(
            f"{cfg.model.path}: {facts.family} is not a family that shardwise knows, so that what "
            "its layers keep is not known; plan one that `shardwise models` lists"
        )
    facts = replace(facts, indivisible=cache(facts.indivisible), odd_blocks=cache(facts.odd_blocks))
    counts, alike = counts_of(run.hf, run.spec), first_alike(run.hf, run.spec, "none")
    device = question.device_type
    units = counted_costs(one, run.hf, run.spec, counts, device=device, alike=alike)
    return Subject(run, facts, counts, units)


def _require_calibrated(question: Question) -> None:
    """Raise UserError where another device was measured than the run asks for, or a GPU in another
    dtype, for which the planner has no rate.
    """
    wanted, measured = question.cfg.training.device, question.device_type
    if (calibration := question.cluster.calibration) is None:
        return
    require(
        wanted in ("auto", measured),
        f"--devices {HERE} was calibrated on {measured}, and training.device is {wanted}; run "
        f"shardwise calibrate --device {wanted}",
    )
    products = str(product_dtype(question.cfg)).removeprefix("torch.")
    require(
        measured == "cpu" or products in question.cluster.device.flops,
        f"--devices {HERE} was calibrated in {calibration.dtype}, and this run's products are in "
        f"{products}; set training.precision to {calibration.dtype} (plan: --precision "
        f"{calibration.dtype}), or give --devices with a name",
    )


@dataclass
class Space:
    """Every candidate of a question, and what the rules refuse on the way."""

    question: Question
    subject: Subject
    refused: dict[str, str] = field(default_factory=dict)
    """Layouts, and sizes of axes such as `tp:3`, with the message of the rule."""
    refused_choices: dict[str, str] = field(default_factory=dict)
    """Layouts that the rules allow, with a message on how a rank was to work in them."""
    offloads: tuple[str, ...] = ("none",)
    """Parts that may stay on the CPU. A search offers more only where nothing fits without."""

    def __post_init__(self) -> None:
        self._why_not = cache(self.why_no_layout)
        self._is_allowed = cache(self._is_small_one_allowed)

    def divisions(self) -> Iterator[Division]:
        """Yield every division of the devices that no rule refuses by its parts."""
        question = self.question
        num_ranks, rows = question.num_ranks, question.cfg.training.global_batch_size
        sizes = {axis: self._sizes(axis) for axis in ("pp", "cp", "tp", "ep")}
        for pp, cp, tp, ep in product(*sizes.values()):
            num_data = num_ranks // (pp * cp * tp)
            if num_data * pp * cp * tp != num_ranks or rows % num_data or num_data * cp % ep:
                continue
            offered = (True, False) if tp > 1 else (False,)
            for is_sequence in question.values("parallel.sequence_parallel", offered):
                for data, replicas in self._data(num_data, cp):
                    shards = num_data // replicas
                    division = Division(pp, data, replicas, shards, cp, ep, tp, is_sequence)
                    if self._is_open(division):
                        yield division

    def candidates(self, division: Division, most_rows: float = inf) -> Iterator[Candidate]:
        """Yield every way in which ranks may work in a division, with micro-batches of at most so
        many rows.
        """
        question, values = self.question, self.question.values
        rows = question.cfg.training.global_batch_size // division.num_data
        sizes = [2**power for power in range(rows.bit_length()) if rows % 2**power == 0]
        schedules = SCHEDULES if division.pp > 1 else (("1f1b", 1),)
        if "parallel.schedule" in question.fixed:
            parallel = question.cfg.parallel
            schedules = ((parallel.schedule, parallel.num_virtual),)
        may_keep = division.strategy.frees_weights
        for (schedule, num_virtual), reshards, offload, size, recomputation in product(
            schedules,
            values("parallel.reshard_after_forward", (True, False)[: 1 + may_keep]),
            values("parallel.offload", [o for o in self.offloads if o in division.offloads]),
            [size for size in values("training.micro_batch_size", sizes) if size <= most_rows],
            recomputations(question),
        ):
            if division.pp * num_virtual <= self.subject.facts.num_layers:
                yield Candidate(
                    division, schedule, num_virtual, reshards, offload, size, recomputation
                )

    def is_allowed(self, candidate: Candidate) -> bool:
        """Return whether the rules allow a candidate's choices with two ranks along each axis."""
        small = with_two_ranks(candidate.division)
        return self._is_allowed(candidate._replace(division=small, micro_batch_size=1))

    def _is_small_one_allowed(self, candidate: Candidate) -> bool:
        parallel = candidate.run_file(self.question).parallel
        num_ranks = parallel.ranks_of_a_model * candidate.division.num_data
        message = self.message(parallel, num_ranks, candidate.recomputation)
        if message is not None:
            self.refused_choices[layout_name(candidate.division)] = message
        return message is None

    def _sizes(self, axis: str) -> list[int]:
        """Return the sizes of an axis that divide the devices and that no rule refuses alone."""
        num_ranks, offered = self.question.num_ranks, []
        is_dense = axis == "ep" and not self.subject.facts.num_experts
        all_sizes = (1,) if is_dense else divisors(num_ranks)
        for size in self.question.values(f"parallel.{axis}", all_sizes):
            message = self.why_no_size(axis, size)
            if message is None:
                offered.append(size)
            else:
                self.refused[f"{axis}:{size}"] = message
        return offered

    def why_no_size(self, axis: str, size: int) -> str | None:
        """Return why a size of an axis is refused by itself, None if it is not."""
        alone = replicated() if axis == "ep" else Parallel()
        if axis == "pp" and size > 1:
            alone = replace(alone, schedule="gpipe")
        return self.message(replace(alone, **{axis: size}), size, has_copies=False)

    def _data(self, num_data: int, cp: int) -> Iterator[tuple[str, int]]:
        """Yield the data-parallel strategies over so many ranks, each with its replicas."""
        question = self.question
        is_offered = {
            None: num_data == 1,
            "dp_replicate": num_data > 1,
            "dp_shard": num_data * cp > 1,
        }
        searched = [strategy for strategy in STRATEGIES.values() if strategy.is_searched]
        offered = [strategy.name for strategy in searched if is_offered[strategy.axis]]
        # A rule refuses the key for replicas where a strategy has none beside its shards.
        has_replicas = question.values("parallel.dp_replicate", (1,)) != (1,)
        for data in question.values("parallel.data", offered):
            strategy = STRATEGIES[data]
            if strategy.with_replicas is not None:
                for replicas in question.values("parallel.dp_replicate", divisors(num_data)):
                    if num_data % replicas == 0 and (replicas == 1 or replicas < num_data * cp):
                        yield data, replicas
            elif (strategy.axis is None) == (num_data == 1) and not has_replicas:
                yield data, 1 if strategy.axis == "dp_shard" else num_data

    def _is_open(self, division: Division) -> bool:
        """Return whether a division is in question, and no rule refuses a layout of its name."""
        layout = layout_name(division)
        if self.question.wanted is not None and not is_meant(division, self.question.wanted):
            return False
        message = self._why_not(layout)
        if message is not None:
            self.refused[layout] = message
        return message is None

    def why_no_layout(self, layout: str) -> str | None:
        """Return why a layout is refused with two ranks along each axis, None if it is not."""
        parallel = parallel_of(layout)
        is_split = STRATEGIES[parallel.data].axis is not None
        data_ranks = 2 * parallel.dp_replicate if is_split else 1
        return self.message(parallel, parallel.ranks_of_a_model * data_ranks)

    def message(
        self,
        parallel: Parallel,
        num_ranks: int,
        recomputation: Any = "none",
        has_copies: bool = True,
    ) -> str | None:
        """Return the first refusal of the run under a small layout, with rows for every rank.

        `has_copies`: whether the layout is complete, so that there is something to compare where
        the run compares copies.
        """
        cfg = self.question.cfg
        # As few rows as every schedule takes: a step has a limit of tokens.
        num_micro = 1 if parallel.schedule == "gpipe" else 2 * parallel.pp
        training = replace(
            cfg.training,
            micro_batch_size=1,
            global_batch_size=num_micro * num_ranks // parallel.ranks_of_a_model,
            checkpointing=as_checkpointing(recomputation),
            check_copies_every=cfg.training.check_copies_every if has_copies else 0,
        )
        probe = replace(self.question.cfg, parallel=parallel, training=training)
        refused = rules.refusals(probe, Facts(num_ranks, self.subject.facts))
        return next((message for _, message in refused), None)


def recomputations(question: Question) -> tuple[Recomputed, ...]:
    """Return the choices of recomputation that are tried."""
    return tuple(map(hashable, question.values("training.checkpointing", RECOMPUTATION)))
