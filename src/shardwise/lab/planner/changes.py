"""A choice with one thing changed: to climb from it to a faster one, and to see what each costs."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Literal

import torch

from shardwise.lab.planner.candidates import RECOMPUTATION, SCHEDULES, Candidate, Question, Space
from shardwise.lab.planner.choices import Recomputed, is_budget
from shardwise.lab.planner.divisions import Division, moved
from shardwise.lab.planner.estimate import Estimates
from shardwise.lab.planner.exact import Choice, Exact, split_by_cost, within_memory
from shardwise.lab.planner.memory import USABLE
from shardwise.lab.planner.prospects import prospect_of
from shardwise.models.dtypes import product_dtype

OTHER_SCHEDULES = (("interleaved-zero-bubble", 2), ("dualpipe-v", 2))
"""Further schedules that are tried in place of the best one's."""
MOST_CHUNKS = 32
"""To find the split by cost of more takes longer than all else."""
MOST_ROUNDS = 4
"""Rounds of changes."""
ROOM = 0.9
"""The share of a device's memory up to which a choice has room for what a plan does not know."""


@dataclass(frozen=True)
class Climb:
    """Changes of a choice, as long as they make it faster: of a single thing, or of a pipeline's
    schedule and its recomputation.
    """

    exact: Exact
    space: Space
    estimates: Estimates
    divisions: frozenset[Division]
    """The divisions in question."""

    def from_choice(self, best: Choice) -> Choice:
        """Return where the changes lead."""
        for _ in range(MOST_ROUNDS):
            changes = [candidate for _, candidate in changed(self.space, best.candidate)]
            changes += _schedules_with_recomputation(self.space, best.candidate)
            options = map(self.exact.of, (*changes, *self._beside(best)))
            fitting = [choice for choice in options if choice is not None and choice.fits]
            faster = min([best, *fitting], key=Choice.order)
            if faster is best:
                break
            best = faster
        return best

    def within_memory(self, choice: Choice) -> Choice:
        """Return where the changes lead from a choice that computes no more again than it must."""
        return self.from_choice(no_more_again(self.exact, self.from_choice(choice)))

    def asked(self, question: Question) -> "Climb":
        """Return one within a division, for a question that differs in its dtypes alone."""
        subject = self.exact.subject
        exact, space = Exact(question, subject), Space(question, subject)
        return Climb(exact, space, self.estimates, frozenset())

    def _beside(self, best: Choice) -> Iterator[Candidate]:
        """Yield the fastest candidates of divisions beside that of a choice, if they may be faster
        than it.
        """
        # In the order of `moved`: that of a set is another one in each process.
        for division in dict.fromkeys(moved(best.candidate.division)):
            if division not in self.divisions:
                continue
            prospect = prospect_of(self.space, self.estimates, division)
            for other in prospect.fastest if prospect else ():
                if self.estimates.may_beat(other, best.time.total):
                    yield other


def _schedules_with_recomputation(space: Space, candidate: Candidate) -> Iterator[Candidate]:
    """Yield candidates that differ in schedule and recomputation together.

    A schedule with fewer activations may be slower by itself, and then needs no recomputation.
    """
    if candidate.recomputation == "none" or "training.checkpointing" in space.question.fixed:
        return
    for _, other in changed(space, candidate):
        if (other.schedule, other.num_virtual) != (candidate.schedule, candidate.num_virtual):
            yield other._replace(recomputation="none")


