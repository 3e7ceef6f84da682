"""Write a study's table into the guide that quotes it: `python tools/study_table.py [BENCH]
[PAGE]`.

For each strategy and group: tokens/s over the baseline's, and the peak memory of a rank in MiB.
What was not timed has no speed; a cell without figures has neither.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

from shardwise.benchmark.paired import table as markdown
from shardwise.report.folder import read_bench
from shardwise.report.names import group_title
from shardwise.report.tables import Row, groups_of, make_rows
from shardwise.words import NOTHING

ROOT = Path(__file__).parents[1]
BEGIN, END = "<!-- tools/study_table.py -->\n", "<!-- end -->\n"


def table(folder: Path) -> str:
    """Return the table of a bench's folder as Markdown, controls aside."""
    bench = read_bench(folder)
    groups = groups_of([row for row in make_rows(bench) if not row.plan.control])
    labels = dict.fromkeys(row.label for rows in groups.values() for row in rows)
    lines = []
    for label in labels:
        by_group = [{row.label: row for row in rows} for rows in groups.values()]
        lines.append([f"`{label}`", *(figures(rows.get(label)) for rows in by_group)])
    return markdown(["", *(group_title(group, bench.sweep) for group in groups)], lines) + "\n"


def figures(row: Row | None) -> str:
    """Return a cell's speed-up and peak, as in `1.79 · 37.1`."""
    if row is None or row.peak_memory_bytes is None:
        return NOTHING
    speed = NOTHING if row.speedup is None else f"{row.speedup:.2f}"
    if not row.plan.timed:
        speed = "not timed"
    return f"{speed} · {row.peak_memory_bytes / 2**20:.1f}"


def put(text: str, content: str) -> str:
    """Return a page with `content` in the place that it keeps for it."""
    pattern = re.compile(f"(?<={re.escape(BEGIN)}).*?(?={re.escape(END)})", re.DOTALL)
    assert pattern.search(text), f"the page has no lines {BEGIN.strip()} and {END.strip()}"
    return pattern.sub(lambda _: content, text)


def main(arguments: Sequence[str]) -> None:
    """Write the table of a bench (the committed study) into a page (the guide)."""
    study = ROOT / "results" / "study-cpu", ROOT / "docs" / "guides" / "choosing-a-strategy.md"
    folder, page = map(Path, (*arguments, *study[len(arguments) :]))
    page.write_text(put(page.read_text(encoding="utf-8"), table(folder)), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
