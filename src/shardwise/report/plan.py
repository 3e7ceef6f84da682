"""Draws what `shardwise plan` has found as one HTML page, from the data that `--json` prints."""

from __future__ import annotations

import importlib.resources
from typing import Any

from shardwise.report.page import page_templates
from shardwise.words import number, percent, seconds, size

MEMORY_PARTS = (
    *("weights", "gradients", "optimizer", "activations", "buffers", "temporary", "overhead"),
)
TIME_PARTS = (*("layers", "head", "recomputation", "communication", "bubble", "optimizer", "data"),)
COLOURS = ("#3b6fb6", "#d98032", "#4c9a5b", "#b6524e", "#8065a9", "#8a6a54", "#8f98a5")
"""One for each part."""
WIDTH, HEIGHT = 620, 300
"""Of the plane, in pixels."""
MOST_RANKS = 128
"""Of which the grid draws each one; of more, it draws the first ones."""


def page(plan: dict[str, Any]) -> str:
    """Return the page of a plan (`planner.plan_page.as_data`)."""
    limit = plan["cluster"]["usable_bytes"]
    shown = [*plan["choices"], *(other for other in plan["simpler"] if not other["fits"])]
    content = {
        "plan": plan,
        "style": importlib.resources.files("shardwise.report")
        .joinpath("style.css")
        .read_text("utf-8"),
        "memory": [
            bar(choice, "memory", MEMORY_PARTS, _largest(shown, "memory", limit))
            for choice in shown
        ],
        "time": [
            bar(choice, "time", TIME_PARTS, _largest(plan["choices"], "time"))
            for choice in plan["choices"]
        ],
        "limit_share": 100 * limit / _largest(shown, "memory", limit),
        "memory_legend": list(zip(MEMORY_PARTS, COLOURS)),
        "time_legend": list(zip(TIME_PARTS, COLOURS)),
        "points": points(plan),
        "plane": (WIDTH, HEIGHT),
        "ranks": ranks(plan["choices"][0]["division"], plan["cluster"]) if plan["choices"] else [],
        "most_ranks": MOST_RANKS,
        "words": {"size": size, "seconds": seconds, "number": number, "percent": percent},
    }
    return page_templates().get_template("plan.html.j2").render(content)


def bar(choice: dict[str, Any], kind: str, parts: tuple[str, ...], most: float) -> dict[str, Any]:
    """Return a stacked bar: the title of a choice, and its parts as shares of the longest bar."""
    text = size if kind == "memory" else seconds
    pieces = [
        {
            "name": part,
            "text": f"{part}: {text(choice[kind][part])}",
            "share": 100 * choice[kind][part] / most,
            "colour": colour,
        }
        for part, colour in zip(parts, COLOURS, strict=True)
    ]
    return {
        "title": choice["title"],
        "pieces": pieces,
        "total": text(choice[kind]["total"]),
        "fits": choice["fits"],
    }


def points(plan: dict[str, Any]) -> list[dict[str, Any]]:
    """Return every computed choice as a point of the plane memory (right) x throughput (up)."""
    choices = plan["computed"]
    limit = plan["cluster"]["usable_bytes"]
    # What needs several times the memory lies at the right edge.
    widest = 1.5 * limit
    fastest = max((choice["tokens_per_second"] for choice in choices), default=1.0)
    best = plan["choices"][0] if plan["choices"] else None
    return [
        {
            "x": min(choice["memory"]["total"], widest) / widest * WIDTH,
            "y": HEIGHT - choice["tokens_per_second"] / fastest * (HEIGHT - 20),
            "fits": choice["fits"],
            "is_best": choice is best or choice == best,
            "text": f"{choice['title']}, {choice['details']}: {size(choice['memory']['total'])}, "
            f"{number(choice['tokens_per_second'])} tokens/s",
        }
        for choice in choices
    ]


def ranks(division: dict[str, Any], cluster: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """Return the first ranks by node, each with its coordinates and the colour of its stage.

    Ranks of one colour hold the same layers. The axes are those of the mesh, the slowest first.
    """
    axes = ("pp", "replicas", "shards", "cp", "tp")
    number_of_all = cluster["nodes"] * cluster["per_node"]
    nodes: list[list[dict[str, Any]]] = []
    for rank in range(min(number_of_all, MOST_RANKS)):
        rest, places = rank, {}
        for axis in reversed(axes):
            rest, places[axis] = divmod(rest, division[axis])
        label = " ".join(f"{axis} {places[axis]}" for axis in axes if division[axis] > 1)
        if rank % cluster["per_node"] == 0:
            nodes.append([])
        stage = places["pp"] * len(COLOURS) // division["pp"]
        nodes[-1].append({"rank": rank, "label": label or "alone", "colour": COLOURS[stage]})
    return nodes


def _largest(choices: list[dict[str, Any]], kind: str, least: float = 0.0) -> float:
    return max([least, *(choice[kind]["total"] for choice in choices)]) or 1.0
