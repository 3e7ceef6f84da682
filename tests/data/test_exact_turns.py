"""Targets are exactly what the assistant says, in templates of several styles."""

from __future__ import annotations

from typing import Any

import pytest

from tests.data import exact_turns, templates
from tests.data.exact_turns import CASES, outcome

STYLE = """{%- for m in messages -%}<|{{ m.role }}|>
{{ m.content }}<end>
{% endfor -%}{%- if add_generation_prompt -%}<|assistant|>
{% endif -%}"""


@pytest.mark.parametrize("case", ["one turn", "three turns", "system", "thinking"])
@pytest.mark.parametrize("name", ["CHATML", "HEADERS", "MARKED", "LAST_TURN_DIFFERS"])
def test_targets_are_exactly_the_turns(name, case):
    result = outcome(getattr(templates, name), CASES[case])
    assert result.startswith("`<"), result


@pytest.mark.parametrize(("first", "last"), [(-1, 0), (1, 0), (-14, 0), (0, -1), (0, 9)])
def test_a_turn_that_is_not_exact_is_seen(monkeypatch, first, last):
    assert outcome(STYLE, CASES["system"]) == "`<end>`"
    runs = exact_turns.runs

    def planted(*args: Any) -> list[tuple[int, int]]:
        (start, end), *others = runs(*args)
        return [(start + first, end + last), *others]

    monkeypatch.setattr(exact_turns, "runs", planted)
    assert outcome(STYLE, CASES["system"]).startswith("WRONG")


def end_of_turn_left_out(patch: pytest.MonkeyPatch) -> None:
    runs = exact_turns.runs

    def without_end(*args: Any) -> list[tuple[int, int]]:
        (start, end), *others = runs(*args)
        return [(start, end - len("<end>")), *others]

    patch.setattr(exact_turns, "runs", without_end)


@pytest.mark.parametrize("bug", [end_of_turn_left_out])
def test_a_planted_bug_is_seen(monkeypatch, bug):
    bug(monkeypatch)
    assert outcome(STYLE, CASES["system"]).startswith("WRONG")
