"""Writes a report: a self-contained HTML page, the figures as SVG and PNG, and a Markdown page."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import importlib.resources
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import yaml

from shardwise.base.records.cell import RECORD
from shardwise.base.records.record import dumps
from shardwise.base.safety import write_atomically, write_output
from shardwise.base.words import seconds
from shardwise.config import UserError
from shardwise.lab.drawing.svg import drawing, png_of, svg_of, with_dark
from shardwise.lab.report import columns, learned, seeds, summary, tables, timelines
from shardwise.lab.report.curves import AGAINST
from shardwise.lab.report.figures import NAMES, draw_all
from shardwise.lab.report.folder import BenchFolder, read_bench
from shardwise.lab.report.names import fact, group_title
from shardwise.lab.report.tables import Row, make_rows
from shardwise.lab.report.timelines import TIMELINES, charts

if TYPE_CHECKING:
    from jinja2 import Environment

MARKS = {"ok": "✓", "wrong": "✗", "unchecked": "?", "not run": "…"}
"""The mark before the name of a state. Any other state has `!`."""


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
    templates = page_templates()  # before anything is written, as jinja2 may be missing
    figures = page.parent / ("figures" if page.stem == "report" else f"{page.stem}-figures")
    try:
        figures.mkdir(parents=True, exist_ok=True)
        with drawing():
            drawn, pipelines = draw_all(bench, rows), charts(bench, rows)
            _remove_others(figures, {figure.name for figure in [*drawn, *pipelines]})
            svgs = {figure.name: svg_of(figure.figure, figure.name) for figure in drawn}
            svgs |= {chart.name: chart.svg() for chart in pipelines}
            for figure in drawn:
                write_atomically(figures / f"{figure.name}.png", png_of(figure.figure))
        for name, svg in svgs.items():
            write_atomically(figures / f"{name}.svg", with_dark(svg))
        content = {
            "bench": bench,
            "rows": rows,
            "figures": drawn,
            "pipelines": pipelines,
            "figures_folder": quote(figures.name),
        }
        markdown = templates.get_template("template.md.j2").render(content)
        write_output(page.with_suffix(".md"), markdown)
        html = templates.get_template("template.html.j2").render(content | _embedded(svgs))
        write_output(page, html)
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


def page_templates() -> Environment:
    """Return the templates of the two pages. That of the HTML page escapes all content.

    Raises UserError where jinja2 is missing.
    """
    try:
        import jinja2
    except ImportError:
        raise UserError(
            "a report needs jinja2, which is not installed; pip install jinja2"
        ) from None
    templates = jinja2.Environment(
        loader=jinja2.PackageLoader("shardwise.lab", "report"),
        autoescape=jinja2.select_autoescape(["html.j2"]),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    templates.filters |= {
        "command": shlex.join,
        "fact": fact,
        "markdown": _markdown,
        "plain": _plain,
        "seconds": seconds,
    }
    shared: dict[str, Any] = {
        "columns": columns,
        "details": _details,
        "group_title": group_title,
        "learned": learned,
        "marks": MARKS,
        "seeds": seeds,
        "summary": summary,
        "tables": tables,
        "timelines": timelines,
    }
    templates.globals.update(shared)
    return templates


def _embedded(svgs: dict[str, str]) -> dict[str, Any]:
    """Return the parts of the page that are not escaped.

    The page loads nothing and allows one script, by its hash.
    """
    from markupsafe import Markup

    folder = importlib.resources.files("shardwise.lab.report")
    script = (folder / "sort.js").read_text(encoding="utf-8")
    return {
        "style": Markup((folder / "style.css").read_text(encoding="utf-8")),
        "script": Markup(script),
        "script_hash": base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        "svgs": {name: Markup(svg) for name, svg in svgs.items()},
    }


def _details(row: Row, bench: BenchFolder) -> dict[str, str]:
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


def _plain(value: Any) -> str:
    """Return a value of a run file as the file writes it."""
    return value if isinstance(value, str) else dumps(value)


def _markdown(text: str) -> str:
    """Return text on one line that Markdown shows as it is."""
    text = " ".join(text.split()).replace("\\", "\\\\").replace("&", "&amp;").replace("<", "&lt;")
    for sign in "|`*_[]":
        text = text.replace(sign, f"\\{sign}")
    return text
