"""Write docs/concepts/silent-bugs.md from public_defects.toml.

    python -m tests.parity.public_defects [--plant]

With `--plant` every bug of the table is planted first (some four minutes on two cores), and
results/defects.json says what caught it.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from shardwise.metrics.hardware import environment
from tests.parity.harness import Cell

TABLE = Path(__file__).with_suffix(".toml")
ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "concepts" / "silent-bugs.md"
RECORD = ROOT / "results" / "defects.json"
CHECK = "tests/parity/test_sensitivity.py::check_caught"
HEAD = """\
# Silent bugs elsewhere

*Which mistakes of other systems would be noticed here?*

A silent bug prints nothing: the run ends, the loss falls, and the result is not that of one
process. This page lists {count} such bugs of {repositories} repositories, each with the public
thread in which it was reported or fixed. A test plants it into the code of shardwise, or the
nearest mistake that this code could have, and what is tested anyway turns red: a comparison with
one process or, where the table says *one process*, a test that needs no other. So you see which
mistakes [parity](parity.md) notices, and which ones to look for where nothing is compared.

This is no ranking. These systems found their bugs, said so in public, and fixed most of them. The
threads were read in copies of September 2026. More than a hundred other bugs are planted here
too.

## How to read the tables

| column | what it says |
|---|---|
| where | the system, and its issue or pull request |
| what went wrong there | in one sentence, in our words |
| planted here as | the bug's name, or the test case's, in the file that the link leads to |
| in | the [cell](glossary.md#benchmarks) that is run with it: family, layout, mode, processes |
| red | what is then beyond its tolerance; the test checks that it is this |

Where a cell is named, it is caught by the last line of `check_caught` in
[`test_sensitivity.py`](../../tests/parity/test_sensitivity.py), the same for each layout:

```python
{caught}
```

(Rows whose link leads to `test_context_parallel.py` are caught by its `assert errors`, after the
same comparison.) It compares the `loss` of each step and of the evaluation, every gradient
(`grad`) and their `norm`, the weights after the steps (`param`) and the files that the run leaves
(`saved`). Where the library's own assertion ends the run before, that is named. Where no cell is
named, the line stands under *red*.

To plant one yourself, name the file and the bug:

```bash
.venv/bin/python -m pytest -m "not gpu" tests/parity/test_sensitivity.py -k local_token_count
```

`make test` plants the first bug of each file, and checks that what the others replace is still
there. `make parity` plants all of them. {planted}

This page is written by `python -m tests.parity.public_defects` from
[`public_defects.toml`](../../tests/parity/public_defects.toml).
"""


def sections() -> list[dict[str, Any]]:
    """Return the sections of the table, each with its defects."""
    return tomllib.loads(TABLE.read_text(encoding="utf-8"))["section"]


def red_of(planted: str, cell: str) -> str | None:
    """Return what the table says is red with a bug in a cell; None where it does not have it."""
    defects = [defect for section in sections() for defect in section["defect"]]
    found = {(defect["planted"], defect.get("cell")): defect["red"] for defect in defects}
    return found.get((planted, cell))


def last_line(test: str) -> str:
    """Return the last statement of a function, by its file and name, on one line."""
    file, name = test.split("::")
    source = (ROOT / file).read_text(encoding="utf-8")
    functions = [one for one in ast.parse(source).body if isinstance(one, ast.FunctionDef)]
    (function,) = (one for one in functions if one.name == name)
    statement = ast.get_source_segment(source, function.body[-1])
    assert statement is not None
    return " ".join(statement.split())


def page() -> str:
    """Return the whole page."""
    defects = [defect for section in sections() for defect in section["defect"]]
    repositories = {"/".join(defect["link"].split("/")[3:5]).lower() for defect in defects}
    head = {"count": len(defects), "repositories": len(repositories), "planted": planted()}
    parts = [HEAD.format(caught=last_line(CHECK), **head)]
    for section in sections():
        parts += [f"\n## {section['title']}\n", "| where | what went wrong there | planted here as"]
        parts[-1] += " | in | red |\n|---|---|---|---|---|"
        for defect in section["defect"]:
            number = re.search(r"\d+$", defect["link"])
            assert number is not None, defect["link"]
            file, _ = defect["test"].split("::")
            cell, red = "one process", f"{defect['red']}: `{last_line(defect['test'])}`"
            if "cell" in defect:
                cell, red = f"`{defect['cell']}`", defect["red"]
            parts.append(
                f"| [{defect['system']} #{number[0]}]({defect['link']}) | {defect['wrong']} "
                f"| [`{defect['planted']}`](../../{file}) | {cell} | {red} |"
            )
    return "\n".join(parts) + "\n"


def names(values: Sequence[Any]) -> tuple[str, str]:
    """Return the names of the bug and the cell of a test case, "" without a cell."""
    bug, *others = values
    cell = next((value.id for value in others if isinstance(value, Cell)), "")
    return getattr(bug, "__name__", str(tuple(values))), cell


class Planted:
    """A plugin of pytest that runs the cases of the table alone, and keeps how they ended."""

    def __init__(self) -> None:
        self.cases = {
            (defect["test"], defect["planted"], defect.get("cell", ""))
            for section in sections()
            for defect in section["defect"]
        }
        self.ended: list[dict[str, Any]] = []

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if self._case(item) in self.cases]
        assert len({*map(self._case, items)}) == len(self.cases), "a case has no test"

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
        report = yield
        if report.when == "call" or report.failed:
            _, bug, cell = self._case(item)
            seconds = round(report.duration, 1)
            self.ended.append(
                {"planted": bug, "cell": cell, "caught": report.passed, "seconds": seconds}
            )
        return report

    def _case(self, item: pytest.Item) -> tuple[str, str, str]:
        test = item.nodeid.partition("[")[0]
        values = item.callspec.params.values() if hasattr(item, "callspec") else ()
        return test, *(names([*values]) if values else ("", ""))


def plant() -> int:
    """Plant all bugs of the table, and write the record."""
    planted = Planted()
    tests = sorted({test for test, _, _ in planted.cases})
    options = ["-m", "not gpu", "-p", "no:cacheprovider"]
    # Without the last, modules that are imported here already are an error.
    options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
    code = pytest.main([*options, *tests], [planted])
    record = {"environment": environment(), "defects": planted.ended}
    RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return int(code)


def planted() -> str:
    """Return when all were planted, and how many were caught."""
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    commit, caught = record["environment"]["commit"], [one["caught"] for one in record["defects"]]
    return (
        f"Planted last at commit {commit[:8]}: {sum(caught)} of {len(caught)} were caught "
        "([each with its time](../../results/defects.json))."
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--plant", action="store_true", help="plant every bug of the table first")
    code = plant() if parser.parse_args().plant else 0
    PAGE.write_text(page(), encoding="utf-8")
    sys.exit(code)
