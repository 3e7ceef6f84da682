"""Write what a study measured into the pages that quote it.

    python -m tools.study_table [--runs runs]

Each page says between two comments what belongs there, as in `<!-- tools/study_table.py speed cpu
-->`: a table of TABLES and a study, or `figure` and a name of `study_figures.FIGURES`. The studies
are the files `results/study/NAME.json`; `--runs` first writes those again whose benches have been
run to their end (study_summary.py). What has not been measured is named as such.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

from tools.paired import ratios
from tools.paired import table as markdown
from tools.study import DEMO, Studies, Study, in_groups
from tools.study_bubbles import bubbles
from tools.study_figures import FIGURES
from tools.study_summary import pack, unpack, write

from shardwise.base.safety import write_atomically
from shardwise.base.words import NOTHING, counted, listed, percent, scientific, size
from shardwise.lab.benchmark.sweep import read_sweep
from shardwise.lab.drawing.svg import drawing, svg_file
from shardwise.lab.report.folder import read_bench
from shardwise.lab.report.panels import Drawn
from shardwise.lab.report.tables import Row, interleaved, make_rows

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "docs" / "study.md"]
STUDIES = [path.stem for path in sorted((ROOT / "configs").glob("study-*.yaml"))]
CALIBRATION = "study-calibration.json"
"""What `shardwise calibrate` has measured, beside the runs; the diagram of a ring has its times."""
BEGIN, END = "<!-- tools/study_table.py {} -->\n", "<!-- end -->\n"
Figures = dict[str, tuple[Path, Drawn]]


def read_studies(results: Path) -> Studies:
    """Return the studies that have a summary, by name."""
    studies = {}
    for study in (*STUDIES, DEMO):
        if not (path := summary_of(results, study)).is_file():
            continue
        summary = json.loads(path.read_text(encoding="utf-8"))
        with tempfile.TemporaryDirectory() as folder:
            unpack(summary, Path(folder))
            bench = read_bench(folder)
        planned = {}
        if study != DEMO:
            cells = read_sweep(ROOT / "configs" / f"{study}.yaml", ROOT).cells
            planned = {cell.plan.id: cell.run for cell in cells if not cell.plan.control}
        studies[path.stem] = Study(bench, make_rows(bench), planned, summary["pipelines"])
    return studies


def summary_of(results: Path, study: str) -> Path:
    """Return the file with what a study measured."""
    return results / "study" / f"{study.removeprefix('study-')}.json"


def keep_runs(runs: Path, results: Path) -> None:
    """Write the summaries of the studies in which every cell has a record."""
    for study in (*STUDIES, DEMO):
        source, target = runs / study, summary_of(results, study)
        if study == DEMO:
            source /= "bench"
        if not source.is_dir():
            continue
        bench = read_bench(source)
        if missing := [plan.id for plan in bench.sweep.cells if plan.id not in bench.records]:
            print(f"{source}: not finished ({listed(missing)}); {target} stays as it is")
            continue
        write(pack(source), target)
    if (calibration := runs / CALIBRATION).is_file():
        (results / "study").mkdir(exist_ok=True)
        shutil.copyfile(calibration, results / "study" / "calibration.json")


# --------------------------------------------------------------------------------------- tables


def speed(study: Study) -> str:
    """Return tokens/s over the baseline's and the peak of a rank, by strategy and group."""

    def figures(row: Row | None) -> str:
        if row is None or row.peak_memory_bytes is None:
            return NOTHING
        speedup = NOTHING if row.speedup is None else f"{row.speedup:.2f}"
        if not row.plan.timed:
            speedup = "not timed"
        return f"{speedup} · {row.peak_memory_bytes / 2**20:.1f}"

    return by_group(study, figures)


