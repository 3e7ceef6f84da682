"""The table of other systems' defects names tests that exist, and the page shows the table."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from importlib import import_module

import pytest

from tests.parity.harness import TOLERANCE
from tests.parity.public_defects import PAGE, RECORD, names, page, sections

DEFECTS = [defect for section in sections() for defect in section["defect"]]


def planted_by(test: str) -> Iterator[tuple[str, str]]:
    """Yield the bug and the cell of each case of a test by their names; nothing is run."""
    file, function = test.split("::")
    module = import_module(file.removesuffix(".py").replace("/", "."))
    for mark in getattr(module, function).pytestmark:
        if mark.name == "parametrize":
            for case in mark.args[1]:
                values = getattr(case, "values", case)
                yield names(values if isinstance(values, tuple) else (values,))


def test_there_are_many_of_many_systems():
    assert len(DEFECTS) >= 25
    assert len({defect["system"] for defect in DEFECTS}) >= 10
    assert len({defect["link"] for defect in DEFECTS}) == len(DEFECTS)


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect["planted"])
def test_it_is_planted_by_a_test_that_exists(defect):
    assert re.fullmatch(r"https://github\.com/[\w.-]+/[\w.-]+/(issues|pull)/\d+", defect["link"])
    assert (defect["planted"], defect.get("cell", "")) in set(planted_by(defect["test"]))
    assert defect["wrong"].endswith(".")
    in_words = "cell" not in defect or defect["red"].startswith("an assertion in ")
    assert in_words or set(defect["red"].split(", ")) <= {*TOLERANCE}


def test_all_were_planted_and_caught():
    """By `python -m tests.parity.public_defects --plant`."""
    ended = json.loads(RECORD.read_text(encoding="utf-8"))["defects"]
    assert all(one["caught"] for one in ended)
    planted = {(one["planted"], one["cell"]) for one in ended}
    assert planted == {(defect["planted"], defect.get("cell", "")) for defect in DEFECTS}


def test_the_page_shows_the_table():
    committed = PAGE.read_text(encoding="utf-8")
    assert committed == page(), "run python -m tests.parity.public_defects"
