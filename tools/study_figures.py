"""The figures of docs/study.md, from the records of its studies: see study_table.py.

They are narrow, so that they can be read on a telephone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tools.study import COLOURS, DEMO, MARKERS, WIDTH, Studies, Study, in_groups, title_of
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


def strategies(study: Study) -> Drawn | None:
    """Draw the tokens/s and the peak of each strategy, both over the baseline's of its group."""
    groups = in_groups(study)
    if len(groups) > len(MARKERS):  # others are in the table
        groups = groups[: study.num_shown]
    labels = list(dict.fromkeys(row.label for _, cells in groups for row in cells))
    if not any(row.peak_memory_bytes for row in study.rows):
        return None
    figure, ((left, right),) = grid(1, 2, [max(4, len(labels)) * BAR_HEIGHT])
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
    if any(row.state == "unchecked" for _, cells in groups for row in cells):
        caption += " Hollow: the losses of these cells could not be checked."
    if len(groups) < len(in_groups(study)):
        caption = shown(groups) + caption
    return Drawn("strategies", "Tokens/s and memory by strategy", caption, figure)


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
    named = [
        replace(family, name=" · ".join(map(in_words, family.name.split(" · "))))
        for family in families
    ]
    if not families:
        return None
    drawn = spread(named)
    return narrow(drawn, caption=f"{drawn.caption} Losses are in nats per token.")


def in_words(value: str) -> str:
    """Return a part of a report's name of cells in the words of this page."""
    return title_of("mode", value.removeprefix("mode "))


# ---------------------------------------------------------------------- more and more processes


def processes(study: Study) -> Drawn | None:
    """Draw the peak and the sent bytes of each strategy over the number of processes."""
    groups = in_groups(study)
    if not all(row.peak_memory_bytes for _, cells in groups for row in cells):
        return None
    figure, panels = grid(2, len(groups), [2.5, 2.5])
    figure.set_figwidth(WIDTH)
    unit, unit_name = peak_unit(study.rows)
    numbers = sorted({row.plan.nproc for row in study.rows})
    names = dict.fromkeys(strategy_of(row) for _, cells in groups for row in cells)
    handles: dict[str, Any] = {}
    for (title, cells), upper, lower in zip(groups, *panels, strict=True):
        alone = [row for row in cells if row.plan.nproc == 1]
        for place, name in enumerate(name for name in names if name != strategy_of(alone[0])):
            style: dict[str, Any] = {"color": colour(COLOURS[place]), "marker": MARKERS[place]}
            style |= {"markersize": 4.5, "linewidth": 1.4}
            rows = alone + [row for row in cells if strategy_of(row) == name]
            for panel, sizes in (
                (upper, [(row.peak_memory_bytes or 0) / unit for row in rows]),
                (lower, [(row.sent_bytes or 0) / 2**20 for row in rows]),
            ):
                handles[name] = panel.plot([row.plan.nproc for row in rows], sizes, **style)[0]
        upper.set_title(f"{title}: peak of a rank, {unit_name}")
        lower.set_title(f"{title}: sent in a step, MiB")
        for panel in (upper, lower):
            panel.set_xscale("log", base=2)
            panel.set_xticks(numbers, [str(number) for number in numbers])
            panel.set_ylim(0, 1.05 * panel.get_ylim()[1])
        lower.set_xlabel("processes")
    draw_legend_below(figure, [*handles.items()])
    caption = (
        "One step of 8 rows, divided among more and more processes. Above: the rank with the "
        "largest peak. Below: what leaves the rank that sends most, counted."
    )
    return Drawn("processes", "Memory and bytes over the number of processes", caption, figure)


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


def draw_with_range(
    panel: Any,
    x: Sequence[float],
    middles: Sequence[float],
    ends: Sequence[Sequence[float]],
    style: Mapping[str, Any],
) -> Any:
    """Draw a line with whiskers that reach over all rounds."""
    below = [middle - low for middle, (low, _) in zip(middles, ends, strict=True)]
    above = [high - middle for middle, (_, high) in zip(middles, ends, strict=True)]
    return panel.errorbar(x, middles, [below, above], **style)


# ---------------------------------------------------------------------------------- all of them


def of(name: str, draw: Callable[[Study], Drawn | None]) -> tuple[str, Callable[..., Drawn | None]]:
    """Return the study that a figure needs, and what draws it if the study is there."""
    return name, lambda studies: draw(studies[name]) if name in studies else None


FIGURES: dict[str, tuple[str, Callable[[Studies], Drawn | None]]] = {
    "strategies": of("cpu", strategies),
    "models": of("models", strategies),
    "experts": of("experts", strategies),
    "memory": of("cpu", memory),
    "losses": of("cpu", curves),
    "seeds": of("seeds", seeds),
    "lengths": of("cpu", lengths),
    "microbatches": of("microbatches", microbatches),
    "sent": of("cpu", sent),
    "processes": of("processes", processes),
    "memory-compositions": of("compositions", memory),
    "memory-demo": of(DEMO, memory),
}
"""The study of each figure, and what draws it."""
BY_STRATEGY = (
    "A row for each strategy, a mark for each {}: left tokens/s, right the peak memory of a rank, "
    "both over those of one process"
)
PARTS = (
    "A bar for each {}, with LoRA and in full: weights, gradients, optimizer states, activations "
    "and temporary memory of the fullest rank"
)
ALTS = {
    "strategies": BY_STRATEGY.format("length of rows and way to train"),
    "models": BY_STRATEGY.format("of four models, with LoRA and in full"),
    "experts": BY_STRATEGY.format("length of rows and way to train; experts whole and spread"),
    "memory": PARTS.format("strategy"),
    "losses": "Left the loss curves of ten steps, which lie on one another; right a row for each "
    "strategy with its differences from one process, and the tolerance",
    "seeds": "A row for each strategy and way to train, a dot for each of three seeds: the last "
    "training loss and the validation loss",
    "lengths": "A bar for each strategy: the tokens of the longest row that fits into the memory "
    "of the first one",
    "microbatches": "Over 2 to 16 micro-batches, a line for each of three schedules: left the "
    "idle share of a step, measured and simulated, right tokens/s",
    "sent": "A bar for each strategy, with LoRA and in full: the bytes that a rank sends in a "
    "step, with a tick where the formula is",
    "processes": "Over one to eight processes, a line for each strategy, with LoRA and in full: "
    "above the peak memory of a rank, below the bytes that it sends in a step",
    "memory-compositions": PARTS.format("composition of strategies"),
}
"""What each figure shows, for who cannot see it."""