def changed(space: Space, candidate: Candidate) -> Iterator[tuple[str, Candidate]]:
    """Yield candidates that differ from one in a single key of the run file, and the change."""
    question = space.question
    if "training.checkpointing" not in question.fixed:
        for choice in RECOMPUTATION:
            if choice != candidate.recomputation:
                yield f"checkpointing {choice}", candidate._replace(recomputation=choice)
    rows = question.cfg.training.global_batch_size // candidate.division.num_data
    size = candidate.micro_batch_size
    if "training.micro_batch_size" not in question.fixed:
        if rows % (2 * size) == 0:
            yield f"micro-batch {2 * size}", candidate._replace(micro_batch_size=2 * size)
        if size % 2 == 0:
            yield f"micro-batch {size // 2}", candidate._replace(micro_batch_size=size // 2)
    is_open = "parallel.reshard_after_forward" not in question.fixed
    if is_open and candidate.division.strategy.frees_weights:
        resharded = not candidate.is_resharded
        word = "frees" if resharded else "keeps"
        yield f"{word} gathered weights", candidate._replace(is_resharded=resharded)
    if candidate.division.pp > 1 and "parallel.schedule" not in question.fixed:
        most = space.subject.facts.num_layers // candidate.division.pp
        for schedule, num_virtual in SCHEDULES + OTHER_SCHEDULES:
            is_other = (schedule, num_virtual) != (candidate.schedule, candidate.num_virtual)
            if is_other and num_virtual <= most:
                other = candidate._replace(schedule=schedule, num_virtual=num_virtual, split=None)
                yield f"{schedule} x{num_virtual}", other
    if question.device_type == "cuda" and "parallel.offload" not in question.fixed:
        for offload in candidate.division.offloads:
            if offload != candidate.offload:
                yield f"offload {offload}", candidate._replace(offload=offload)


def changes_of(exact: Exact, space: Space, best: Choice) -> dict[str, Choice]:
    """Return a choice with each single thing changed, by what it is."""
    options = {change: exact.of(c) for change, c in changed(space, best.candidate)}
    return {change: choice for change, choice in options.items() if choice is not None}


def plain_ways(candidate: Candidate, question: Question) -> Iterator[Candidate]:
    """Yield candidates of the same division without offload, whose layers are computed again alike
    or leave room, with as many rows at once, or half as many.
    """
    ways: list[Recomputed] = [*RECOMPUTATION]
    if is_budget(candidate.recomputation):
        ways.append(within_memory(question, ROOM / USABLE))
    if "training.checkpointing" in question.fixed:
        ways = [candidate.recomputation]
    offload = candidate.offload if "parallel.offload" in question.fixed else "none"
    size, sizes = candidate.micro_batch_size, [candidate.micro_batch_size]
    if size % 2 == 0 and "training.micro_batch_size" not in question.fixed:
        sizes.append(size // 2)
    for recomputation, rows in product(ways, sizes):
        yield candidate._replace(
            recomputation=recomputation, micro_batch_size=rows, offload=offload
        )


def no_more_again(exact: Exact, best: Choice) -> Choice:
    """Return the fastest of a choice and of those that compute no more again than memory asks for:
    with its schedule or 1F1B, which keeps least, and with its rows at once, or half as many.
    """
    question, candidate = exact.question, best.candidate
    if "training.checkpointing" in question.fixed or candidate.recomputation == "none":
        return best
    fewest = candidate._replace(recomputation=within_memory(question))
    ways, half = [fewest], candidate.micro_batch_size // 2
    if "parallel.schedule" not in question.fixed:
        ways.append(fewest._replace(schedule="1f1b", num_virtual=1, split=None))
    if candidate.micro_batch_size % 2 == 0 and "training.micro_batch_size" not in question.fixed:
        ways += [way._replace(micro_batch_size=half) for way in ways]
    options = map(exact.of, ways)
    return min([best, *(c for c in options if c is not None and c.fits)], key=Choice.order)


def as_it_fits(exact: Exact, choice: Choice) -> Choice:
    """Return a choice, or where it does not fit what computes as much again as memory asks for."""
    if choice.fits or "training.checkpointing" in exact.question.fixed:
        return choice
    again = choice.candidate._replace(recomputation=within_memory(exact.question))
    return exact.of(again) or choice


def split_otherwise(exact: Exact, best: Choice) -> dict[str, Choice]:
    """Return a pipeline whose layers are split by cost, not evenly, or the other way round."""
    candidate = best.candidate
    num_chunks = candidate.division.pp * candidate.num_virtual
    if "parallel.split" in exact.question.fixed or not 1 < num_chunks <= MOST_CHUNKS:
        return {}
    change, split = "layers split evenly", None
    if candidate.split is None:
        change = "layers split by cost"
        split = split_by_cost(best.cfg, exact.question, exact.subject)
    choice = exact.of(candidate._replace(split=split))
    return {} if choice is None else {change: choice}


def with_other_losses(climb: Climb, best: Choice) -> dict[str, Choice]:
    """Return where coarser numbers lead from a choice: to be seen, not to be taken.

    They are products in bfloat16 where these are faster, and with LoRA a base in int8 or in nf4,
    whose memory may let other things fit.
    """
    question, changes = climb.exact.question, dict[str, Choice]()
    cfg, device = question.cfg, question.cluster.device
    if device.rate(product_dtype(cfg)) < device.rate(torch.bfloat16):
        half = replace(cfg, training=replace(cfg.training, precision="bfloat16"))
        choice = climb.asked(replace(question, cfg=half)).exact.of(best.candidate)
        changes |= {} if choice is None else {"products in bfloat16": choice}
    for base in bases(question):
        stored = replace(cfg, model=replace(cfg.model, base=base))
        other = climb.asked(replace(question, cfg=stored))
        choice = other.exact.of(best.candidate)
        if choice is None:  # the family, or the folder, cannot be stored so
            continue
        if choice.fits and question.is_short_of_memory(best.candidate):
            choice = other.within_memory(choice)
        words = [f"base in {base}"]
        if choice.candidate != best.candidate:
            words.append(choice.details)
        changes[", ".join(words)] = choice
    return changes


def bases(question: Question) -> tuple[Literal["int8", "nf4"], ...]:
    """Return the forms in which a frozen base may be stored in place of the run's, the finest
    first.
    """
    cfg = question.cfg
    is_open = cfg.lora is not None and "model.base" not in question.fixed
    return ("int8", "nf4") if is_open and cfg.model.base == "none" else ()
