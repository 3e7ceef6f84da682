"""The look of all figures: one palette, one style of matplotlib, and SVG for light and dark pages.

A figure is drawn in the light colours of PALETTE, which a PNG keeps. In an SVG each colour becomes
the CSS variable of its name, so that the page, or the file itself, can give it another value.
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

# name -> (light, dark). No two names share a light colour: `svg_of` finds the name by it.
PALETTE = {
    "paper": ("#ffffff", "#15181d"),
    "panel": ("#f5f6f8", "#1d2127"),
    "ink": ("#1b1f24", "#e9ecef"),
    "muted": ("#5a6472", "#a3adba"),
    "faint": ("#8f98a5", "#7a8593"),
    "line": ("#dadee4", "#363d47"),
    "accent": ("#0b5cad", "#7ab8f5"),
    "bad": ("#b8141a", "#ff8a85"),
    "good": ("#1b7a43", "#6fd39a"),
    "c1": ("#2a6fb0", "#6aaee8"),
    "c2": ("#d67a00", "#f5ab4a"),
    "c3": ("#0e8f7e", "#4cc9b6"),
    "c4": ("#8a55b8", "#c197e6"),
    "c5": ("#c2548c", "#ee92bf"),
    "c6": ("#7c8422", "#bcc35a"),
    "c7": ("#3fa2cf", "#8fd3f2"),
    "c8": ("#7a5c48", "#c4a48d"),
}

FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"


def colour(name: str) -> str:
    """Return the light value of a colour of the palette, to draw with."""
    return PALETTE[name][0]


def css_variables() -> str:
    """Return the palette as CSS custom properties that follow `color-scheme`."""
    colours = [f"--{name}:light-dark({light},{dark});" for name, (light, dark) in PALETTE.items()]
    return f"{''.join(colours)}--font:{FONT};"


def require_matplotlib() -> Any:
    """Import matplotlib and return it; UserError where it is not installed."""
    try:
        import matplotlib
    except ImportError:
        command = "pip install 'shardwise[report]'"
        raise UserError(f"a figure needs matplotlib, which is not installed; {command}") from None
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
        "figure.facecolor": "none",
        "savefig.facecolor": "none",
        # Text stays text: a reader can search it, a screen reader can read it, the page sets it.
        "svg.fonttype": "none",
        "svg.hashsalt": "shardwise",  # the same records give the same file
    }
    with matplotlib.rc_context(settings), warnings.catch_warnings():
        # A PNG then shows a box; the SVG keeps the character.
        warnings.filterwarnings("ignore", "Glyph .* missing from")
        yield


def svg_of(figure: Figure, name: str, title: str | None = None) -> str:
    """Return a figure as an `<svg>` element in the palette's CSS variables.

    `name` becomes the prefix of all ids, so that two figures fit into one page. `title` is read by
    screen readers.
    """
    out = io.StringIO()
    metadata = {"Date": None} if title is None else {"Date": None, "Title": title}
    figure.savefig(out, format="svg", metadata=metadata)
    svg = re.sub(r"<metadata>.*?</metadata>\s*", "", out.getvalue(), flags=re.DOTALL)
    svg = svg[svg.index("<svg ") :]
    return re.sub(r"<[^>]+>", lambda tag: _with_variables(tag[0], name), svg)


def _with_variables(tag: str, name: str) -> str:
    """Prefix the ids and references of a tag, and put variables for its colours and fonts."""
    tag = re.sub(r'( id="|href="#|url\(#)', rf"\1{name}-", tag)
    for variable, (light, _) in PALETTE.items():
        tag = tag.replace(light, f"var(--{variable})")
    fonts = "'DejaVu Sans', sans-serif"
    return tag.replace(fonts, "var(--font)").replace("'DejaVu Sans'", "var(--font)")


def svg_file(svg: str) -> str:
    """Return an `<svg>` element as a file with the palette in it, in the theme of its viewer."""
    style = f"<style>svg{{color-scheme:light dark;{css_variables()}}}</style>"
    head, bracket, rest = svg.partition(">")
    return f'<?xml version="1.0" encoding="utf-8"?>\n{head}{bracket}{style}{rest}'


def png_of(figure: Figure) -> bytes:
    """Return a figure as a PNG in light colours on white, for READMEs."""
    out = io.BytesIO()
    metadata = {"Software": None}
    figure.savefig(out, format="png", dpi=160, facecolor=colour("paper"), metadata=metadata)
    return out.getvalue()
