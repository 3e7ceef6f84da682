"""The committed table of injected faults, and its page."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from tests.faults.cases import cases

ROOT = Path(__file__).parents[2]
TABLE, PAGE = ROOT / "results" / "faults.json", ROOT / "results" / "faults.md"
SAME, STOPPED = "same", "stopped, resumed"
"""The outcomes that are right: the run ended as the undisturbed one; or it ended with one line, and
the run that went on ended as the undisturbed one."""


def is_right(row: dict[str, Any]) -> bool:
    """Whether an outcome is one that may be."""
    return row.get("outcome") in (SAME, STOPPED) and row["lost_steps"] == 0


def read_table() -> dict[str, dict[str, Any]]:
    """The rows by the keys of their cases."""
    if not TABLE.exists():
        return {}
    rows: dict[str, dict[str, Any]] = json.loads(TABLE.read_text(encoding="utf-8"))["cases"]
    return rows


def write_table(rows: dict[str, dict[str, Any]], environment: dict[str, Any]) -> None:
    """Write the table and its page."""
    rows = dict(sorted(rows.items()))
    content = {"environment": environment, "cases": rows}
    unfinished = TABLE.with_suffix(".part")
    unfinished.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    unfinished.replace(TABLE)
    PAGE.write_text(page(rows), encoding="utf-8")


def page(rows: dict[str, dict[str, Any]]) -> str:
    """The page of the table."""
    right = sum(map(is_right, rows.values()))
    lost = sum(row.get("lost_steps", 0) for row in rows.values())
    left = len(cases()) - len(rows)
    lines = [
        "# Injected faults",
        "",
        "`make faults` injects each fault into a real run of a tiny model, and writes "
        "[faults.json](faults.json) and this page.",
        "",
        *([f"{left} of the program's {len(cases())} cases have no row yet.", ""] if left else []),
        f"Of {len(rows)} cases {right} ended right, {len(rows) - right} did not; steps lost beyond "
        f"the last checkpoint: {lost}. *Same*: the run ended with every loss and the result of the "
        "undisturbed run, bit for bit. *Stopped*: it ended with one line, and the run that went on "
        "(`--resume auto`, or the launcher's restart) ended so. A command that was killed or "
        "interrupted itself may end without a line. Where the run went on in another layout, or "
        "under ddp over four processes, losses agree to 1e-6 and each tensor to 1e-5 of its norm.",
        "",
        "*No case* has a number wrong that reaches all copies alike, as a gradient before it is "
        "added up over ranks does: [what no run sees]"
        "(../docs/guides/stops-and-failures.md#a-device-computes-wrong-numbers).",
        "",
    ]
    for title, by in (("fault", _fault), ("phase", _phase), ("layout", lambda row: row["layout"])):
        lines += [f"| {title} | cases | same | stopped | wrong |", "|---|---:|---:|---:|---:|"]
        for name in sorted({by(row) for row in rows.values()}):
            counts = Counter(row["outcome"] for row in rows.values() if by(row) == name)
            wrong = counts.total() - counts[SAME] - counts[STOPPED]
            numbers = (counts.total(), counts[SAME], counts[STOPPED], wrong)
            lines.append(f"| {name} | {' | '.join(map(str, numbers))} |")
        lines.append("")
    return "\n".join(lines)


def _fault(row: dict[str, Any]) -> str:
    return f"{row['kind']}: {row['fault']}"


def _phase(row: dict[str, Any]) -> str:
    return row["phase"] or "between two runs"
