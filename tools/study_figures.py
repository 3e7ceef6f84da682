"""The figures of docs/study.md, from the records of its studies: see study_table.py.

They are narrow, so that they can be read on a telephone.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from tools.study import COLOURS, DEMO, MARKERS, WIDTH, Study, in_groups, title_of
from tools.study_bubbles import bubbles
from tools.study_lengths import lengths

from shardwise.base.words import listed
from shardwise.lab.drawing.svg import colour
from shardwise.lab.report import figures as report
from shardwise.lab.report.losses import losses
from shardwise.lab.report.panels import BAR_HEIGHT, Drawn, grid, peak_unit
from shardwise.lab.report.seeds import over_seeds, spread
from shardwise.lab.report.style import looks
from shardwise.lab.report.tables import Row

RESULTS = Path(__file__).parents[1] / "results"


def narrow(drawn: Drawn, **changes: Any) -> Drawn:
    """Return a figure of a report in the width of this page."""
    drawn.figure.set_figwidth(WIDTH)
    for wide in [*drawn.figure.legends]:
        wide.remove()
        names = [text.get_text() for text in wide.get_texts()]
        draw_legend_below(drawn.figure, [*zip(names, wide.legend_handles, strict=True)])
    return replace(drawn, **changes)


def shown(groups: Sequence[tuple[str, Sequence[Row]]]) -> str:
    """Return which groups of a study a figure shows, before its caption."""
    titles = [title for title, _ in groups if title]
    return f"{listed(titles)}. " if titles else ""


# --------------------------------------------------------------- throughput and memory by strategy


def strategies(study: Study, moves: bool = False) -> Drawn | None:
    """Draw the tokens/s and the peak of each strategy, both over the baseline's of its group."""
    groups = in_groups(study)
    if len(groups) > len(MARKERS):  # others are in the table
        groups = groups[: study.num_shown]
    labels = list(dict.fromkeys(row.label for _, cells in groups for row in cells))
    if not any(row.peak_memory_bytes for row in study.rows):
        return None
    heights = [max(4, len(labels)) * BAR_HEIGHT, *[2.2] * moves]
    figure, ((left, right), *below) = grid(len(heights), 2, heights)
    figure.set_figwidth(WIDTH)
    handles = []
    # Marks of one strategy stand a little below one another, so that none hides another.
    height = 0.64 / len(groups)
    for place, (title, cells) in enumerate(groups):
        name = COLOURS[place % len(COLOURS)]
        style: dict[str, Any] = {
            "marker": MARKERS[place % len(MARKERS)],
            "color": colour(name),
            "linestyle": "none",
            "markersize": 5,
        }
        base = next((row for row in cells if row.is_baseline), None)
        for row in cells:
            style["markerfacecolor"] = colour("paper" if row.state == "unchecked" else name)
            y = labels.index(row.label) + (place - (len(groups) - 1) / 2) * height
            if row.speedup is not None and row.tokens_range and row.tokens_per_second:
                ends = [row.speedup * end / row.tokens_per_second for end in row.tokens_range]
                left.plot(ends, [y, y], color=style["color"], linewidth=1.2)
            if row.speedup is not None and row.plan.timed:
                left.plot(row.speedup, y, **style)
            if base and base.peak_memory_bytes and row.peak_memory_bytes:
                right.plot(row.peak_memory_bytes / base.peak_memory_bytes, y, **style)
        style["markerfacecolor"] = colour(name)
        handles.append((title or "all cells", left.plot([], [], **style)[0]))
    for panel, quantity in ((left, "Tokens/s"), (right, "Peak of a rank")):
        panel.set_title(f"{quantity}\nover {labels[0]}")
        panel.set_xlim(left=0)
        panel.axvline(1, color=colour("faint"), linewidth=0.9, dashes=(3, 2), zorder=0.6)
        for place in range(1, len(labels), 2):
            panel.axhspan(place - 0.5, place + 0.5, color=colour("line"), alpha=0.35, linewidth=0)
        panel.set_ylim(len(labels) - 0.5, -0.5)
        panel.grid(visible=False, axis="y")
    left.set_yticks(range(len(labels)), labels)
    right.set_yticks(range(len(labels)), [""] * len(labels))
    left.set_xlim(right=max(2.1, left.get_xlim()[1]))
    right.set_xlim(right=1.05 * right.get_xlim()[1])
    most = max(row.plan.nproc for row in study.rows)
    if most == 2:
        left.axvline(2, color=colour("accent"), linewidth=0.9, dashes=(3, 2), zorder=0.6)
        efficiency = left.secondary_xaxis("top", functions=(lambda x: 50 * x, lambda x: x / 50))
        efficiency.set_xticks([25, 50, 75, 100], ["25 %", "50 %", "75 %", "100 %"])
        efficiency.set_xlabel("Efficiency of two processes")
    draw_legend_below(figure, handles)
    caption = (
        "Medians; a line reaches from the slowest to the fastest round. Efficiency (the axis "
        "above) is what two processes have over one, divided by two: at 2.0 (dashed) it is 100 %."
    )
    for panels in below:
        caption += f" {draw_moves(panels)}"
    if any(row.state == "unchecked" for _, cells in groups for row in cells):
        caption += " Hollow: the losses of these cells could not be checked."
    if len(groups) < len(in_groups(study)):
        caption = shown(groups) + caption
    return Drawn("strategies", "Tokens/s and memory by strategy", caption, figure)


