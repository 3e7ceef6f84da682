"""Ties: of choices whose times a plan cannot tell apart, the simplest is the answer."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from shardwise.lab.planner.candidates import RECOMPUTATION, Candidate, Question
from shardwise.lab.planner.choices import Recomputed, is_budget
from shardwise.lab.planner.divisions import layout_name
from shardwise.lab.planner.exact import Choice, Exact, within_memory
from shardwise.lab.planner.memory import USABLE

TIE = 1.05
"""Times whose ratio is below this one are equal: a plan's errors are as large, or larger."""
ROOM = 0.9
"""The share of a device's memory up to which a choice has room for what a plan does not know."""


def simplest(exact: Exact, fastest: Choice) -> Choice:
    """Return the simplest choice of all that are computed, and of plain ways to work in their
    divisions, whose time ties with the fastest one's.
    """
    for choice in _tied(exact, fastest):
        for candidate in _plain(choice.candidate, exact.question):
            exact.of(candidate)
    question, tied = exact.question, _tied(exact, fastest)
    return min(tied, key=lambda choice: (intricacy(choice, question), choice.order()))


def intricacy(choice: Choice, question: Question) -> tuple[bool | int, ...]:
    """Return by what tied choices are ordered, what an engineer would do without first.

    It is what is copied to the host, whose time was never measured; a device without room; axes;
    layers that are chosen one by one; and stages in pieces.
    """
    candidate = choice.candidate
    return (
        candidate.offload != "none",
        not has_room(choice, question),
        len(layout_name(candidate.division).split("-")),
        not _is_one_word(candidate),
        candidate.num_virtual + (candidate.split is not None),
    )


def has_room(choice: Choice, question: Question) -> bool:
    """Return whether a tenth of a device's memory is left."""
    return choice.memory.total <= ROOM * question.cluster.device.memory_bytes


def _tied(exact: Exact, fastest: Choice) -> list[Choice]:
    limit = TIE * fastest.time.total
    fitting = [c for c in exact.choices.values() if c is not None and c.fits]
    return [choice for choice in fitting if choice.time.total <= limit]


def _plain(candidate: Candidate, question: Question) -> Iterator[Candidate]:
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


def _is_one_word(candidate: Candidate) -> bool:
    return isinstance(candidate.recomputation, str)
