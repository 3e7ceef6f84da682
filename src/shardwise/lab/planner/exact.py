"""The memory and the time of a candidate, by `peak.py` and `step_time.py`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import pairwise
from math import floor
from typing import Any, Literal

from shardwise.assembly.costs import choose_split, counted_costs
from shardwise.assembly.describe import Description
from shardwise.base.layouts import ALONE, Facts, axis_sizes, data_parts, num_microbatches
from shardwise.base.words import counted, runs
from shardwise.config import Recomputation, RunConfig, UserError, rules
from shardwise.lab.planner import HERE
from shardwise.lab.planner.candidates import Candidate, Question, Subject, subject_of
from shardwise.lab.planner.choices import hashable
from shardwise.lab.planner.communication import unknown
from shardwise.lab.planner.divisions import division_of, layout_name, title
from shardwise.lab.planner.memory import USABLE, PeakBytes
from shardwise.lab.planner.peak import memory_of_share
from shardwise.lab.planner.recompute import as_way, within_budget
from shardwise.lab.planner.share import Shares
from shardwise.lab.planner.share import boundaries_of as boundaries_by_costs
from shardwise.lab.planner.step_time import StepTime, alike_ranks, time_of_step
from shardwise.metrics.flops import model_flops_per_token, utilization
from shardwise.models.activations import UnitMemory
from shardwise.models.alike import counts_of, first_alike
from shardwise.models.dtypes import product_dtype
from shardwise.parallel.pipeline_parallel import pipeline_of

Fit = Literal["fits", "uncertain", "does not fit"]
NEARLY_FULL = 0.98
"""A choice that takes more of what may be used comes after others that are as fast."""


@dataclass(frozen=True)
class Choice:
    """A candidate with its memory and time."""

    candidate: Candidate
    cfg: RunConfig
    stages: Mapping[int, PeakBytes]
    """The memory of a rank at some places along `pp`: of those with like layers the first, and the
    last place."""
    usable_bytes: int
    """The memory of a device that may be used."""
    price: Callable[[], StepTime] = field(repr=False)
    """Returns its time, which nobody asks of most candidates that do not fit."""
    flops_per_token: float
    peak_flops: float
    """FLOP/s of all devices together."""
    applied: RunConfig
    """The run with the layers that a budget has chosen, where it has one."""
    recomputed: str = ""
    """These layers in words."""

    @cached_property
    def memory(self) -> PeakBytes:
        """The memory of the fullest rank."""
        return max(self.stages.values(), key=lambda memory: memory.total)

    @property
    def fits(self) -> bool:
        """Whether the fullest rank has room for it."""
        return self.memory.total <= self.usable_bytes

    @property
    def fit(self) -> Fit:
        """The verdict on its memory. Uncertain is what takes more than `USABLE` of a device, and
        not all of it: published runs reach 95 to 99 %, if the allocator leaves few fragments.
        """
        if self.fits:
            return "fits"
        return "uncertain" if USABLE * self.memory.total <= self.usable_bytes else "does not fit"

    @property
    def loss_settings(self) -> tuple[str, str]:
        """The parts of a run file that decide its losses: the precision and the base's form."""
        return self.cfg.training.precision, self.cfg.model.base

    @property
    def is_tight(self) -> bool:
        """Whether it leaves hardly any memory."""
        return self.memory.total > NEARLY_FULL * self.usable_bytes

    @cached_property
    def time(self) -> StepTime:
        """The time of a step."""
        return self.price()

    def order(self) -> tuple[float, bool, int, int, bool, int]:
        """Return by what choices are ordered: time in three digits, then whether memory is nearly
        full, then how simple they are.
        """
        candidate, parts = self.candidate, layout_name(self.candidate.division).split("-")
        known = [ALONE, *data_parts()]
        return (
            float(f"{self.time.total:.2e}"),
            self.is_tight,
            len(parts) + (candidate.offload != "none"),
            next((known.index(part) for part in parts if part in known), len(known)),
            candidate.recomputation != "none",
            self.memory.total,
        )

    @property
    def tokens_per_second(self) -> float:
        """Tokens of the whole run."""
        tokens = self.cfg.training.global_batch_size * self.cfg.data.sequence_length
        return tokens / self.time.total

    @property
    def mfu(self) -> float:
        """The FLOPs that the model needs over those that the devices could do."""
        return utilization(self.flops_per_token, self.tokens_per_second, self.peak_flops, 1)

    @property
    def title(self) -> str:
        """The layout with its sizes."""
        return title(self.candidate.division)

    @property
    def details(self) -> str:
        """How a rank works, in a few words."""
        return self._in_words(is_short=True)

    @property
    def details_in_full(self) -> str:
        """How a rank works, with the number of each layer that is computed again."""
        return self._in_words(is_short=False)

    def _in_words(self, is_short: bool) -> str:
        candidate, words = self.candidate, []
        if candidate.division.pp > 1:
            stages = f" x{candidate.num_virtual}" if candidate.num_virtual > 1 else ""
            words.append(f"{candidate.schedule}{stages}")
        words.append(f"micro-batch {candidate.micro_batch_size}")
        if candidate.recomputation != "none":
            words.append(f"recompute {self._recomputation(is_short)}")
        if candidate.split is not None:
            words.append(f"layers {' + '.join(map(str, candidate.split))}")
        if not candidate.is_resharded:
            words.append("keeps gathered weights")
        if candidate.offload != "none":
            words.append(f"offload {candidate.offload}")
        return ", ".join(words)

    def _recomputation(self, is_short: bool) -> str:
        chosen = self.candidate.recomputation
        if not isinstance(chosen, Recomputation):
            return chosen if isinstance(chosen, str) else ", ".join(chosen)
        layers = self.applied.training.checkpointing
        if is_short and isinstance(layers, Recomputation):
            ways = {"full": layers.full, "operators": layers.operators}
            return ", ".join(f"{way} in {counted(len(x), 'layer')}" for way, x in ways.items() if x)
        if chosen.budget_gib is not None:
            return f"within {chosen.budget_gib:.3g} GiB {self.recomputed}".strip()
        ways = {"full": chosen.full, "operators": chosen.operators}
        return ", ".join(
            f"{way} in layer{'s' * (len(x) > 1)} {runs(x)}" for way, x in ways.items() if x
        )


