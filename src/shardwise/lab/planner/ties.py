"""Ties: of choices whose times a plan cannot tell apart, the simplest is the answer."""

from collections.abc import Iterator

from shardwise.lab.planner.candidates import Question
from shardwise.lab.planner.changes import ROOM, plain_ways
from shardwise.lab.planner.divisions import layout_name
from shardwise.lab.planner.exact import Choice, Exact

TIE = 1.05
"""Times whose ratio is below this one are equal: a plan's errors are as large, or larger."""


def simplest(exact: Exact, fastest: Choice) -> Choice:
    """Return the simplest choice of all that are computed, and of plain ways to work in their
    divisions, whose time ties with the fastest one's.
    """
    for choice in _tied(exact, fastest):
        for candidate in plain_ways(choice.candidate, exact.question):
            exact.of(candidate)
    fastest = min(
        _tied(exact, fastest), key=lambda choice: choice.time.total
    )  # it may be a plain way
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
        not isinstance(candidate.recomputation, str),
        candidate.num_virtual + (candidate.split is not None),
    )


def has_room(choice: Choice, question: Question) -> bool:
    """Return whether a tenth of a device's memory is left."""
    return choice.memory.total <= ROOM * question.cluster.device.memory_bytes


def why_first(best: Choice, fastest: Choice, question: Question) -> Iterator[str]:
    """Yield the sentence on why the best choice is not the fastest, where it is not."""
    if (ratio := best.time.total / fastest.time.total) >= 1.005:
        yield (
            f"{fastest.title} ({fastest.details}) is {ratio - 1:.1%} faster, which is less than a "
            f"plan may be wrong by; {best.title} is simpler"
            + " and leaves room"
            * (has_room(best, question) and fastest.is_tight)
        )


def _tied(exact: Exact, fastest: Choice) -> list[Choice]:
    limit = TIE * fastest.time.total
    fitting = [c for c in exact.choices.values() if c is not None and c.fits]
    return [choice for choice in fitting if choice.time.total <= limit]
