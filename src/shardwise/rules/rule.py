"""What a rule is, and the words that several rules share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from shardwise.config import RunConfig
from shardwise.layouts import Facts, layout_of

Text = str | Callable[[RunConfig, Facts], str]
"""Part of a message: a template whose fields are `cfg`, `model` and `layout`, or a function."""


@dataclass(frozen=True)
class Rule:
    """One reason for which a run may not begin."""

    name: str
    applies: Callable[[RunConfig, Facts], bool]
    problem: Text
    """What is wrong, with the key of the run file that says so."""
    way_out: Text
    """What the user can do instead."""
    why: str
    """The reason, with the test that shows it where there is one."""

    def message(self, cfg: RunConfig, facts: Facts) -> str:
        """Return one line to the user."""

        def filled(text: Text) -> str:
            if isinstance(text, str):
                return text.format(cfg=cfg, model=facts.model, layout=layout_of(cfg.parallel))
            return text(cfg, facts)

        return f"{filled(self.problem)}; {filled(self.way_out)}"


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
