"""The report as Markdown, for a README: the cells and the figures."""

from __future__ import annotations

from collections.abc import Sequence

from shardwise.report.folder import Bench
from shardwise.report.names import fact, group_title
from shardwise.report.panels import Drawn
from shardwise.report.summary import caveats, fastest, leanest
from shardwise.report.tables import Row, environments, groups_of
from shardwise.report.timelines import NUMBER_COLUMNS, TEXT_COLUMNS, Chart
from shardwise.words import number, percent, ratio, scientific, size, span

COLUMNS = (
    "cell",
    "state",
    "processes",
    "tokens/s",
    "min – max",
    "speed-up",
    "peak memory",
    "less than ddp",
    "difference",
)


def markdown(
    bench: Bench,
    rows: Sequence[Row],
    drawn: Sequence[Drawn],
    pipelines: Sequence[Chart],
    figures_folder: str,
) -> str:
    """Return the report as Markdown.

    `figures_folder` is the folder of the figures, relative to the page.
    """
    lines = [f"# {_escape(bench.sweep.title)}", ""]
    lines += [f"- {_escape(sentence)}" for sentence in caveats(rows)]
    lines += [f"- {_escape(line)}" for line in _environment(rows)]
    for name, cells in groups_of(rows).items():
        lines += _group(group_title(name, bench.sweep), cells)
    for figure in drawn:
        lines += ["", f"![{figure.title}]({figures_folder}/{figure.name}.png)"]
    for chart in pipelines:
        lines += _chart(chart, figures_folder)
    return "\n".join(lines) + "\n"


def _environment(rows: Sequence[Row]) -> list[str]:
    """Return a line on where the cells ran, if any did."""
    facts = []
    for key, values in environments(rows).items():
        if any(values):
            facts.append(f"{key} {' / '.join(map(fact, values))}")
    return [", ".join(facts)] if facts else []


def _group(title: str, cells: Sequence[Row]) -> list[str]:
    """Return the lines on a group of cells: its title, its best cells, and the table of all."""
    lines = [""]
    if title:
        lines += [f"## {_escape(title)}", ""]
    lines += [f"{_best('Fastest', *fastest(cells))}; {_best('least memory', *leanest(cells))}.", ""]
    lines += _head(COLUMNS[:2], COLUMNS[2:])
    return lines + [_line(_table_cells(row)) for row in cells]


def _best(label: str, names: str, figure: str) -> str:
    """Return the best cells of a group in one figure."""
    return f"{label}: **{_escape(names)}**, {_escape(figure)}" if names else f"{label}: {figure}"


def _table_cells(row: Row) -> list[str]:
    """Return a cell's row under COLUMNS."""
    state = f"**{row.state}**" if row.state == "wrong" else row.state
    if not row.plan.timed:
        state += ", not timed"
    if row.reason:
        state += f": {_escape(row.reason)}"
    return [
        _escape(row.label),
        state,
        str(row.plan.nproc),
        number(row.tokens_per_second),
        span(row.tokens_range),
        ratio(row.speedup),
        size(row.peak_memory_bytes),
        percent(row.saving),
        scientific(row.verdict.difference if row.verdict else None),
    ]


def _chart(chart: Chart, figures_folder: str) -> list[str]:
    """Return the lines on a chart of pipelines: its title, its table, and the chart."""
    title = " · ".join(filter(None, ["Pipeline timelines", chart.title]))
    lines = ["", f"## {_escape(title)}", "", *_head(TEXT_COLUMNS, NUMBER_COLUMNS)]
    lines += [_line([_escape(text) for text in (*run.texts, *run.numbers)]) for run in chart.runs]
    return [*lines, "", f"![What each rank did in a step]({figures_folder}/{chart.name}.svg)"]


def _head(text_columns: Sequence[str], number_columns: Sequence[str]) -> list[str]:
    """Return the head of a table. Columns of numbers are aligned on the right."""
    alignment = ["---"] * len(text_columns) + ["---:"] * len(number_columns)
    return [_line([*text_columns, *number_columns]), _line(alignment)]


def _line(table_cells: Sequence[str]) -> str:
    return f"| {' | '.join(table_cells)} |"


def _escape(text: str) -> str:
    """Return text on one line that Markdown shows as it is."""
    text = " ".join(text.split()).replace("\\", "\\\\").replace("&", "&amp;").replace("<", "&lt;")
    for sign in "|`*_[]":
        text = text.replace(sign, f"\\{sign}")
    return text
