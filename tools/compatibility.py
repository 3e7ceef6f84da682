"""Write docs/reference/compatibility.md from what is offered and what was proven: `python tools/compatibility.py`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from shardwise.models.families import FAMILIES
from shardwise.parallel.compose import COMPATIBLE, LAYOUTS, REFUSED

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reference" / "compatibility.md"
RESULTS = ROOT / "results" / "parity.json"
HEAD = """\
# Which layout trains which family

A layout is named by its parts: `pp` pipeline; `ddp`, `zero1`, `zero2`, `fsdp1`, `fsdp2`, `hsdp` (fsdp2 with replicas)
over the data; `tp` tensor and `sp` sequence parallelism. A number stands where a family may run under a layout, and
says on how many processes that was proven to compute what one process computes: losses, gradients, gradient norm,
weights after three steps and what is left on disk, with LoRA and in full (docs/concepts/parity.md). Everything else
is refused before memory is taken.

The proof of an entry are the rows of [`results/parity.json`](../../results/parity.json) whose ids begin with
FAMILY-LAYOUT (in a pipeline each of its schedules has rows; here counts 1f1b) and end with the number of processes;
to run them again: `python -m tests.parity --only=FAMILY-LAYOUT-`. Families that are not listed here run under what
asks nothing of a model's inside: single, ddp, zero1, zero2, fsdp1, fsdp2, hsdp.

This page is written by `tools/compatibility.py`.
"""


def page() -> str:
    """The whole page."""
    rows = json.loads(RESULTS.read_text(encoding="utf-8"))["cells"]
    lines = [HEAD, "| layout | " + " | ".join(FAMILIES) + " |", "|---|" + "---:|" * len(FAMILIES)]
    for layout in LAYOUTS:
        if layout != "single":
            entries = [entry(family, layout, rows) for family in FAMILIES]
            lines.append(f"| {layout} | " + " | ".join(entries) + " |")
    lines += ["", "## Not offered", "", "| layout | why, and what to use |", "|---|---|"]
    lines += [f"| {layout} | {why} |" for layout, why in REFUSED.items()]
    return "\n".join(lines) + "\n"


def entry(family: str, layout: str, rows: list[dict[str, Any]]) -> str:
    """On how many processes, at most, both modes were proven; a dash where the layout is not offered."""
    if layout not in COMPATIBLE[family]:
        return "-"
    proven = [
        {row["processes"] for row in rows if is_plain(row, family, layout) and row["adapter"] == mode}
        for mode in ("lora", "full")
    ]
    return str(max(set.intersection(*proven)))


def is_plain(row: dict[str, Any], family: str, layout: str) -> bool:
    """A proof of the layout itself."""
    of_it = (row["family"], row["layout"], row["status"]) == (family, layout, "ok")
    return of_it and not row["variant"] and not row["split"] and row["schedule"] in ("", "1f1b")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