def draw_moves(panels: Sequence[Any]) -> str:
    """Draw what layers that move gain in the cases of resplit_gain.py; return that in words."""
    result = json.loads((RESULTS / "resplit" / "gain.json").read_text(encoding="utf-8"))
    names = {"flops": "large head", "wrong": "wrong costs", "slow": "slow rank"}
    for panel, figure, title in zip(panels, ("late", "whole"), ("after", "with"), strict=True):
        for place, case in enumerate(names):
            sides = {k: of["rounds"] for k, of in result["rows"][case]["seconds"][figure].items()}
            for shift, (name, seconds) in enumerate(sides.items()):
                speeds = [u / s for u, s in zip(sides["uniform"], seconds, strict=True)]
                style: dict[str, Any] = {"color": colour(COLOURS[shift]), "marker": MARKERS[shift]}
                style["label"] = "" if place else f"pp-{name}"
                panel.plot(speeds, [place + 0.27 * (shift - 1)] * len(speeds), **style)
        panel.set_title(f"Tokens/s {title} moves\nover pp-uniform")
        panel.set_yticks(range(3), names.values() if panel is panels[0] else [""] * 3)
        panel.set_ylim(2.5, -0.5)
        panel.set_xlim(0.8, 1.65)
        panel.axvline(1, color=colour("faint"), linewidth=0.9, dashes=(3, 2), zorder=0.6)
    panels[1].legend(loc="center right")
    return (
        f"Below: other pipelines, a mark for each of {result['sizes']['rounds']} rounds. Costs are "
        "FLOPs, of a model with a large head; or wrong for half of the layers; or one rank takes "
        "twice as long. There `pp-dynamic` moves layers between ranks: left the steps after its "
        "last move, right all steps, moves counted."
    )