def speed_by_rows(study: Study) -> str:
    """Return each strategy's tokens/s over one process's with as many rows in a micro-batch."""
    cells = {
        (row.plan.values["strategy"], row.plan.values["rows"]): row
        for row in study.rows
        if row.measured and not row.plan.control
    }
    strategies, rows = (list(dict.fromkeys(names)) for names in zip(*cells, strict=True))

    def figures(strategy: str, number: str) -> str:
        cell, one = cells.get((strategy, number)), cells.get(("single", number))
        if cell is None or one is None or not cell.tokens_per_second or not one.tokens_per_second:
            return NOTHING
        speedup = f"{cell.tokens_per_second / one.tokens_per_second:.2f}"
        if cell is one:
            speedup = f"{one.tokens_per_second:,.0f} tokens/s"
        return f"{speedup} · {(cell.peak_memory_bytes or 0) / 2**20:.1f}"

    return markdown(
        ["", *rows],
        [[f"`{name}`", *(figures(name, number) for number in rows)] for name in strategies],
    )


def by_group(study: Study, figures: Callable[[Row | None], str]) -> str:
    """Return a table of the strategies and the groups of cells; the fewer of them are columns."""
    groups = in_groups(study)
    labels = dict.fromkeys(row.label for _, rows in groups for row in rows)
    names = [f"`{label}`" for label in labels]
    titles = [title for title, _ in groups]
    of_groups = [{row.label: row for row in rows} for _, rows in groups]
    cells = [[figures(rows.get(label)) for label in labels] for rows in of_groups]
    if len(groups) <= len(labels):
        names, titles, cells = titles, names, [*zip(*cells, strict=True)]
    return markdown(
        ["", *names], [[title, *line] for title, line in zip(titles, cells, strict=True)]
    )


def sent(study: Study) -> str:
    """Return the bytes of the rank that sends most, and tokens/s over the first on as many."""
    lines = []
    for title, cells in in_groups(study):
        first: dict[int, list[float]] = {}
        for row in cells:
            speed = NOTHING
            if row.record and row.tokens_per_second:
                tokens = [entry["tokens_per_second"] for entry in row.record.rounds]
                found = ratios(tokens, first.setdefault(row.plan.nproc, tokens))["rounds"]
                speed = f"{median(found):.2f} ({min(found):.2f} to {max(found):.2f})"
            if row.predicted_bytes is not None:
                bytes_of = [size(row.sent_bytes), size(row.predicted_bytes)]
                peak = size(row.peak_memory_bytes)
                lines.append([f"`{row.label}`", row.plan.nproc, title, peak, *bytes_of, speed])
    head = ["", "processes", "", "peak of a rank", "sent in a step, counted", "by formula"]
    return markdown([*head, "tokens/s over the first on as many"], lines) if lines else ""


def bubble(study: Study) -> str:
    """Return the idle share of pipelines, measured and simulated, and tokens/s."""
    lines = []
    for point in bubbles(study):
        low, high = point.range
        slow, fast = point.row.tokens_range or (0, 0)
        lines.append(
            [
                f"`{point.schedule}`",
                point.microbatches,
                f"{percent(point.measured)} ({percent(low)} to {percent(high)})",
                percent(point.simulated),
                percent(point.formula),
                f"{point.row.tokens_per_second or 0:,.0f} ({slow:,.0f} to {fast:,.0f})",
                size(point.row.peak_memory_bytes),
            ]
        )
    head = ["", "micro-batches", "bubble", "simulated", "of equal stages"]
    return markdown([*head, "tokens/s", "peak of a rank"], lines)


