"""`make gpu`: tests on a CUDA device, then LoRA steps against Hugging Face Trainer + PEFT."""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "src"))  # the interpreter need not have shardwise installed

from tests.gpu import suite  # noqa: E402
from tests.gpu.suite import DTYPE, Rows, Suite, python  # noqa: E402
from tests.gpu.timing import TRAINER, comparisons, in_words, with_figures  # noqa: E402

SIDES = ("shardwise", "shardwise:peft", TRAINER)

LIMITS = {
    **{"draw": 60, "warm": 200, "tests torch": 200, "tests fla": 220},
    **{"timing fla": 160, "profile fla": 60, "timing torch": 140},
}
"""Seconds of each stage. fla's first step tunes its kernels."""
STAGES = (
    *(("tests", "torch"), ("timing", "fla"), ("profile", "fla"), ("tests", "fla")),
    ("timing", "torch"),
)
"""In the order of what is worth most if time runs out. The tests with fla find its kernels tuned,
for the shape that matters. While the tests with torch run, fla's kernels are compiled."""
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
        self.profile: dict[str, Any] = {}
        self.stages: list[str] = []

    def run(self, stages: tuple[tuple[str, str], ...]) -> int:
        """Draw the model and go through the stages; return the exit code."""
        if not self.suite.draw():
            return 1
        if TRAINER not in self.sides:
            del self.suite.facts["differences"]  # between those two sides
        with ThreadPoolExecutor(1) as beside:
            uses_fla = any(gdn == "fla" for _, gdn in stages)
            warm = beside.submit(self.suite.warm) if uses_fla else None
            for kind, gdn in stages:
                if gdn == "fla" and warm is not None:
                    warm.result()
                self.stage(kind, gdn)
                self.stages.append(f"{kind} {gdn}")
                self.save()
        self.save(complete=True)
        print(f"written: {self.suite.folder / self.name}.json")
        return summary(self.content(complete=True))

    def stage(self, kind: str, gdn: str) -> None:
        """Run one stage."""
        if gdn == "fla" and not find_spec("fla"):
            self.tests[gdn] = NO_FLA
        elif kind == "tests":
            self.tests[gdn] = self.suite.tests(gdn, self.only)
        elif kind == "profile":
            path = self.suite.scratch / "profile.json"
            arguments = (gdn, str(self.suite.scratch / "model"), self.suite.device)
            arguments += (self.suite.workload_name, str(path))
            self.profile = self.suite.run(
                f"profile {gdn}", python("tests.gpu.profiled", *arguments)
            )
            if path.exists():
                self.profile |= json.loads(path.read_text(encoding="utf-8"))
        else:
            self.suite.time_steps(gdn, self.sides, partial(self.keep, gdn))

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
            for side in self.sides[:-1] if TRAINER in self.sides else ():
                pair = comparisons(of_gdn, gate(self.tests, gdn), (side, TRAINER))
                compared += [{"side": side, **entry} for entry in pair]
        head = {"complete": complete, "stages": self.stages, **facts, **self.more}
        work = {"workload": vars(workload), "dtype": DTYPE}
        found = {"tests": self.tests, "rows": rows, "comparisons": compared}
        return {**head, **work, **found, "profile": self.profile}


def gate(tests: dict[str, Any], gdn: str) -> str:
    """Return whether the tests with these kernels passed: green or red."""
    return "green" if tests.get(gdn, {}).get("status") == "ok" else "red"


def summary(result: dict[str, Any]) -> int:
    """Print the result; return 0 if nothing failed. Where tests failed no speed is printed."""
    tests, rows = result["tests"], result["rows"]
    for gdn, outcome in tests.items():
        print(f"tests with {gdn}: {outcome['status']} {outcome['reason']}".rstrip())
    for row in rows:
        name = f"{row['gdn']:7}checkpointing {row['checkpointing']:6}{row['side']:16}"
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
        head = f"{entry['side']} with {entry['gdn']}, checkpointing {entry['checkpointing']}"
        print(f"{head}: {in_words(entry)}")
    for kernel, profile in result["profile"].items():
        if isinstance(profile, dict):
            text = f"{1e3 * profile['device_seconds']:.1f} ms in {profile['launches']} launches"
            print(f"lora.kernel {kernel}: the device by itself takes {text}")
    profile = result["profile"]
    if profile.get("status", "ok") != "ok":
        print(f"profile {profile['status']}: {profile['reason'][-200:]}")
    statuses = {entry["status"] for entry in [*tests.values(), *rows]}
    statuses.add(profile.get("status", "ok"))
    return 0 if statuses <= {"ok", "skipped"} else 1


if __name__ == "__main__":
    sys.exit(main())