def usable_bytes(question: Question) -> int:
    """Return the memory of a device that a plan may use."""
    return int(USABLE * question.cluster.device.memory_bytes)


def within_memory(question: Question, share: float = 1.0) -> Recomputation:
    """Return the budget of a share of a device's memory, in tenths of a GiB, rounded down."""
    gib = share * question.cluster.device.memory_bytes / 2**30
    return Recomputation(budget_gib=floor(gib * 10) / 10)


class Exact:
    """Memory and time of candidates, each computed once."""

    def __init__(self, question: Question, subject: Subject) -> None:
        self.question, self.subject = question, subject
        self.choices: dict[Candidate, Choice | None] = {}
        self._units: dict[object, UnitMemory] = {}
        self._parts: dict[object, Any] = {}
        self.refused: dict[str, str] = {}

    @cached_property
    def flops_per_token(self) -> float:
        """FLOPs that the model needs per token."""
        return model_flops_per_token(self.subject.counts, self.question.cfg.data.sequence_length)

    def of(self, candidate: Candidate) -> Choice | None:
        """Return a candidate's choice; None where a rule refuses it."""
        if candidate not in self.choices:
            self.choices[candidate] = self._choice(candidate)
        return self.choices[candidate]

    def _choice(self, candidate: Candidate) -> Choice | None:
        cfg, question = candidate.run_file(self.question), self.question
        if cfg.parallel.pp > 1 and "parallel.split" not in question.fixed:
            split = [*candidate.split] if candidate.split else even_split(cfg, self.subject)
            cfg = replace(cfg, parallel=replace(cfg.parallel, split=split))
        facts = Facts(self.question.num_ranks, self.subject.facts)
        message = next((message for _, message in rules.refusals(cfg, facts)), None)
        if message is not None:
            self.refused[title(candidate.division)] = message
            return None
        try:
            return self.choice_of(cfg, candidate)
        except UserError as error:  # no formula knows it, or nothing is within its budget
            self.refused[title(candidate.division)] = str(error)
            return None

    def choice_of(self, cfg: RunConfig, candidate: Candidate) -> Choice:
        """Return the memory and time of a run that the rules allow.

        UserError where nothing is within its budget, and where no formula knows what it sends.
        """
        if (what := unknown(cfg)) is not None:
            raise UserError(f"no formula knows {what}")
        question, num_ranks = self.question, self.question.num_ranks
        cluster, subject = question.cluster, self.subject
        priced = replace(cfg, training=replace(cfg.training, device=question.device_type))
        pipeline = pipeline_of(cfg, num_ranks)
        run = replace(subject.run, sizes=axis_sizes(cfg, num_ranks), pipeline=pipeline)
        boundaries = boundaries_of(cfg, run, question)
        given, words = cfg, ""
        if cfg.training.budget_bytes is not None:
            device = question.device_type
            is_given = question.cfg.training.budget_bytes is not None
            chosen = within_budget(cfg, run, device, False, boundaries, self._units, is_given)
            cfg, words = chosen.applied(cfg), chosen.layers
            priced = as_way(priced, cfg.training.checkpointing)
        # Ranks of a pipeline differ: the first has most in flight, the last has the head, and one
        # in between may have larger layers, or more of them, than either.
        shares, stages = Shares(cfg, run, boundaries, self._parts), {cfg.parallel.pp - 1}
        if boundaries is not None:
            stages |= {*alike_ranks(cfg, run, boundaries)}
        memories = {
            stage: memory_of_share(priced, run, shares.of(stage), shares.place(stage), self._units)
            for stage in sorted(stages)
        }
        return Choice(
            candidate,
            given,
            memories,
            usable_bytes=usable_bytes(question),
            price=partial(time_of_step, cfg, run, cluster, shares),
            flops_per_token=self.flops_per_token,
            peak_flops=num_ranks * cluster.device.rate(product_dtype(cfg)),
            applied=cfg,
            recomputed=words,
        )


