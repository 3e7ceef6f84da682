"""Draws what `shardwise plan` has found as one HTML page."""

import importlib.resources
from typing import Any

from shardwise.base.layouts import strategies
from shardwise.base.words import number, seconds, size
from shardwise.lab.drawing.text_table import TextTable
from shardwise.lab.report.page import page_templates

COLOURS = ("#3b6fb6", "#d98032", "#4c9a5b", "#b6524e", "#8065a9", "#8a6a54", "#8f98a5", "#c2a33a")
"""One for each part."""
WIDTH, HEIGHT = 620, 300
"""Size of the plane, in pixels."""
WIDEST = 1.5
"""Where the plane and the bars of memory end, in limits of a device."""
SHARED = {
    "tp": "the computation of each layer: every rank has some heads and features",
    "cp": "the tokens of a row, and under fsdp2 its weights too",
    "ep": "experts: tokens go to the rank that has theirs",
    "dp_expert": "nothing: they add up gradients of the same experts",
    "dp_shard": "weights, gradients or states of one replica; each has other rows",
    "dp_replicate": "nothing: they add up gradients",
    "pp": "the layers: each stage has some, and sends hidden states to the next",
}
"""Parts that the ranks along an axis divide among them."""
MOST_RANKS = 128
"""Most ranks that the grid draws; of more, it draws the first ones."""


def page(plan: dict[str, Any]) -> str:
    """Return the page of a plan (`planner.plan_page.page_data`)."""
    limit = plan["cluster"]["usable_bytes"]
    unfit = {choice["title"]: choice for choice in plan["simpler"] if not choice["fits"]}
    if not plan["choices"]:
        unfit = _nearest(plan["computed"]) | unfit
    shown = [*plan["choices"], *unfit.values()]
    widest = min(WIDEST * limit, _largest(shown, "memory", limit))
    slowest = _largest(plan["choices"], "time")
    best = plan["choices"][0] if plan["choices"] else None
    parts = {kind: list(zip(names, COLOURS)) for kind, names in plan["parts"].items()}
    content = {
        "plan": plan,
        "style": importlib.resources.files("shardwise.lab.report")
        .joinpath("style.css")
        .read_text("utf-8"),
        "parts": parts,
        "memory": [bar(choice, "memory", parts, widest) for choice in shown],
        "time": [bar(choice, "time", parts, slowest) for choice in plan["choices"]],
        "stages": [bar(stage, "memory", parts, widest) for stage in stages(best)],
        "limit_share": 100 * limit / widest,
        "points": points(plan),
        "plane": (WIDTH, HEIGHT, WIDTH / WIDEST),
        "fastest": _fastest(plan),
        "ranks": ranks(best["division"], plan["cluster"]) if best else [],
        "groups": groups(plan) if best else None,
        "most_ranks": MOST_RANKS,
        "refused": [*dict.fromkeys(plan["refused"].values())],
        "words": {"size": size, "number": number},
    }
    return page_templates().get_template("plan.html.j2").render(content)


def bar(choice: dict[str, Any], kind: str, parts: dict[str, Any], most: float) -> dict[str, Any]:
    """Return a stacked bar: the title of a choice, and its parts as percents of the longest bar."""
    text = size if kind == "memory" else seconds
    pieces = [
        {
            "name": part,
            "text": f"{part}: {text(choice[kind][part])}",
            "share": 100 * choice[kind][part] / most,
            "colour": colour,
        }
        for part, colour in parts[kind]
    ]
    return {
        "title": choice["title"],
        "pieces": pieces,
        "total": text(choice[kind]["total"]),
        "is_cut": choice[kind]["total"] > most,
        "fit": choice["fit"],
    }


def stages(choice: dict[str, Any] | None) -> list[dict[str, Any]]:
    """Return the stages of a pipeline that differ, each as a choice of which one bar is drawn."""
    if choice is None or len(choice["stages"]) < 2:
        return []
    return [
        {"title": f"stage {place}", "memory": memory, "fit": choice["fit"]}
        for place, memory in choice["stages"].items()
    ]


def points(plan: dict[str, Any]) -> list[dict[str, Any]]:
    """Return every computed choice as a point of the plane memory (right) x throughput (up)."""
    choices = plan["computed"]
    limit = plan["cluster"]["usable_bytes"]
    # What needs several times the memory lies at the right edge.
    widest = WIDEST * limit
    fastest = _fastest(plan)
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


def groups(plan: dict[str, Any]) -> TextTable:
    """Return for each axis of several ranks the groups of its ranks, and what these share."""
    strategy = strategies()[plan["choices"][0]["division"]["data"]]
    shared = SHARED | ({strategy.axis: strategy.shares} if strategy.shares else {})
    rows = [(axis, text, shared[axis.removesuffix("_cp")]) for axis, text in plan["groups"].items()]
    return TextTable(("axis", "groups of ranks", "what the ranks of one divide"), rows)


def _nearest(choices: list[dict[str, Any]], most: int = 5) -> dict[str, Any]:
    """Return by title the choices that need least memory, the least first."""
    nearest: dict[str, Any] = {}
    for choice in sorted(choices, key=lambda choice: choice["memory"]["total"]):
        if len(nearest) < most:
            nearest.setdefault(choice["title"], choice)
    return nearest


def _fastest(plan: dict[str, Any]) -> float:
    """Return the tokens per second of the fastest computed choice."""
    return max((choice["tokens_per_second"] for choice in plan["computed"]), default=1.0)


def _largest(choices: list[dict[str, Any]], kind: str, least: float = 0.0) -> float:
    return max([least, *(choice[kind]["total"] for choice in choices)]) or 1.0
