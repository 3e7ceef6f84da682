"""The look of all figures: one palette, one style of matplotlib, and figures as SVG and PNG.

Figures are drawn in light colours on white. In a dark theme CSS inverts them, and keeps the hues:
that of the page, or of the file where it is one of its own.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from shardwise.config import UserError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PALETTE = {
    "paper": "#ffffff",
    "ink": "#1b1f24",
    "muted": "#5a6472",
    "faint": "#8f98a5",
    "line": "#dadee4",
    "accent": "#0b5cad",
    "bad": "#b8141a",
    "c1": "#2a6fb0",
    "c2": "#d67a00",
    "c3": "#0e8f7e",
    "c4": "#8a55b8",
    "c5": "#c2548c",
    "c6": "#7c8422",
    "c7": "#3fa2cf",
    "c8": "#7a5c48",
    "c9": "#1e5631",
    "c10": "#c9a227",
}


DARK = (
    "@media screen and (prefers-color-scheme: dark) {svg {filter: invert(0.91) hue-rotate(180deg)}}"
)
"""White becomes dark, and hues stay; the page of a report has the same rule."""


def colour(name: str) -> str:
    """Return a colour of the palette."""
    return PALETTE[name]


def require_matplotlib() -> Any:
    """Import matplotlib and return it; UserError where it is not installed."""
    try:
        import matplotlib
    except ImportError:
        raise UserError(
            "a figure needs matplotlib, which is not installed; pip install matplotlib"
        ) from None
    return matplotlib


@contextmanager
def drawing() -> Generator[None]:
    """Set the style in which figures are drawn and saved; UserError where matplotlib is missing."""
    matplotlib = require_matplotlib()
    settings: Any = {
        "font.family": "sans-serif",
        # It comes with matplotlib, so text has the same width on every machine.
        "font.sans-serif": ["DejaVu Sans"],
        "font.size": 9.0,
        "text.parse_math": False,  # names may hold a dollar sign
        "text.color": colour("ink"),
        "axes.labelcolor": colour("muted"),
        "axes.edgecolor": colour("line"),
        "axes.facecolor": "none",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.titlesize": 9.5,
        "axes.titleweight": "bold",
        "axes.titlelocation": "left",
        "axes.titlepad": 8.0,
        "axes.labelsize": 8.5,
        "axes.axisbelow": True,
        "axes.grid": True,
        "grid.color": colour("line"),
        "grid.linewidth": 0.6,
        "xtick.color": colour("line"),
        "ytick.color": colour("line"),
        "xtick.labelcolor": colour("muted"),
        "ytick.labelcolor": colour("muted"),
        "xtick.labelsize": 8.0,
        "ytick.labelsize": 8.5,
        "xtick.major.size": 3.0,
        "ytick.major.size": 0.0,
        "xtick.minor.size": 0.0,
        "ytick.minor.size": 0.0,
        "legend.frameon": False,
        "legend.fontsize": 8.5,
        "hatch.linewidth": 0.7,
        "hatch.color": colour("paper"),
        "figure.facecolor": colour("paper"),
        "savefig.facecolor": colour("paper"),
        # Text stays text: a reader can search it, a screen reader can read it, the page sets it.
        "svg.fonttype": "none",
        "svg.hashsalt": "shardwise",  # the same records give the same file
    }
    with matplotlib.rc_context(settings), warnings.catch_warnings():
        # A PNG then shows a box; the SVG keeps the character.
        warnings.filterwarnings("ignore", "Glyph .* missing from")
        yield


def svg_of(figure: Figure, name: str, title: str | None = None) -> str:
    """Return a figure as an `<svg>` element, which is a valid file too.

    Ids begin with `name`, so that several figures can stand on one page. `title` is read by screen
    readers.
    """
    out = io.StringIO()
    metadata = {"Date": None} if title is None else {"Date": None, "Title": title}
    figure.savefig(out, format="svg", metadata=metadata)
    svg = re.sub(r"<metadata>.*?</metadata>\s*", "", out.getvalue(), flags=re.DOTALL)
    svg = svg[svg.index("<svg ") :]
    begin = re.compile(r'( id="|href="#|url\(#)')  # of an id, and of each reference to one
    return re.sub(r"<[^>]+>", lambda tag: begin.sub(rf"\1{name}-", tag[0]), svg)


def svg_file(figure: Figure, name: str, title: str | None = None) -> str:
    """Return a figure as a file of its own, which is dark where its reader has a dark theme.

    It is for a Markdown page; `name` and `title` as in `svg_of`.
    """
    return with_dark(svg_of(figure, name, title))


def with_dark(svg: str) -> str:
    """Return an SVG as a file of its own, which is dark where its reader has a dark theme."""
    head, end, rest = svg.partition(">")
    return f"{head}{end}\n <style>{DARK}</style>{rest}"


def png_of(figure: Figure) -> bytes:
    """Return a figure as a PNG in light colours on white, for READMEs."""
    out = io.BytesIO()
    metadata = {"Software": None}
    figure.savefig(out, format="png", dpi=160, facecolor=colour("paper"), metadata=metadata)
    return out.getvalue()
