"""Writes a report: a self-contained HTML page, the figures as SVG and PNG, and a Markdown page."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import importlib.resources
import math
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import yaml

from shardwise import words
from shardwise.config import UserError
from shardwise.drawing.svg import drawing, png_of, svg_of
from shardwise.records.cell import RECORD
from shardwise.records.record import dumps, write_atomically
from shardwise.report.curves import AGAINST
from shardwise.report.figures import NAMES, draw_all
from shardwise.report.folder import Bench, read_bench
from shardwise.report.markdown import markdown
from shardwise.report.names import fact, group_title
from shardwise.report.panels import Drawn
from shardwise.report.summary import caveats, fastest, leanest
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
from shardwise.report.timelines import NUMBER_COLUMNS, TEXT_COLUMNS, TIMELINES, Chart, charts

if TYPE_CHECKING:
    from jinja2 import Template

HERE = importlib.resources.files("shardwise.report")
MARKS = {"ok": "✓", "wrong": "✗", "unchecked": "?", "not run": "…"}
"""The mark before the name of a state. Any other state has `!`."""
FILTERS = ("number", "scientific", "size", "seconds", "ratio", "percent", "span")
"""The functions of `words` that the template uses."""


def write_report(folder: str | Path, page: str | Path | None = None) -> Path:
    """Write the report of the bench in `folder`, and return the path of its page.

    The page is `report.html` in that folder by default. Beside `report.html` lie `report.md` and
    `figures/`, beside any other `PAGE.html` lie `PAGE.md` and `PAGE-figures/`. Raises UserError
    where the folder holds no bench, where matplotlib or jinja2 is missing, and where a file cannot
    be written.
    """
    bench = read_bench(folder)
    rows = make_rows(bench)
    page = Path(folder) / "report.html" if page is None else Path(page)
    if page.suffix != ".html":
        raise UserError(
            f"{page}: give the page a name that ends in .html; other files are written beside it"
        )
    template = _template()  # before anything is written, as jinja2 may be missing
    figures = page.parent / ("figures" if page.stem == "report" else f"{page.stem}-figures")
    try:
        figures.mkdir(parents=True, exist_ok=True)
        with drawing():
            drawn, pipelines = draw_all(bench, rows), charts(bench, rows)
            _remove_others(figures, {figure.name for figure in [*drawn, *pipelines]})
            svgs = {figure.name: svg_of(figure.figure, figure.name) for figure in drawn}
            svgs |= {chart.name: chart.svg() for chart in pipelines}
            for figure in drawn:
                (figures / f"{figure.name}.png").write_bytes(png_of(figure.figure))
        for name, svg in svgs.items():
            write_atomically(figures / f"{name}.svg", svg)
        place = quote(figures.name)
        write_atomically(page.with_suffix(".md"), markdown(bench, rows, drawn, pipelines, place))
        write_atomically(page, html(template, bench, rows, drawn, svgs, pipelines, place))
    except OSError as error:
        raise UserError(
            f"{page}: cannot write the report ({error.strerror}); choose another place with -o"
        ) from None
    return page


def _remove_others(figures: Path, names: set[str]) -> None:
    """Remove the figures of an earlier report that this one does not have, and no other files."""
    for path in [*figures.glob("*.svg"), *figures.glob("*.png")]:
        is_ours = path.stem in NAMES or path.stem.startswith((AGAINST, TIMELINES))
        if is_ours and path.stem not in names:
            path.unlink()


def _template() -> Template:
    """Return the template of the page, which escapes all content.

    Raises UserError where jinja2 is missing.
    """
    try:
        import jinja2
    except ImportError:
        raise UserError(
            "a report needs jinja2, which is not installed; pip install 'shardwise[report]'"
        ) from None
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {name: getattr(words, name) for name in FILTERS}
    environment.filters["fact"] = fact
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
    """Return the page as HTML.

    All content of records is escaped. The page allows one script, by its hash, and loads nothing.
    """
    from markupsafe import Markup

    script = (HERE / "sort.js").read_text(encoding="utf-8")
    style = (HERE / "style.css").read_text(encoding="utf-8")
    return template.render(
        style=Markup(style),
        script=Markup(script),
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
        environment=environments(rows),
        equal=equal_in_all(bench.sweep),
        groups=[_group(name, cells, bench) for name, cells in groups_of(rows).items()],
        figures={figure.name: figure for figure in drawn},
        svgs={name: Markup(svg) for name, svg in svgs.items()},
        pipelines=[(chart, Markup(svgs[chart.name])) for chart in pipelines],
        text_columns=TEXT_COLUMNS,
        number_columns=NUMBER_COLUMNS,
        costs=sorted({run.pipeline.costs for chart in pipelines for run in chart.runs}),
        rows=[(row, _details(row, bench)) for row in rows],
        group_title=lambda row: group_title(row.plan.group, bench.sweep),
        sortable=_sortable,
        plain=_plain,
    )


def _group(name: str, cells: list[Row], bench: Bench) -> dict[str, Any]:
    """Return what the template shows of a group of cells."""
    in_all = equal_in_all(bench.sweep)
    equal = bench.sweep.equal.get(name, {})
    return {
        "title": group_title(name, bench.sweep),
        "rows": cells,
        "fastest": fastest(cells),
        "leanest": leanest(cells),
        "front": {row.plan.id for row in pareto(cells)},
        "equal": {key: value for key, value in equal.items() if key not in in_all},
    }


def _details(row: Row, bench: Bench) -> dict[str, str]:
    """Return the texts that unfold below a cell's row."""
    record = row.record
    content = dataclasses.asdict(record) if record else {}
    config = content.pop("config", None)
    resolved = yaml.safe_dump(config, sort_keys=False) if config else ""
    return {
        "command": shlex.join(record.command) if record and record.command else "",
        "config": bench.run_files.get(row.plan.id) or resolved,
        "record": dumps(content, indent=1) if record else "",
        "path": f"{row.plan.id}/{RECORD}",
    }


def _sortable(value: float | None) -> str:
    """Return a number for the sorting script, or nothing where it is missing."""
    return "" if value is None or math.isnan(value) else repr(value)


def _plain(value: Any) -> str:
    """Return a config value as a run file writes it."""
    return value if isinstance(value, str) else dumps(value)