def draw_legend_below(figure: Any, handles: Sequence[tuple[str, Any]]) -> None:
    """Draw a legend above the panels, in columns that fit the narrow figure."""
    names = [name for name, _ in handles]
    columns = max(1, int(66 // (max(map(len, names)) + 6)))
    lines = -(-len(names) // columns)
    figure.set_figheight(figure.get_figheight() + 0.2 + 0.19 * lines)
    figure.legend([line for _, line in handles], names, loc="outside upper left", ncols=columns)


# --------------------------------------------------------------------------- figures of a report


def memory(study: Study) -> Drawn | None:
    """Draw what the memory is, in the groups of the first length."""
    if not any(row.memory_parts for row in study.rows):
        return None
    groups = in_groups(study)[: study.num_shown]
    caption = "On the rank with the largest peak, at that peak. Numbers are sums in MiB."
    return narrow(report.memory(groups), caption=f"{shown(groups)}{caption}")


def sent(study: Study) -> Drawn | None:
    """Draw the bytes that were counted and those by formula, in the groups of the first length."""
    groups = in_groups(study)[: study.num_shown]
    if not any(row.sent_bytes for _, cells in groups for row in cells):
        return None
    caption = (
        "What leaves the rank that sends most in a step, if every collective runs on a ring. Bars "
        "are counted, ticks are by formula."
    )
    look = looks(study.bench.sweep, study.rows)
    return narrow(report.sent(groups, look), caption=f"{shown(groups)}{caption}")


def curves(study: Study) -> Drawn | None:
    """Draw the losses of the first group, and how far they are from those of the reference."""
    groups = in_groups(study, with_controls=True)[:1]
    if not any(row.record and row.record.losses for row in groups[0][1]):
        return None
    drawn = losses(groups, looks(study.bench.sweep, study.rows))
    for names in drawn.figure.legends:  # curves coincide, and marks have names on the right
        names.remove()
    drawn.figure.axes[1].set_title("Difference")
    drawn.figure.set_figheight(max(3.4, 0.24 * len(groups[0][1]) + 0.9))
    caption = (
        "Left, in nats per token: the curves of all cells lie on one another. Right: the largest "
        "difference of each (large mark) and that of every step (dots) from the reference; linear "
        "up to one rounding of float32, then logarithmic. Grey: up to the noise control. Red: the "
        "tolerance."
    )
    return narrow(drawn, caption=f"{shown(groups)}{caption}")


def seeds(study: Study) -> Drawn | None:
    """Draw the losses of each seed under each strategy."""
    families = over_seeds(study.bench, study.rows)
    if not families:
        return None
    words = [family.name.replace("mode ", "").split(" · ") for family in families]
    names = (" · ".join(title_of("mode", part) for part in parts) for parts in words)
    drawn = spread([replace(one, name=name) for one, name in zip(families, names, strict=True)])
    return narrow(drawn, caption=f"{drawn.caption} Losses are in nats per token.")


# ---------------------------------------------------------------------- more and more processes


def processes(study: Study) -> Drawn | None:
    """Draw the peak of each strategy by length and processes, and the bytes of the first length."""
    groups = [(title, [row for row in cells if row.measured]) for title, cells in in_groups(study)]
    if not all(cells for _, cells in groups):
        return None
    columns = min(2, len(groups))
    lines = -(-len(groups) // columns) + 1
    figure, panels = grid(lines, columns, [2.0] * lines)
    figure.set_figwidth(WIDTH)
    unit, unit_name = peak_unit(study.rows)
    numbers = sorted({row.plan.nproc for row in study.rows})
    names = list(dict.fromkeys(strategy_of(row) for row in study.rows if row.plan.nproc > 1))
    handles: dict[str, Any] = {}
    for index, (title, (alone, *cells)) in enumerate(groups):
        upper, lower = panels[index // columns][index % columns], panels[-1][index % columns]
        base = alone.peak_memory_bytes or 1
        for name in dict.fromkeys(map(strategy_of, cells)):
            place = names.index(name)
            style: dict[str, Any] = {"color": colour(COLOURS[place]), "marker": MARKERS[place]}
            style |= {"markersize": 4.5, "linewidth": 1.4}
            rows = [alone] + [row for row in cells if strategy_of(row) == name]
            x, peaks = zip(*((row.plan.nproc, row.peak_memory_bytes or 0) for row in rows))
            handles[name] = upper.plot(x, [peak / base for peak in peaks], **style)[0]
            if index < columns:
                lower.plot(x, [(row.sent_bytes or 0) / 2**20 for row in rows], **style)
        upper.set_title(f"{title}\n1 = {base / unit:.1f} {unit_name}")
        if index < columns:
            lower.set_title(f"{title}\nsent in a step, MiB")
            lower.set_xlabel("processes")
    for panel in (panel for line in panels for panel in line):
        panel.set_xscale("log", base=2)
        panel.set_xticks(numbers, [str(number) for number in numbers])
        panel.set_ylim(0, 1.3 if panel not in panels[-1] else 1.05 * panel.get_ylim()[1])
    draw_legend_below(figure, [*handles.items()])
    caption = (
        "One step of 8 rows, divided among more and more processes. Above, for each length of "
        "rows (128 tokens where none is named): the peak of the fullest rank over that of one "
        "process. Below: what leaves the rank that sends most, counted."
    )
    return Drawn("processes", "Memory by processes and length of rows", caption, figure)


def strategy_of(row: Row) -> str:
    """Return the strategy of a cell that is called after it and its processes, as `zero1-4`."""
    return row.label.removesuffix(f"-{row.plan.nproc}")


# ----------------------------------------------------------------------------------- micro-batches


def microbatches(study: Study) -> Drawn | None:
    """Draw bubble and tokens/s of each schedule over the number of micro-batches."""
    points = bubbles(study)
    numbers = sorted({point.microbatches for point in points})
    if len(numbers) < 2:
        return None
    figure, ((left, right),) = grid(1, 2, [2.7])
    figure.set_figwidth(WIDTH)
    handles = []
    dashes: dict[str, Any] = {"dashes": (3, 2), "linewidth": 1.2}
    for place, name in enumerate(dict.fromkeys(point.schedule for point in points)):
        of_schedule = [point for point in points if point.schedule == name]
        beside = 2 ** (0.08 * (place - 1))  # so that no line hides another
        x = [point.microbatches * beside for point in of_schedule]
        style: dict[str, Any] = {"color": colour(COLOURS[place]), "marker": MARKERS[place]}
        style |= {"markersize": 5, "linewidth": 1.5}
        measured = [100 * point.measured for point in of_schedule]
        ends = [[100 * end for end in point.range] for point in of_schedule]
        drawn = draw_with_range(left, x, measured, ends, style)
        handles.append((name, drawn.lines[0]))
        simulated = [
            (p.microbatches * beside, 100 * p.simulated) for p in of_schedule if p.simulated
        ]
        if simulated:
            left.plot(*zip(*simulated), color=style["color"], **dashes)
        tokens = [point.row.tokens_per_second or 0 for point in of_schedule]
        ends = [point.row.tokens_range or (0, 0) for point in of_schedule]
        draw_with_range(right, x, tokens, ends, style)
    if any(point.simulated for point in points):
        handles.append(("simulated", left.plot([], [], color=colour("muted"), **dashes)[0]))
    left.set_title("Idle share of the ranks, %")
    right.set_title("Tokens/s")
    for panel in (left, right):
        panel.set_xscale("log", base=2)
        panel.set_xticks(numbers, [str(number) for number in numbers])
        panel.set_xlabel("micro-batches of a step")
        panel.set_ylim(0, 1.05 * panel.get_ylim()[1])
    draw_legend_below(figure, handles)
    caption = (
        "One global batch in more and smaller micro-batches. Medians; whiskers reach over the "
        "rounds. Dashes: as simulated from the measured times of the units. The marks of three "
        "schedules with as many micro-batches are drawn side by side."
    )
    return Drawn("microbatches", "More micro-batches, smaller bubbles", caption, figure)


def draw_with_range(panel: Any, x: Any, middles: Any, ends: Any, style: Any) -> Any:
    """Draw a line with whiskers that reach over all rounds."""
    below = [middle - low for middle, (low, _) in zip(middles, ends, strict=True)]
    above = [high - middle for middle, (_, high) in zip(middles, ends, strict=True)]
    return panel.errorbar(x, middles, [below, above], **style)


# ---------------------------------------------------------------------------------- all of them


with_moves = partial(strategies, moves=True)
BY_STRATEGY = "A row for each strategy: left tokens/s, right memory, both over one process, by {}"
PARTS = "A bar for each {}, with LoRA and in full: what the memory of the fullest rank is"
FIGURES: dict[str, tuple[str, Callable[[Study], Drawn | None], str]] = {
    "strategies": ("cpu", with_moves, BY_STRATEGY.format("length; below, layers that move")),
    "models": ("models", strategies, BY_STRATEGY.format("kind of model")),
    "experts": ("experts", strategies, BY_STRATEGY.format("length; experts whole and spread")),
    "memory": ("cpu", memory, PARTS.format("strategy")),
    "losses": ("cpu", curves, "Left losses of all cells; right how far they are from one process"),
    "seeds": ("seeds", seeds, "Last and validation losses of each strategy, a dot for each seed"),
    "lengths": ("cpu", lengths, "A bar for each strategy: its longest row in the same memory"),
    "microbatches": ("microbatches", microbatches, "Idle share and tokens/s by micro-batches"),
    "sent": ("cpu", sent, "A bar for each strategy: bytes that a rank sends; ticks are by formula"),
    "processes": ("processes", processes, "Memory of strategies by processes and length of rows"),
    "memory-compositions": ("compositions", memory, PARTS.format("composition of strategies")),
    "memory-demo": (DEMO, memory, PARTS.format("strategy")),
}
"""The study of each figure, what draws it, and what it shows, for who cannot see it."""
