"""Search the layouts of a run for those that fit and train fastest, and the reasons for them.

Estimates put the candidates in order. Of the first of them memory and time are computed exactly,
and from the best two the search goes on, one change at a time.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from time import perf_counter

from shardwise.config import UserError
from shardwise.lab.planner.candidates import Candidate, Question, Space, Subject, subject_of
from shardwise.lab.planner.changes import (
    Climb,
    as_it_fits,
    bases,
    changes_of,
    no_more_again,
    split_otherwise,
    with_other_losses,
)
from shardwise.lab.planner.divisions import Division, layout_name, most_sharded
from shardwise.lab.planner.estimate import Estimates
from shardwise.lab.planner.exact import Choice, Exact, usable_bytes
from shardwise.lab.planner.prospects import PER_DIVISION, Prospect, promising
from shardwise.lab.planner.ties import TIE, intricacy, simplest
from shardwise.lab.planner.why_none import refuse

NUM_EXACT = 8
"""Divisions of the devices whose candidates are computed exactly, beside the first of each layout,
unless too few of them fit."""
NUM_FITTING = 5
"""So many fit at least, or as many as are shown."""
NUM_AGAIN = 4
"""Divisions of whose best choice no more layers are computed again than memory asks for."""
UNLIKE = 2.0
"""It is assumed that no estimate is so many times as long as what it estimates."""
MOST_SIMPLER = 12
"""Other layouts that are shown."""
OFFLOADS = ("none", "optimizer", "all")
"""The values of `parallel.offload` that are tried where nothing fits without."""


@dataclass
class Answer:
    """Result of a search."""

    question: Question
    subject: Subject
    choices: list[Choice] = field(default_factory=list)
    """The simplest choice of those that are as fast as the fastest, then the fastest of each
    division that fits."""
    fastest: Choice = field(init=False)
    """The fastest choice that fits, where one does."""
    computed: list[Choice] = field(default_factory=list)
    """Every choice that was computed exactly."""
    simpler: dict[str, Choice] = field(default_factory=dict)
    """Choices of other layouts, by name: the best choice, or the one that needs least if none
    fits."""
    refused: dict[str, str] = field(default_factory=dict)
    """Layouts and sizes with the message of the rule that refuses them."""
    changes: dict[str, Choice] = field(default_factory=dict)
    """The best choice with one thing changed."""
    num_divisions: int = 0
    seconds: float = 0.0

    @property
    def best(self) -> Choice:
        """The simplest of the choices that are as fast as the fastest that fits: see `ties.py`."""
        return self.choices[0]

    @property
    def explained(self) -> Choice | None:
        """The best choice, or where none fits the computed one that needs least memory."""
        if self.choices:
            return self.best
        return min(self.computed, key=lambda choice: choice.memory.total, default=None)

    @property
    def faster_bases(self) -> dict[str, Choice]:
        """Where the best choice leads with a frozen base in fewer bits, by the form of the base, if
        that is clearly faster: of the simplest that are, the fastest.
        """
        best, question = self.best, self.question
        stored = [
            choice
            for choice in self.changes.values()
            if choice.cfg.model.base != best.cfg.model.base and choice.fits
            if TIE * choice.time.total < best.time.total
        ]
        first = sorted(stored, key=lambda choice: (intricacy(choice, question), choice.order()))[:1]
        return {choice.cfg.model.base: choice for choice in first}

    @property
    def too_large(self) -> list[tuple[str, Choice]]:
        """The changes that would be faster and do not fit, the fastest first."""
        limit, losses = 0.995 * self.best.time.total, self.best.loss_settings
        options = [
            (change, choice)
            for change, choice in self.changes.items()
            if not choice.fits and choice.time.total < limit and choice.loss_settings == losses
        ]
        return sorted(options, key=lambda option: option[1].time.total)

    @property
    def limit_bytes(self) -> int:
        """The memory of a device that may be used."""
        return usable_bytes(self.question)


def search(question: Question, top: int = 5, effort: int = 1) -> Answer:
    """Return the best layouts of a run on its devices, and why others are not among them.

    `effort`: so many times as many candidates are looked at, to see what a search may miss.
    UserError where the rules allow none. `Answer.choices` is empty where none fits.
    """
    began = perf_counter()
    subject = subject_of(question)
    space, estimates = Space(question, subject), Estimates(question, subject)
    exact = Exact(question, subject)
    divisions = sorted(space.divisions(), key=estimates.least_seconds)
    if not divisions:
        refuse(space)
    start = _Start(exact, estimates, effort)
    start.compute(promising(space, estimates, divisions, effort), top)
    if not start.fitting:
        space.offloads = OFFLOADS
        start.compute(promising(space, estimates, divisions, effort), top)
    answer = Answer(question, subject, num_divisions=len(divisions))
    answer.simpler = _simpler(exact, space, estimates, divisions)
    if not any(exact.choices.values()):
        # Not even a bound of memory fits: one choice is computed, so that there is one to show.
        hopeful = (_most_hopeful(space, estimates, division) for division in divisions)
        any(map(exact.of, chain.from_iterable(hopeful)))
    choices = _best_of_each(exact)
    if choices:
        # The second may have more to gain: another thing of it may fit.
        climb = Climb(exact, space, estimates, frozenset(divisions))
        best = min((climb.from_choice(choice) for choice in choices[:2]), key=Choice.order)
        splits = (as_it_fits(exact, choice) for choice in split_otherwise(exact, best).values())
        by_cost = [choice for choice in splits if choice.fits]
        best = min([best, *by_cost], key=Choice.order)
        # Of another division fewer layers may have to be computed again.
        few = (best, *_best_of_each(exact)[:NUM_AGAIN])
        best = min((no_more_again(exact, choice) for choice in few), key=Choice.order)
        best = climb.from_choice(best)
        within = replace(climb, divisions=frozenset())
        for choice in answer.simpler.values():
            if choice.fits and question.is_short_of_memory(choice.candidate):
                within.within_memory(choice)
        shown: Choice | None = None  # a change that is shown may be faster than what it changes
        while True:
            if (fastest := _best_of_each(exact)[0]) is not best:
                best = climb.from_choice(fastest)
            plain = simplest(exact, min(best, _best_of_each(exact)[0], key=Choice.order))
            if plain is shown:
                break
            shown = plain
            answer.changes = changes_of(exact, space, plain) | split_otherwise(exact, plain)
        answer.changes |= with_other_losses(climb, plain)
        answer.choices = [plain]
    best_of_each = _best_of_each(exact)
    for choice in reversed(best_of_each):  # the best of a layout at last
        if (name := layout_name(choice.candidate.division)) in answer.simpler:
            answer.simpler[name] = choice
    others = [choice for choice in best_of_each if choice not in answer.choices]
    answer.choices = (answer.choices + others)[:top]
    answer.computed = [choice for choice in exact.choices.values() if choice is not None]
    if fitting := [choice for choice in answer.computed if choice.fits]:
        answer.fastest = min(fitting, key=lambda choice: choice.time.total)
    # Refused choices explain nothing where others of the same layout are computed.
    choices_refused = {} if answer.computed else space.refused_choices
    answer.refused = space.refused | choices_refused | exact.refused
    answer.seconds = perf_counter() - began
    return answer


def with_smaller_base(question: Question) -> Answer | None:
    """Return the answer for a base in int8 or else in nf4, if a run with LoRA fits with one.

    It is for where nothing fits otherwise: rounded weights give other losses.
    """
    for base in bases(question):
        model = replace(question.cfg.model, base=base)
        smaller = replace(question, cfg=replace(question.cfg, model=model))
        try:
            answer = search(smaller)
        except UserError:  # the family, or the folder, cannot be stored so
            continue
        if answer.choices:
            return answer
    return None


@dataclass
class _Start:
    """The candidates computed before the climb: one of each layout, and more of the fastest."""

    exact: Exact
    estimates: Estimates
    effort: int
    fitting: set[Division] = field(default_factory=set)
    best_seconds: float = math.inf
    """The time of the fastest one that fits."""

    def compute(self, prospects: Sequence[Prospect], top: int) -> None:
        """Compute divisions in turn, until enough are computed and fit, and none is left that is
        expected to be faster than the best of them.

        Those that differ in their replicas count as one, which is nothing where not even its
        smallest candidate fits. Estimates of unlike layouts are unlike in their errors, so one
        division of each comes first, up to UNLIKE times the best.
        """
        layouts, computed = set[str](), set[Division]()
        for prospect in prospects:
            layout = layout_name(prospect.smallest.division)
            is_slow = prospect.seconds > self.effort * UNLIKE * self.best_seconds
            if layout not in layouts and not is_slow and self._of(prospect, 1):
                layouts.add(layout)
        num_computed, num_fitting = (
            self.effort * number for number in (NUM_EXACT, max(top, NUM_FITTING))
        )
        for prospect in prospects:
            is_enough = len(computed) >= num_computed and len(self.fitting) >= num_fitting
            if is_enough and not any(map(self._may_win, prospect.candidates)):
                continue
            sharded = self._sharded(prospect)
            smallest = self.exact.of(prospect.smallest._replace(division=sharded))
            if smallest is None or smallest.fits:
                number = 1 if sharded in computed else self.effort * PER_DIVISION
                self._of(prospect, number, self._may_win if is_enough else None)
            if smallest is not None:
                computed.add(sharded)

    def _of(
        self,
        prospect: Prospect,
        num_fastest: int,
        condition: Callable[[Candidate], bool] | None = None,
    ) -> bool:
        """Compute the fastest candidates and, if none fits, thriftier ones until one does, among
        those that meet a condition; return whether the rules allow any.
        """
        choices = [*map(self.exact.of, filter(condition, prospect.fastest[:num_fastest]))]
        for candidate in filter(condition, (*prospect.thriftier, prospect.smallest)):
            if any(choice is not None and choice.fits for choice in choices):
                break
            choices.append(self.exact.of(candidate))
        for choice in choices:
            if choice is None:
                continue
            seconds = choice.time.total if choice.fits else None
            self.estimates.compare(choice.candidate, choice.memory.total, seconds)
            if seconds is not None:
                self.fitting.add(self._sharded(prospect))
                self.best_seconds = min(self.best_seconds, seconds)
        return any(choice is not None for choice in choices)

    def _may_win(self, candidate: Candidate) -> bool:
        return self.estimates.may_beat(candidate, self.best_seconds)

    def _sharded(self, prospect: Prospect) -> Division:
        question, division = self.exact.question, prospect.smallest.division
        is_open = question.wanted is None and "parallel.dp_replicate" not in question.fixed
        return most_sharded(division) if is_open else division


def _best_of_each(exact: Exact) -> list[Choice]:
    """Return the fastest choice of each division that fits, best first."""
    best: dict[Division, Choice] = {}
    for choice in exact.choices.values():
        if choice is not None and choice.fits:
            division = choice.candidate.division
            if division not in best or choice.order() < best[division].order():
                best[division] = choice
    return sorted(best.values(), key=Choice.order)


def _simpler(
    exact: Exact, space: Space, estimates: Estimates, divisions: Sequence[Division]
) -> dict[str, Choice]:
    """Return for each layout of few parts its best choice, or the one that needs least memory."""
    by_name: dict[str, Division] = {}
    for division in divisions:  # in the order of their lower bounds
        by_name.setdefault(layout_name(division), division)
    answer = {}
    for name in sorted(by_name, key=lambda name: len(name.split("-"))):
        division = by_name[name]
        num_parts = len([part for part in name.split("-") if part != "sp"])
        is_other = num_parts <= 2 and division.ep == 1 and division.is_sequence == (division.tp > 1)
        if not is_other or len(answer) == MOST_SIMPLER:
            continue
        for candidate in _most_hopeful(space, estimates, division):
            choice = exact.of(candidate)
            if choice is not None:
                answer[name] = choice
                if choice.fits:
                    break
    return answer


def _most_hopeful(space: Space, estimates: Estimates, division: Division) -> Iterator[Candidate]:
    """Yield the candidate of a division that is expected to be the fastest of those that fit, and
    that which needs least; then both among those that offload, too.
    """
    limit, offered = usable_bytes(space.question), space.offloads
    for offloads in dict.fromkeys((offered, OFFLOADS)):
        space.offloads = offloads
        candidates = [*filter(space.is_allowed, space.candidates(division))]
        space.offloads = offered
        if candidates:
            fitting = [c for c in candidates if estimates.least_bytes(c) <= limit]
            least = min(candidates, key=estimates.order_of_size)
            yield min(fitting, key=estimates.seconds, default=least)
            yield least
