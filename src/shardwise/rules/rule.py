"""What a rule is, and the words that several rules share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from shardwise.config import RunConfig
from shardwise.layouts import Facts


@dataclass(frozen=True)
class Rule:
    """One reason for which a run may not begin."""

    name: str
    applies: Callable[[RunConfig, Facts], bool]
    message: Callable[[RunConfig, Facts], str]
    """One line to the user: what is wrong, and a way out."""
    why: str
    """The reason, with the test that shows it where there is one."""


def dotted(version: tuple[int, int]) -> str:
    """Return a version as it is written: 2.13."""
    return ".".join(map(str, version))


def multiples(number: int, unit: int) -> str:
    """Return the multiples of `unit` around `number`, as a way out: "4 or 8"."""
    below = number // unit * unit
    return " or ".join(str(size) for size in (below, below + unit) if size)


def either(choices: list[str]) -> str:
    """Return choices as a way out: "1, 2 or 4"."""
    *others, last = choices
    return f"{', '.join(others)} or {last}" if others else last