def explain(question: Question) -> tuple[Choice, Subject]:
    """Return a run as it stands, without a search; UserError where a rule refuses it."""
    cfg, num_ranks = question.cfg, question.num_ranks
    subject = subject_of(question)
    rules.check(cfg, Facts(num_ranks, subject.facts))
    parallel = cfg.parallel
    candidate = Candidate(
        division_of(cfg, num_ranks),
        parallel.schedule,
        parallel.num_virtual,
        parallel.reshard_after_forward,
        parallel.offload,
        cfg.training.micro_batch_size,
        hashable(cfg.training.checkpointing),
    )
    return Exact(question, subject).choice_of(cfg, candidate), subject


def even_split(cfg: RunConfig, subject: Subject) -> str | list[int]:
    """Return the even split of a pipeline's layers whose fullest stage computes least.

    Either every stage has as many layers, or the ends have one less, for the embedding and head.
    """
    num_chunks, num_layers = cfg.parallel.pp * cfg.parallel.num_virtual, len(subject.units) - 2
    each, rest = divmod(num_layers + 2, num_chunks)
    numbers = [each + (chunk < rest) for chunk in range(num_chunks)]
    numbers[0] -= 1
    numbers[-1] -= 1
    layers = max(unit.seconds for unit in subject.units[1:-1])
    head = subject.units[-1].seconds
    slowest = max(*numbers[:-1], numbers[-1] + head / layers)
    uniform = -(-num_layers // num_chunks)
    slowest_if_uniform = max(uniform, num_layers // num_chunks + head / layers)
    return "uniform" if slowest >= slowest_if_uniform or 0 in numbers[1:-1] else numbers


def split_by_cost(cfg: RunConfig, question: Question, subject: Subject) -> tuple[int, ...]:
    """Return the split of a pipeline that takes least time by the FLOPs of layers and head."""
    balanced = replace(cfg, parallel=replace(cfg.parallel, split="balanced"))
    # Further ones take as long as those before: see Pipeline.shortened.
    number = min(num_microbatches(cfg, question.num_ranks), 4 * cfg.parallel.pp)
    (_, *inner, end) = choose_split(balanced, subject.units, number).boundaries
    # Boundaries count the embedding and the head, which belong to the first and the last stage.
    return tuple(high - low for low, high in pairwise((1, *inner, end - 1)))


def boundaries_of(cfg: RunConfig, run: Description, question: Question) -> tuple[int, ...] | None:
    """Return the boundaries of a pipeline's split; None without a pipeline.

    Here they are those that the run would choose. On other devices there is no profile of its
    units, so costs are counted. UserError where no split meets the memory limit.
    """
    if cfg.parallel.pp == 1:
        return None
    split, num_layers = cfg.parallel.split, len(run.spec.layers)
    if split == "uniform":
        num_chunks = cfg.parallel.pp * cfg.parallel.num_virtual
        each, rest = divmod(num_layers, num_chunks)
        split = [each + (chunk < rest) for chunk in range(num_chunks)]
    if isinstance(split, str):
        if question.cluster.device.name == HERE:
            return boundaries_by_costs(cfg, run)
        units = counted_costs(
            *(cfg, run.hf, run.spec, counts_of(run.hf, run.spec), question.num_ranks),
            device=question.device_type,
            alike=first_alike(run.hf, run.spec, cfg.training.checkpointing),
        )
        number = num_microbatches(cfg, question.num_ranks)
        return choose_split(cfg, units, number).boundaries
    ends = [1 + sum(split[:chunk]) for chunk in range(1, len(split))]
    return (0, *ends, num_layers + 2)
