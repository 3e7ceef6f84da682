"""`make gpu`: tests on a CUDA device, then LoRA steps against Hugging Face Trainer + PEFT."""

from __future__ import annotations

import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "src"))  # the interpreter need not have shardwise installed

from tests.gpu import suite  # noqa: E402
from tests.gpu.suite import DTYPE, Rows, Suite  # noqa: E402
from tests.gpu.timing import SIDES, comparisons, in_words, with_figures  # noqa: E402

LIMITS = {
    **{"draw": 60, "warm": 100, "tests torch": 120, "tests fla": 60},
    **{"timing fla": 160, "timing torch": 140},
}
"""Seconds of each stage. fla's first step tunes its kernels."""
STAGES = (("tests", "torch"), ("timing", "fla"), ("tests", "fla"), ("timing", "torch"))
"""In the order of what is worth most if time runs out. The tests with fla find its kernels tuned,
for the shape that matters."""
NO_FLA = {"status": "skipped", "reason": "fla is not installed (wheels: see tests/gpu/README.md)"}


def main() -> int:
    return suite.main("tests.gpu", __doc__, run)


def run(device: str, folder: Path, scratch: Path) -> int:
    return Program(Suite(device, folder, scratch, LIMITS), "lora_step").run(STAGES)


class Program:
    """Tests and timed LoRA steps; after every stage and round their results are in NAME.json.

    Only the tests of one family run with `only`; `more` goes into the file.
    """

    def __init__(
        self,
        this: Suite,
        name: str,
        sides: tuple[str, ...] = SIDES,
        only: str = "",
        more: dict[str, Any] | None = None,
    ) -> None:
        self.suite, self.name, self.sides, self.only = this, name, sides, only
        self.more = more or {}
        self.tests: dict[str, Any] = {}
        self.rows: dict[str, Rows] = {}

    def run(self, stages: tuple[tuple[str, str], ...]) -> int:
        """Draw the model and go through the stages; return the exit code."""
        if not self.suite.draw():
            return 1
        if any(gdn == "fla" for _, gdn in stages):
            self.suite.warm()
        if self.sides != SIDES:
            del self.suite.facts["differences"]  # between those two sides
        for kind, gdn in stages:
            if gdn == "fla" and not find_spec("fla"):
                self.tests[gdn] = NO_FLA
            elif kind == "tests":
                self.tests[gdn] = self.suite.tests(gdn, self.only)
            else:
                self.suite.time_steps(gdn, self.sides, partial(self.keep, gdn))
            self.save()
        self.save(complete=True)
        print(f"written: {self.suite.folder / self.name}.json")
        return summary(self.content(complete=True))

    def keep(self, gdn: str, rows: Rows) -> None:
        """Take over the rows of one choice of kernels."""
        self.rows[gdn] = rows
        self.save()

    def save(self, complete: bool = False) -> None:
        self.suite.write(self.name, self.content(complete))

    def content(self, complete: bool) -> dict[str, Any]:
        """Return what the file has."""
        workload, facts = self.suite.workload, self.suite.facts
        rows, compared = [], []
        for gdn, of_gdn in self.rows.items():
            rows += [with_figures(row, workload, facts) for row in of_gdn]
            if self.sides == SIDES:
                compared += comparisons(of_gdn, gate(self.tests, gdn))
        head = {"complete": complete, **facts, **self.more}
        work = {"workload": vars(workload), "dtype": DTYPE}
        return {**head, **work, "tests": self.tests, "rows": rows, "comparisons": compared}


def gate(tests: dict[str, Any], gdn: str) -> str:
    """Return whether the tests with these kernels passed: green or red."""
    return "green" if tests.get(gdn, {}).get("status") == "ok" else "red"


def summary(result: dict[str, Any]) -> int:
    """Print the result; return 0 if nothing failed. Where tests failed no speed is printed."""
    tests, rows = result["tests"], result["rows"]
    for gdn, outcome in tests.items():
        print(f"tests with {gdn}: {outcome['status']} {outcome['reason']}".rstrip())
    for row in rows:
        name = f"{row['gdn']:7}checkpointing {row['checkpointing']:6}{row['side']:14}"
        if row["status"] != "ok":
            print(f"{name}{row['status']}: {row['reason'][-200:]}")
        elif gate(tests, row["gdn"]) == "red":
            print(f"{name}no speed, because tests fail")
        else:
            print(
                f"{name}{1e3 * row['step_seconds']['median']:8.1f} ms/step"
                f"{row['tokens_per_second']:11,.0f} tokens/s  MFU {row['mfu']['published']:6.1%}"
                f"  peak {row['memory']['peak_bytes'] / 2**30:.2f} GiB"
            )
    for entry in result["comparisons"]:
        print(f"{entry['gdn']}, checkpointing {entry['checkpointing']}: {in_words(entry)}")
    statuses = {entry["status"] for entry in [*tests.values(), *rows]}
    return 0 if statuses <= {"ok", "skipped"} else 1


if __name__ == "__main__":
    sys.exit(main())
