"""Write a report: one self-contained HTML page, the figures as SVG and PNG, and a Markdown table for READMEs."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import importlib.resources
import math
import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import yaml

from shardwise.config import UserError
from shardwise.drawing.svg import css_variables, drawing, png_of, svg_file, svg_of
from shardwise.records.cell import RECORD
from shardwise.records.record import dumps
from shardwise.report import words
from shardwise.report.caveats import caveats
from shardwise.report.curves import AGAINST
from shardwise.report.figures import NAMES, draw_all
from shardwise.report.folder import Bench, read_bench
from shardwise.report.headline import in_short
from shardwise.report.panels import Drawn
from shardwise.report.tables import (
    Row,
    counts,
    environments,
    equal_in_all,
    groups_of,
    interleaved,
    make_rows,
    pareto,
    rounds_of,
    scaling_kind,
)
from shardwise.report.timelines import FIGURES, TIMELINES, WORDS, Chart, charts

if TYPE_CHECKING:
    from jinja2 import Template

HERE = importlib.resources.files("shardwise.report")
MARKS = {"ok": "✓", "wrong": "✗", "unchecked": "?", "not run": "…"}
"""Before the name of a state; any other state has a `!`."""

HEAD = ["cell", "state", "processes", "tokens/s", "min – max", "speed-up", "peak memory", "less than ddp", "departure"]
"""Of the table in Markdown."""


def write_report(folder: str | Path, page: str | Path | None = None) -> Path:
    """Write the page (default `report.html` in the bench's folder) with its table and figures beside it; its path.

    Beside `report.html` lie `report.md` and `figures/`, beside another `PAGE.html` `PAGE.md` and `PAGE-figures/`.

    UserError where the folder holds no bench, and where matplotlib or jinja2 is missing.
    """
    bench = read_bench(folder)
    rows = make_rows(bench)
    page = Path(folder) / "report.html" if page is None else Path(page)
    if page.suffix != ".html":
        raise UserError(f"{page}: a page needs a name that ends in .html; its table and figures come beside it")
    template = _template()  # before anything is written: jinja2 may be missing
    figures = page.parent / ("figures" if page.stem == "report" else f"{page.stem}-figures")
    try:
        figures.mkdir(parents=True, exist_ok=True)
        with drawing():
            drawn, pipelines = draw_all(bench, rows), charts(bench, rows)
            _clear(figures, {figure.name for figure in [*drawn, *pipelines]})
            svgs = {figure.name: svg_of(figure.figure, figure.name) for figure in drawn}
            svgs |= {chart.name: chart.svg() for chart in pipelines}
            for name, svg in svgs.items():
                (figures / f"{name}.svg").write_text(svg_file(svg), encoding="utf-8")
            for figure in drawn:
                (figures / f"{figure.name}.png").write_bytes(png_of(figure.figure))
        place = quote(figures.name)
        page.with_suffix(".md").write_text(markdown(bench, rows, drawn, pipelines, place), encoding="utf-8")
        _write_whole(page, html(template, bench, rows, drawn, svgs, pipelines, place))
    except OSError as error:
        raise UserError(f"{page}: cannot write the report ({error.strerror}); give another place with -o") from None
    return page


def _clear(figures: Path, names: set[str]) -> None:
    """Remove the figures that an earlier report drew here and this one does not; nobody else's files."""
    for path in [*figures.glob("*.svg"), *figures.glob("*.png")]:
        if path.stem not in names and (path.stem in NAMES or path.stem.startswith((AGAINST, TIMELINES))):
            path.unlink()


def _write_whole(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def _template() -> Template:
    """The page's template, which escapes whatever it is given; UserError where jinja2 is missing."""
    try:
        import jinja2
    except ImportError:
        raise UserError("a report needs jinja2, which is not installed; pip install 'shardwise[report]'") from None
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    formats = ("number", "scientific", "size", "seconds", "times", "percent", "span", "fact")
    environment.filters |= {name: getattr(words, name) for name in formats}
    return environment.from_string((HERE / "template.html.j2").read_text(encoding="utf-8"))


def html(
    template: Template,
    bench: Bench,
    rows: Sequence[Row],
    drawn: Sequence[Drawn],
    svgs: dict[str, str],
    pipelines: Sequence[Chart],
    figures_folder: str,
) -> str:
    """The page. Whatever comes from records is escaped; the only script that may run is the one whose hash is named."""
    from markupsafe import Markup as safe

    script, style = ((HERE / name).read_text(encoding="utf-8") for name in ("sort.js", "style.css"))
    return template.render(
        style=safe(f":root{{{css_variables()}}}\n{style}"),
        script=safe(script),
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        sweep=bench.sweep,
        command=shlex.join(bench.sweep.command),
        counts=counts(rows),
        marks=MARKS,
        rounds=rounds_of(rows),
        interleaved=interleaved(rows),
        figures_folder=figures_folder,
        scaling=scaling_kind(bench.sweep),
        caveats=caveats(rows),
        in_short=in_short(bench, rows),
        environment=environments(rows),
        equal=equal_in_all(bench.sweep),
        groups=[
            {
                "title": words.group_title(name, bench.sweep),
                "rows": cells,
                "front": {row.plan.id for row in pareto(cells)},
                "equal": {
                    key: value
                    for key, value in bench.sweep.equal.get(name, {}).items()
                    if key not in equal_in_all(bench.sweep)
                },
            }
            for name, cells in groups_of(rows).items()
        ],
        figures={figure.name: {"drawn": figure, "svg": safe(svgs[figure.name])} for figure in drawn},
        pipelines=[{"chart": chart, "svg": safe(svgs[chart.name])} for chart in pipelines],
        pipeline_head=(WORDS, FIGURES),
        costs=sorted({run.pipeline.costs for chart in pipelines for run in chart.runs}),
        rows=[(row, _details(row, bench)) for row in rows],
        group_title=lambda row: words.group_title(row.plan.group, bench.sweep),
        sortable=_sortable,
        plain=_plain,
    )


def _details(row: Row, bench: Bench) -> dict[str, str]:
    """What is one click away from a cell's row."""
    record = row.record
    content = dataclasses.asdict(record) if record else {}
    config = content.pop("config", None)
    return {
        "command": shlex.join(record.command) if record and record.command else "",
        "config": bench.run_files.get(row.plan.id) or (yaml.safe_dump(config, sort_keys=False) if config else ""),
        "record": dumps(content, indent=1) if record else "",
        "where": f"{row.plan.id}/{RECORD}",
    }


def _sortable(value: float | None) -> str:
    """A number as a script compares it; what is not there goes last."""
    return "" if value is None or math.isnan(value) else repr(value)


def _plain(value: Any) -> str:
    """A config value as a run file writes it."""
    return value if isinstance(value, str) else dumps(value)


def markdown(
    bench: Bench, rows: Sequence[Row], drawn: Sequence[Drawn], pipelines: Sequence[Chart], figures_folder: str
) -> str:
    """The table of the cells and the figures, for a README."""
    lines = [f"# {_cell(bench.sweep.title)}", ""]
    short = [f"{title}: {text}" if title else text for title, text in in_short(bench, rows)]
    lines += [f"- {_cell(line)}" for line in [*short, *caveats(rows)]]
    places = environments(rows)
    where = ", ".join(f"{key} {' / '.join(map(words.fact, values))}" for key, values in places.items() if any(values))
    lines += [f"- {_cell(where)}"] if where else []
    for name, cells in groups_of(rows).items():
        title = words.group_title(name, bench.sweep)
        lines += ["", *([f"## {_cell(title)}", ""] if title else [])]
        lines += [_line(HEAD), _line(["---", "---", *["---:"] * (len(HEAD) - 2)])]
        for row in cells:
            figures = [
                str(row.plan.nproc),
                words.number(row.tokens_per_second),
                words.span(row.tokens_range),
                words.times(row.speedup),
                words.size(row.peak_memory_bytes),
                words.percent(row.saving),
                words.scientific(row.verdict.departure if row.verdict else None),
            ]
            state = f"**{row.state}**" if row.state == "wrong" else row.state
            state += "" if row.plan.timed else ", not timed"
            lines.append(_line([_cell(row.label), state + (f": {_cell(row.reason)}" if row.reason else ""), *figures]))
    lines += [line for one in drawn for line in ("", f"![{one.title}]({figures_folder}/{one.name}.png)")]
    for chart in pipelines:
        lines += ["", f"## {_cell(' · '.join(filter(None, ['Pipeline timelines', chart.title])))}", ""]
        lines += [_line([*WORDS, *FIGURES]), _line([*["---"] * len(WORDS), *["---:"] * len(FIGURES)])]
        lines += [_line([_cell(text) for text in (*run.words, *run.figures)]) for run in chart.runs]
        lines += ["", f"![What each rank did in a step]({figures_folder}/{chart.name}.svg)"]
    return "\n".join(lines) + "\n"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(text: str) -> str:
    """Text that Markdown shows as it is, on one line."""
    text = " ".join(text.split()).replace("\\", "\\\\").replace("&", "&amp;").replace("<", "&lt;")
    for sign in "|`*_[]":
        text = text.replace(sign, f"\\{sign}")
    return text
