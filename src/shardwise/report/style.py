"""How figures look: one palette, one set of marks, and one SVG that serves light and dark pages alike."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardwise.config import UserError
from shardwise.records.cell import SweepRecord
from shardwise.report.tables import Row
from shardwise.report.words import is_number, named_values

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# name -> (light, dark). A figure is drawn in the light colours, which a PNG keeps; in an SVG each of them becomes the
# CSS variable of its name, so no two names may share a light colour.
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
_COLOURS = ("c1", "c2", "c3", "c4", "c5", "c6", "c7", "c8")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "p", "*", "h", "<", ">")
_DASHES: tuple[Any, ...] = ("solid", (0, (5, 2)), (0, (1.5, 1.5)), (0, (6, 2, 1.5, 2)), (0, (3, 1, 1, 1, 1, 1)))
HATCHES = ("", "////", "....", "xxxx", "----", "\\\\\\\\", "oo", "++")

FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"


def colour(name: str) -> str:
    """A colour of the palette, to draw with."""
    return PALETTE[name][0]


def css_variables() -> str:
    """The palette as CSS custom properties that follow `color-scheme`."""
    colours = "".join(f"--{name}:light-dark({light},{dark});" for name, (light, dark) in PALETTE.items())
    return f"{colours}--font:{FONT};"


@dataclass(frozen=True)
class Look:
    """How a cell is drawn in every figure: not by colour alone."""

    name: str  # what the colour and the marker stand for
    variant: str  # what the dashes stand for
    colour: str
    marker: str
    dash: Any


def looks(sweep: SweepRecord, rows: Sequence[Row], apart_from: str = "") -> dict[str, Look]:
    """Cell -> its look: colour and marker by its value on the first compared axis of names, dashes by the others.

    `apart_from`: an axis that the figure shows in another way.
    """
    compared = [axis for axis in sweep.axes if axis.compared and len(axis.values) > 1 and axis.name != apart_from]
    named = [axis for axis in compared if not is_number(axis.values[0])]
    first, rest = (named + compared)[:1], [axis for axis in compared if axis not in (named + compared)[:1]]
    names: list[str] = []
    variants: list[str] = []
    found = {}
    for row in rows:
        name, variant = named_values(row.plan, sweep, first), named_values(row.plan, sweep, rest)
        for known, value in ((names, name), (variants, variant)):
            if value not in known:
                known.append(value)
        index = names.index(name)
        found[row.plan.id] = Look(
            name,
            variant,
            colour(_COLOURS[index % len(_COLOURS)]),
            _MARKERS[index % len(_MARKERS)],
            _DASHES[variants.index(variant) % len(_DASHES)],
        )
    return found


@contextmanager
def drawing() -> Generator[None]:
    """What holds while a figure is drawn and saved; UserError where matplotlib is missing."""
    try:
        import matplotlib
    except ImportError:
        raise UserError("a report needs matplotlib, which is not installed; pip install 'shardwise[report]'") from None
    settings: Any = {
        "font.family": "sans-serif",
        "font.sans-serif": ["DejaVu Sans"],  # comes with matplotlib: text has the same width on every machine
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
        "svg.fonttype": "none",  # text stays text: it can be searched, read aloud and set in the page's font
        "svg.hashsalt": "shardwise",  # the same records give the same file
    }
    with matplotlib.rc_context(settings), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from")  # a PNG's boxes; the SVG's text is whole
        yield


def svg_of(figure: Figure, name: str) -> str:
    """A figure as an `<svg>` element in the palette's CSS variables, its ids made unique by the figure's name."""
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None})
    svg = re.sub(r"<metadata>.*?</metadata>\s*", "", out.getvalue(), flags=re.DOTALL)
    svg = svg[svg.index("<svg ") :]
    return re.sub(r"<[^>]+>", lambda tag: _own(tag[0], name), svg)


def _own(tag: str, name: str) -> str:
    """A tag with its ids and references prefixed and its colours and fonts as variables; never touches text."""
    tag = re.sub(r'( id="|href="#|url\(#)', rf"\1{name}-", tag)
    for variable, (light, _) in PALETTE.items():
        tag = tag.replace(light, f"var(--{variable})")
    return tag.replace("'DejaVu Sans', sans-serif", "var(--font)").replace("'DejaVu Sans'", "var(--font)")


def svg_file(svg: str) -> str:
    """The same SVG as a file of its own: it carries the palette and follows the theme of whoever shows it."""
    style = f"<style>svg{{color-scheme:light dark;{css_variables()}}}</style>"
    head, bracket, rest = svg.partition(">")
    return f'<?xml version="1.0" encoding="utf-8"?>\n{head}{bracket}{style}{rest}'


def png_of(figure: Figure) -> bytes:
    """A figure in light colours on white, for READMEs."""
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=160, facecolor=colour("paper"), metadata={"Software": None})
    return out.getvalue()