def ran(study: Study) -> str:
    """Return where, when and how the cells of a study ran, in a sentence."""
    cells = [row for row in study.rows if row.record and not row.plan.control]
    controls = sum(row.plan.control for row in study.rows)
    facts = [row.record.environment for row in cells if row.record]
    values = {
        key: list(dict.fromkeys(str(fact.get(key)) for fact in facts))
        for key in ("device", "cpu_count", "torch", "commit")
    }
    started = min(entry["started"] for row in cells if row.record for entry in row.record.rounds)
    rounds = max(len(row.record.rounds) for row in cells if row.record)
    earlier = ""
    if not study.is_current:
        earlier = (
            f" The figures are of an earlier version: the sweep has {len(study.planned)} cells now."
        )
    order = "interleaved, " if rounds > 1 and interleaved(study.rows) else ""
    bad = []
    for title, group in in_groups(study):
        if names := [row.name for row in group if row.record and row.state != "ok"]:
            bad.append(f"{title}: {listed(names, most=20)}" if title else listed(names, most=20))
    largest = max((row.difference or 0 for row in cells if row.state == "ok"), default=0)
    # A commit may end with "+changes": those of a working tree.
    commits = ", ".join(f"{c[:10]}{c[40:]}" for c in values["commit"])
    return (
        f"*{counted(len(cells), 'cell')} and {counted(controls, 'control')}, "
        f"{counted(rounds, 'round')}, {order}begun on {started[:10]} on "
        f"{listed(values['cpu_count'])} cores of {listed(values['device'])}, "
        f"torch {listed(values['torch'])}, commit {commits}. "
        + (f"Not ok: {'; '.join(bad)}." if bad else "Every cell is ok.")
        + f" Losses of those that are ok differ by at most {scientific(largest)}."
        + f"{earlier}*"
    )


TABLES: dict[str, Callable[[Study], str]] = {
    "speed": speed,
    "speed_by_rows": speed_by_rows,
    "sent": sent,
    "bubble": bubble,
    "ran": ran,
}


# ---------------------------------------------------------------------------------------- pages


def content(
    kind: str, name: str, studies: Studies, figures: Figures, page: Path, results: Path
) -> str:
    """Return what belongs between two comments of a page."""
    if kind != "figure":
        table = TABLES[kind](studies[name]) if name in studies else ""
        if table and kind == "ran":
            summary = summary_of(results.absolute(), name)
            table += f" [All cells]({os.path.relpath(summary, page.absolute().parent)})"
        return table or not_measured(name, "table", studies)
    if name not in figures:
        return not_measured(FIGURES[name][0], "figure", studies)
    path, drawn = figures[name]
    where = os.path.relpath(path, page.parent)
    return f"![{FIGURES[name][2]}]({where})\n\n*{drawn.title}.* {drawn.caption}"


def not_measured(name: str, what: str, studies: Studies) -> str:
    """Return a sentence in the place of what the records of a study do not have."""
    since = "since it was changed" if name in studies else "yet"
    return f"*The {what} comes with `make study`: `configs/study-{name}.yaml` was not run {since}.*"


def write_page(page: Path, studies: Studies, figures: Figures, results: Path) -> None:
    """Write a page again, with what belongs between its comments."""
    pattern = re.escape(BEGIN).replace(r"\{\}", r"(\w+) ([\w-]+)") + f".*?{re.escape(END)}"

    def filled(found: re.Match[str]) -> str:
        kind, name = found.groups()
        text = content(kind, name, studies, figures, page, results)
        return f"{BEGIN.format(f'{kind} {name}')}\n{text}\n\n{END}"

    text, count = re.subn(pattern, filled, page.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert count, f"{page} has no place for a table"
    write_atomically(page, text)


def draw_figures(studies: Studies, folder: Path) -> Figures:
    """Draw the figures that the studies have data for."""
    folder.mkdir(parents=True, exist_ok=True)
    figures: Figures = {}
    with drawing():
        for name, (study, draw, _) in FIGURES.items():
            if study in studies and (drawn := draw(studies[study])):
                figures[name] = folder / f"{name}.svg", drawn
                write_atomically(figures[name][0], svg_file(drawn.figure, name, drawn.title))
    return figures


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=Path)
    parser.add_argument("--results", type=Path, default=ROOT / "results")
    parser.add_argument("--pages", type=Path, nargs="*", default=PAGES)
    options = parser.parse_args(arguments)
    if options.runs:
        keep_runs(options.runs, options.results)
    studies = read_studies(options.results)
    figures = draw_figures(studies, options.results.absolute() / "study")
    for page in options.pages:
        write_page(page.absolute(), studies, figures, options.results)
    print(f"drawn: {listed(list(figures), most=20)}")


if __name__ == "__main__":
    main()
