"""Diagrams of the code: packages on floors with arrows that go down, and stages one by one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from tools.pictures.canvas import WIDTH, Canvas, text_width

_BOX, _HIGH, _FLOOR = 80.0, 22.0, 48.0
Arrows = Mapping[str, frozenset[str]]
Place = tuple[str, ...]
"""A package, or (importer, imported, floor) where an arrow between them passes a floor."""


def draw_house(title: str, arrows: Arrows, top: str, ground: str, note: str) -> Canvas:
    """Draw packages, each with arrows to what it may import.

    Arrows that follow from others are left out. `ground` may be imported by all.
    """
    canvas = Canvas()
    y = canvas.paragraph(0, 12, title, "h") + 6
    floors, paths = _floors(_without_shortcuts(arrows))
    centres: dict[Place, tuple[float, float]] = {}
    middles = _middles(floors, _links(paths))
    for number, floor in enumerate(reversed(floors)):
        for place in floor:
            centres[place] = middles[place], y + _FLOOR * number
    for path in paths:
        points = []
        for place in path:
            x, level = centres[place]
            points += [(x, level), (x, level + _HIGH)]
        canvas.line(points[1:-1], "faint", arrow=True)
    for place, (x, level) in centres.items():
        if len(place) == 1:
            name = top if place[0] == "top" else place[0]
            canvas.rect(x - _width(place) / 2, level, _width(place), _HIGH, "paper", stroke="c1")
            canvas.text(x, level + 15, name, anchor="middle")
    y += _FLOOR * len(floors) - 12
    canvas.rect(0, y, WIDTH, 40, "c1", 0.15, stroke="c1")
    end = canvas.paragraph(8, y + 16, ground, right=WIDTH - 4)
    canvas.paragraph(0, end + 16, note, fill="muted")
    return canvas


def _width(place: Place) -> float:
    if place == ("top",):
        return 2.4 * _BOX
    return _BOX if len(place) == 1 else 6.0


def _without_shortcuts(arrows: Arrows) -> Arrows:
    """Return the arrows that do not follow from others."""

    def below(name: str) -> frozenset[str]:
        return arrows[name].union(*map(below, arrows[name]))

    return {
        name: frozenset(t for t in to if not any(t in below(other) for other in to - {t}))
        for name, to in arrows.items()
    }


def _floors(arrows: Arrows) -> tuple[list[list[Place]], list[list[Place]]]:
    """Return what stands on each floor, the lowest first, and the places of each arrow.

    A package stands as low as what it imports allows. Arrows pass floors at places of their own.
    Places move to the mean of their neighbours on the floor above, then below, a few times.
    """

    def level(name: str) -> int:
        return 1 + max(map(level, arrows[name]), default=-1)

    levels = {name: level(name) for name in arrows}
    floors: list[list[Place]] = [[] for _ in range(max(levels.values()) + 1)]
    for name in arrows:
        floors[levels[name]].append((name,))
    paths: list[list[Place]] = []
    for name in arrows:
        for other in sorted(arrows[name]):
            passed = range(levels[name] - 1, levels[other], -1)
            between = [(name, other, str(number)) for number in passed]
            for number, place in zip(passed, between, strict=True):
                floors[number].append(place)
            paths.append([(name,), *between, (other,)])
    links = _links(paths)
    at: dict[Place, float] = {p: i / len(floor) for floor in floors for i, p in enumerate(floor)}
    for sweep in range(24):
        for floor in floors if sweep % 2 else reversed(floors):
            near = set().union(*(links.get(place, ()) for place in floor)) - {*floor}
            means = {
                place: sum(at[n] for n in links.get(place, ()) if n in near)
                / max(1, len(links.get(place, ())))
                for place in floor
            }
            floor.sort(key=lambda place: (means[place], place))
            for index, place in enumerate(floor):
                at[place] = (index + 0.5) / len(floor)
    return floors, paths


def _links(paths: Sequence[Sequence[Place]]) -> dict[Place, list[Place]]:
    """Return what each place is joined to on the floors above and below."""
    links: dict[Place, list[Place]] = {}
    for path in paths:
        for upper, lower in pairwise(path):
            links.setdefault(upper, []).append(lower)
            links.setdefault(lower, []).append(upper)
    return links


def _middles(
    floors: Sequence[Sequence[Place]], links: Mapping[Place, Sequence[Place]]
) -> dict[Place, float]:
    """Return where places stand: near what they are joined to, side by side in their order."""
    at = {
        place: WIDTH * (index + 0.5) / len(floor)
        for floor in floors
        for index, place in enumerate(floor)
    }
    for sweep in range(60):
        for floor in floors if sweep % 2 else reversed(floors):
            wanted = [sum(at[n] for n in links[p]) / len(links[p]) for p in floor]
            halves = [_width(place) / 2 + 3 for place in floor]
            for i in range(len(floor)):
                least = wanted[i - 1] + halves[i - 1] if i else -3.0
                wanted[i] = max(wanted[i], least + halves[i])
            for i in reversed(range(len(floor))):
                is_last = i == len(floor) - 1
                most = WIDTH + 3 if is_last else wanted[i + 1] - halves[i + 1]
                wanted[i] = min(wanted[i], most - halves[i])
            at.update(zip(floor, wanted, strict=True))
    return at


def draw_stages(
    title: str,
    built: str,
    sections: Mapping[str, Sequence[str]],
    repeated: str,
    stages: Mapping[str, str],
    result: str,
) -> Canvas:
    """Draw what is done once, in sections of names, and what is repeated, with a text for each."""
    canvas = Canvas()
    y = canvas.paragraph(0, 12, title, "h") + 4
    canvas.text(0, y + 4, built, "b", "muted")
    y += 12
    for section, names in sections.items():
        y = canvas.paragraph(0, y + 14, section) - 8
        x = 0.0
        for name in names:
            width = text_width(name) + 10
            if x + width > WIDTH:
                x, y = 0.0, y + 24
            canvas.rect(x, y, width, 20, "c1", 0.15, stroke="c1")
            canvas.text(x + width / 2, y + 14, name, anchor="middle")
            x += width + 6
        y += 24
    y += 22
    canvas.text(0, y, repeated, "b", "muted")
    y += 10
    first = y
    for number, (name, text) in enumerate(stages.items(), start=1):
        high = 36.0
        canvas.rect(16, y, WIDTH - 16, high, "c2" if number == 2 else "line", 0.3)
        canvas.text(24, y + 14, f"{number}  {name}", "b")
        canvas.text(42, y + 29, text, fill="muted")
        y += high + 8
        if number < len(stages):
            canvas.line([(60, y - 8), (60, y)], "muted", arrow=True)
    canvas.line([(16, y - 26), (4, y - 26), (4, first + 18), (15, first + 18)], "muted", arrow=True)
    canvas.paragraph(16, y + 10, result)
    return canvas
