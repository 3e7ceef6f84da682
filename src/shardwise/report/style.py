"""The look of the figures, matplotlib's settings, and the figures as SVG and PNG.

Figures are drawn in light colours on white. A dark page inverts them by CSS; see style.css.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardwise.config import UserError
from shardwise.metrics.cell import SweepRecord
from shardwise.report.names import is_number, named_values
from shardwise.report.tables import Row

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
}
_COLOURS = ("c1", "c2", "c3", "c4", "c5", "c6", "c7", "c8")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "p", "*", "h", "<", ">")
_DASHES: tuple[Any, ...] = (
    "solid",
    (0, (5, 2)),
    (0, (1.5, 1.5)),
    (0, (6, 2, 1.5, 2)),
    (0, (3, 1, 1, 1, 1, 1)),
)
HATCHES = ("", "////", "....", "xxxx", "----", "\\\\\\\\", "oo", "++")


def colour(name: str) -> str:
    """Return a colour of the palette."""
    return PALETTE[name]


@dataclass(frozen=True)
class Look:
    """The look of a cell, the same in every figure. Cells differ in more than colour."""

    name: str  # what the colour and the marker stand for
    variant: str  # what the dashes stand for
    colour: str
    marker: str
    dash: Any


def looks(sweep: SweepRecord, rows: Sequence[Row], apart_from: str = "") -> dict[str, Look]:
    """Return the look of each cell by its id.

    Colour and marker stand for the cell's value on the first compared axis, if possible one whose
    values are not numbers. Dashes stand for its values on the other compared axes. `apart_from` is
    an axis that the figure shows in another way.
    """
    varied = [axis for axis in sweep.axes if axis.compared and len(axis.values) > 1]
    compared = [axis for axis in varied if axis.name != apart_from]
    not_numbers = [axis for axis in compared if not is_number(axis.values[0])]
    first = (not_numbers or compared)[:1]
    rest = [axis for axis in compared if axis not in first]
    names = {row.plan.id: named_values(row.plan, sweep, first) for row in rows}
    variants = {row.plan.id: named_values(row.plan, sweep, rest) for row in rows}
    colour_of = {name: place for place, name in enumerate(dict.fromkeys(names.values()))}
    dash_of = {name: place for place, name in enumerate(dict.fromkeys(variants.values()))}
    return {
        cell: Look(
            name=names[cell],
            variant=variants[cell],
            colour=colour(_COLOURS[colour_of[names[cell]] % len(_COLOURS)]),
            marker=_MARKERS[colour_of[names[cell]] % len(_MARKERS)],
            dash=_DASHES[dash_of[variants[cell]] % len(_DASHES)],
        )
        for cell in names
    }


@contextmanager
def drawing() -> Generator[None]:
    """Apply these settings of matplotlib while figures are drawn and saved.

    Raises UserError where matplotlib is missing.
    """
    try:
        import matplotlib
    except ImportError:
        raise UserError(
            "a report needs matplotlib, which is not installed; pip install 'shardwise[report]'",
        ) from None
    settings: Any = {
        "font.family": "sans-serif",
        "font.sans-serif": ["DejaVu Sans"],  # comes with matplotlib: equal widths on every machine
        "font.size": 9.0,
        "text.parse_math": False,  # names may contain a dollar sign
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
        "svg.fonttype": "none",  # text stays text: it can be searched and read aloud
        "svg.hashsalt": "shardwise",  # the same records give the same file
    }
    with matplotlib.rc_context(settings), warnings.catch_warnings():
        # The font has no emoji: a PNG shows a box, while an SVG keeps the character.
        warnings.filterwarnings("ignore", "Glyph .* missing from")
        yield


def svg_of(figure: Figure, name: str) -> str:
    """Return a figure as an `<svg>` element, which is a valid file too.

    Ids begin with the figure's name, so that several figures can stand on one page.
    """
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None})
    svg = re.sub(r"<metadata>.*?</metadata>\s*", "", out.getvalue(), flags=re.DOTALL)
    svg = svg[svg.index("<svg ") :]
    return re.sub(r"<[^>]+>", lambda tag: _with_prefix(tag[0], name), svg)


def _with_prefix(tag: str, name: str) -> str:
    """Return a tag with the figure's name before each id and each reference to one."""
    return re.sub(r'( id="|href="#|url\(#)', rf"\1{name}-", tag)


def png_of(figure: Figure) -> bytes:
    """Return a figure as PNG."""
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=160, metadata={"Software": None})
    return out.getvalue()
