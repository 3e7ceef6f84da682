"""Diagrams as SVG of our own: shapes and texts on a canvas whose colours suit light and dark pages.

A diagram is narrow, so that its texts can be read on a telephone. Texts stay texts, in the reader's
font. A text that may not fit between the edges is an error: widths are estimated for a wide font.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Literal

from shardwise.lab.drawing.svg import PALETTE

WIDTH = 420.0
"""The width of a diagram in its own units; a text is 12 of them high."""
SCALE = 4 / 3
"""Pixels for a unit where the page has room."""
DARK = {
    "paper": "#171717",
    "ink": "#e9ecef",
    "muted": "#a3adba",
    "faint": "#7a8593",
    "line": "#3a3d42",
    "accent": "#7ab8f5",
    "bad": "#ff8a85",
    "c1": "#5ba4ea",
    "c2": "#f0a03c",
    "c3": "#34bda8",
    "c4": "#b98ae6",
    "c5": "#e784b6",
    "c6": "#b3bc50",
    "c7": "#74c8ee",
    "c8": "#b8967e",
    "c9": "#7cc79a",
    "c10": "#dcbb4c",
}
"""The colours of the palette on a dark page."""
FONTS = "system-ui,-apple-system,'Segoe UI',Roboto,'Helvetica Neue',Arial,sans-serif"
SIZES = {"": 12.0, "b": 12.0, "h": 14.0}
"""The heights of texts: plain, bold, and of a heading."""
Anchor = Literal["start", "middle", "end"]


def text_width(text: str, style: str = "") -> float:
    """Return how wide a text is at most, in units."""
    per_em = sum(
        0.36 if c in "iljtfr.,:;'|()[] " else 0.95 if c in "mwMW%→←↓" else 0.64 for c in text
    )
    return per_em * SIZES[style] * (1.0 if style == "" else 1.06)


def wrapped(text: str, width: float, style: str = "") -> list[str]:
    """Return a text as lines of at most this width."""
    lines: list[str] = []
    for word in text.split(" "):
        longer = f"{lines[-1]} {word}" if lines else word
        if lines and text_width(longer, style) <= width:
            lines[-1] = longer
        else:
            lines.append(word)
    return lines


class Canvas:
    """A drawing that grows downwards."""

    def __init__(self) -> None:
        self._shapes: list[str] = []
        self._colours: set[tuple[str, str]] = set()
        self.height = 0.0

    def rect(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        fill: str,
        opacity: float = 1.0,
        stroke: str = "",
        radius: float = 1.5,
    ) -> None:
        """Draw a rectangle; `fill` and `stroke` are names of the palette."""
        faded = "" if opacity == 1.0 else f' fill-opacity="{opacity:g}"'
        self._shapes.append(
            f'<rect {self._classes(fill, stroke)} x="{_n(x)}" y="{_n(y)}" width="{_n(width)}" '
            f'height="{_n(height)}" rx="{_n(radius)}"{faded}/>'
        )
        self._grow(y + height)

    def text(
        self,
        x: float,
        y: float,
        text: str,
        style: str = "",
        fill: str = "ink",
        anchor: Anchor = "start",
    ) -> None:
        """Write a line of text on the baseline y."""
        width = text_width(text, style)
        left = x - {"start": 0.0, "middle": width / 2, "end": width}[anchor]
        assert -1 < left < WIDTH + 1 - width, f"too wide: {text}"
        classes = self._classes(fill, extra=style)
        place = "" if anchor == "start" else f' text-anchor="{anchor}"'
        self._shapes.append(f'<text {classes} x="{_n(x)}" y="{_n(y)}"{place}>{escape(text)}</text>')
        self._grow(y + 4)

    def paragraph(
        self, x: float, y: float, text: str, style: str = "", fill: str = "ink", right: float = 0.0
    ) -> float:
        """Write a text in lines down from the baseline y; return the baseline that follows."""
        for line in wrapped(text, (right or WIDTH) - x, style):
            self.text(x, y, line, style, fill)
            y += 1.25 * SIZES[style]
        return y

    def line(
        self,
        points: Sequence[tuple[float, float]],
        stroke: str = "muted",
        arrow: bool = False,
        width: float = 1.2,
        dash: str = "",
    ) -> None:
        """Draw a line through points, with an arrow head at its end if need be."""
        path = "L".join(f"{_n(x)} {_n(y)}" for x, y in points)
        dashes = f' stroke-dasharray="{dash}"' if dash else ""
        classes = self._classes("", stroke)
        self._shapes.append(f'<path {classes} stroke-width="{_n(width)}"{dashes} d="M{path}"/>')
        if arrow:
            (x0, y0), (x1, y1) = points[-2:]
            length = ((x1 - x0) ** 2 + (y1 - y0) ** 2) ** 0.5
            dx, dy = 5 * (x1 - x0) / length, 5 * (y1 - y0) / length
            corners = ((x1, y1), (x1 - dx - dy / 2, y1 - dy + dx / 2))
            corners = (*corners, (x1 - dx + dy / 2, y1 - dy - dx / 2))
            head = "L".join(f"{_n(x)} {_n(y)}" for x, y in corners)
            self._shapes.append(f'<path {self._classes(stroke)} d="M{head}Z"/>')
        self._grow(max(y for _, y in points))

    def dot(self, x: float, y: float, fill: str = "muted", radius: float = 2.0) -> None:
        """Draw a filled circle."""
        self._shapes.append(
            f'<circle {self._classes(fill)} cx="{_n(x)}" cy="{_n(y)}" r="{_n(radius)}"/>'
        )

    def svg(self, title: str) -> str:
        """Return the drawing as an SVG file; screen readers read the title first."""
        height = self.height + 10
        self._colours.add(("f", "paper"))
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{_n(SCALE * (WIDTH + 24))}" '
            f'height="{_n(SCALE * (height + 12))}" '
            f'viewBox="-12 -12 {_n(WIDTH + 24)} {_n(height + 12)}" role="img" '
            f'aria-labelledby="title">'
        )
        paper = (
            f'<rect class="f-paper" x="-12" y="-12" width="{_n(WIDTH + 24)}" '
            f'height="{_n(height + 12)}" rx="6"/>'
        )
        lines = [
            head,
            f'<title id="title">{escape(title)}</title>',
            f"<style>{self._style()}</style>",
            paper,
            *self._shapes,
            "</svg>",
        ]
        return "\n".join(lines) + "\n"

    def _style(self) -> str:
        """Return the style sheet. It has no variables, which not every viewer of SVG knows."""
        texts = f"text{{font:{SIZES['']:g}px {FONTS}}}.b{{font-weight:600}}"
        texts += f".h{{font-size:{SIZES['h']:g}px;font-weight:650}}path{{fill:none}}"
        light, dark = (
            "".join(
                f".{kind}-{name}{{{'fill' if kind == 'f' else 'stroke'}:{palette[name]}}}"
                for kind, name in sorted(self._colours)
            )
            for palette in (PALETTE, DARK)
        )
        return f"{texts}{light}@media(prefers-color-scheme:dark){{{dark}}}"

    def _classes(self, fill: str = "", stroke: str = "", extra: str = "") -> str:
        used = [(kind, name) for kind, name in (("f", fill), ("s", stroke)) if name]
        self._colours.update(used)
        names = [f"{kind}-{name}" for kind, name in used] + ([extra] if extra else [])
        return f'class="{" ".join(names)}"'

    def _grow(self, bottom: float) -> None:
        self.height = max(self.height, bottom)


def _n(value: float) -> str:
    """Return a coordinate with at most one decimal."""
    return f"{round(value, 1) + 0.0:g}"
