"""The figures of docs/study.md, from the records of its studies: see study_table.py.

They are narrow, so that they can be read on a telephone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shardwise.assembly.describe import describe
from shardwise.drawing.svg import colour
from shardwise.planner.peak import memory_of_rank
from shardwise.presets import STARTER
from shardwise.report import figures as report
from shardwise.report.folder import Bench
from shardwise.report.losses import losses
from shardwise.report.panels import BAR_HEIGHT, Drawn, Groups, grid, peak_unit
from shardwise.report.style import looks
from shardwise.report.tables import Row, groups_of
from shardwise.run_file import parse_config
from shardwise.words import percent

WIDTH = 6.4
"""Inches."""
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
COLOURS = ("c1", "c2", "c3", "c4", "c5", "c6", "c7", "c8")
LENGTH = "data.sequence_length"
DEMO = "demo"
"""The bench of `make demo`, of which the README shows the memory."""


@dataclass(frozen=True)
class Study:
    """A bench and its rows."""

    bench: Bench
    rows: list[Row]
    planned: Mapping[str, Mapping[str, Any]]
    """The run of each cell that the sweep has now, by id; without controls."""

    @property
    def is_current(self) -> bool:
        """Return whether its cells are those that the sweep has now."""
        return self.planned.keys() == {row.plan.id for row in self.rows if not row.plan.control}

    @property
    def num_shown(self) -> int:
        """How many groups figures with a panel for each show: those of the first length."""
        lengths = [axis for axis in self.bench.sweep.axes if axis.name == LENGTH]
        groups = len(in_groups(self))
        return groups // len(lengths[0].values) if lengths else groups


Studies = Mapping[str, Study]


def in_groups(study: Study, with_controls: bool = False) -> Groups:
    """Return the title and the cells of each group."""
    rows = [row for row in study.rows if with_controls or not row.plan.control]
    axes = [axis for axis in study.bench.sweep.axes if not axis.compared]
    return [
        (" · ".join(title_of(axis.name, cells[0].plan.values[axis.name]) for axis in axes), cells)
        for cells in groups_of(rows).values()
    ]


def title_of(axis: str, value: str) -> str:
    """Return the value of an axis in a few words."""
    return (
        f"{value} tokens"
        if axis == LENGTH
        else {"lora": "LoRA", "full": "in full"}.get(value, value)
    )


def narrow(drawn: Drawn, **changes: Any) -> Drawn:
    """Return a figure of a report in the width of this page."""
    drawn.figure.set_figwidth(WIDTH)
    return replace(drawn, **changes)


# --------------------------------------------------------------- throughput and memory by strategy


def strategies(study: Study) -> Drawn | None:
    """Draw the tokens/s and the peak of each strategy, both over the baseline's of its group."""
    groups = in_groups(study)
    labels = list(dict.fromkeys(row.label for _, cells in groups for row in cells))
    if not any(row.peak_memory_bytes for row in study.rows):
        return None
    figure, ((left, right),) = grid(1, 2, [max(4, len(labels)) * BAR_HEIGHT])
    figure.set_figwidth(WIDTH)
    handles = []
    # Marks of one strategy stand a little below one another, so that none hides another.
    height = 0.64 / len(groups)
    for place, (title, cells) in enumerate(groups):
        style: dict[str, Any] = {
            "marker": MARKERS[place % len(MARKERS)],
            "color": colour(COLOURS[place % len(COLOURS)]),
            "linestyle": "none",
            "markersize": 5,
        }
        base = next((row for row in cells if row.is_baseline), None)
        for row in cells:
            y = labels.index(row.label) + (place - (len(groups) - 1) / 2) * height
            if row.speedup is not None and row.tokens_range and row.tokens_per_second:
                ends = [row.speedup * end / row.tokens_per_second for end in row.tokens_range]
                left.plot(ends, [y, y], color=style["color"], linewidth=1.2)
            if row.speedup is not None and row.plan.timed:
                left.plot(row.speedup, y, **style)
            if base and base.peak_memory_bytes and row.peak_memory_bytes:
                right.plot(row.peak_memory_bytes / base.peak_memory_bytes, y, **style)
        handles.append((title or "all cells", left.plot([], [], **style)[0]))
    for panel, quantity in ((left, "Tokens/s"), (right, "Peak of a rank")):
        panel.set_title(f"{quantity}, over {labels[0]}")
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
    draw_legend_below(figure, handles)
    caption = (
        "Medians; a line reaches from the slowest to the fastest round. Tokens/s over twice those "
        "of one process are the efficiency on two: at 2.0 (right dashed line) it is 100 %."
    )
    return Drawn("strategies", "Tokens/s and memory by strategy", caption, figure)


def draw_legend_below(figure: Any, handles: Sequence[tuple[str, Any]]) -> None:
    """Draw a legend above the panels, in columns that fit the narrow figure."""
    names = [name for name, _ in handles]
    columns = max(1, int(88 // (max(map(len, names)) + 6)))
    lines = -(-len(names) // columns)
    figure.set_figheight(figure.get_figheight() + 0.2 + 0.19 * lines)
    figure.legend([line for _, line in handles], names, loc="outside upper left", ncols=columns)


# --------------------------------------------------------------------------- figures of a report


def memory(study: Study) -> Drawn | None:
    """Draw what the memory is, in the groups of the first length."""
    if not any(row.memory_parts for row in study.rows):
        return None
    caption = "On the rank with the largest peak, at that peak. Numbers are sums in MiB."
    return narrow(report.memory(in_groups(study)[: study.num_shown]), caption=caption)


def sent(study: Study) -> Drawn | None:
    """Draw the bytes that were counted and those by formula, in the groups of the first length."""
    groups = in_groups(study)[: study.num_shown]
    if not any(row.sent_bytes for _, cells in groups for row in cells):
        return None
    caption = (
        "What leaves the rank that sends most in a step, every collective counted as a ring. Bars "
        "are counted, ticks are by formula."
    )
    look = looks(study.bench.sweep, study.rows)
    return narrow(report.sent(groups, look), caption=caption)


def curves(study: Study) -> Drawn | None:
    """Draw the losses of the first group, and how far they are from those of the reference."""
    groups = in_groups(study, with_controls=True)[:1]
    if not any(row.record and row.record.losses for row in groups[0][1]):
        return None
    drawn = losses(groups, looks(study.bench.sweep, study.rows))
    for names in drawn.figure.legends:  # curves coincide, and marks have names on the right
        names.remove()
    drawn.figure.set_figheight(max(3.4, 0.24 * len(groups[0][1]) + 0.9))
    caption = (
        "Left: the curves of all cells lie on one another. Right: the largest difference of each "
        "(large mark) and that of every step (dots) from the reference; linear up to one rounding "
        "of float32, then logarithmic. Grey: up to the noise control. Red: the tolerance."
    )
    return narrow(drawn, caption=caption)


# ------------------------------------------------------------------------ micro-batches and bubbles


@dataclass(frozen=True)
class Bubble:
    """The idle share of a pipeline's step."""

    row: Row
    schedule: str
    microbatches: int
    measured: float
    range: tuple[float, float]
    """The least and the largest of all rounds."""
    simulated: float | None
    """By the measured costs of its units; None without them."""
    formula: float
    """(p - 1) / (v m + p - 1), with equal stages and messages that take no time."""


def bubbles(study: Study) -> list[Bubble]:
    """Return the bubbles of a study's pipelines, fewest micro-batches first."""
    found = []
    for row in study.rows:
        pipeline = row.record.pipeline if row.record and row.measured else None
        if pipeline is None or pipeline["measured"] is None or not row.plan.timed:
            continue
        assert row.record is not None
        training, parallel = row.record.config["training"], row.record.config["parallel"]
        number = training["global_batch_size"] // training["micro_batch_size"]
        ranks = parallel["pp"]
        chunks = len(pipeline["layers"]) // ranks
        share = pipeline["measured"]["bubble"]
        low, high = row.record.spread.get("pipeline.bubble", (share, share))
        found.append(
            Bubble(
                row,
                row.plan.values.get("schedule", row.label),
                number,
                share,
                (low, high),
                pipeline["simulated"]["bubble"] if pipeline["simulated"] else None,
                (ranks - 1) / (chunks * number + ranks - 1),
            )
        )
    return sorted(found, key=lambda bubble: (bubble.schedule, bubble.microbatches))


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
        errors = [
            [middle - low for middle, (low, _) in zip(measured, ends)],
            [high - middle for middle, (_, high) in zip(measured, ends)],
        ]
        drawn = left.errorbar(x, measured, errors, **style)
        handles.append((name, drawn.lines[0]))
        simulated = [
            (p.microbatches * beside, 100 * p.simulated) for p in of_schedule if p.simulated
        ]
        if simulated:
            left.plot(*zip(*simulated), color=style["color"], **dashes)
        right.plot(x, [point.row.tokens_per_second or 0 for point in of_schedule], **style)
    if any(point.simulated for point in points):
        handles.append(("simulated", left.plot([], [], color=colour("muted"), **dashes)[0]))
    left.set_title("Bubble: idle share of the ranks, %")
    right.set_title("Tokens/s")
    for panel in (left, right):
        panel.set_xscale("log", base=2)
        panel.set_xticks(numbers, [str(number) for number in numbers])
        panel.set_xlabel("micro-batches of a step")
        panel.set_ylim(0, 1.05 * panel.get_ylim()[1])
    draw_legend_below(figure, handles)
    caption = (
        "One global batch in more and smaller micro-batches. Whiskers reach over the rounds. "
        "Dashes: as simulated from the measured times of the units."
    )
    return Drawn("microbatches", "More micro-batches, smaller bubbles", caption, figure)


# ------------------------------------------------------------------- the longest row in a memory

LONGEST, STEP = 4096, 16
"""Tokens: the longest row that is tried, and what lengths are a multiple of."""


def lengths(study: Study) -> Drawn | None:
    """Draw the longest row of each strategy within the memory that the baseline takes for one.

    Peaks are planned by formulas for each length. The caption says how far they are from the
    measured ones of the study.
    """
    if not study.is_current:  # the peaks of another version of the code are not planned ones
        return None
    cells = [row for row in study.rows if row.peak_memory_bytes and not row.plan.control]
    most = max(int(row.plan.values[LENGTH]) for row in cells)
    modes: dict[str, list[Row]] = {}
    errors = []
    for row in cells:
        length = int(row.plan.values[LENGTH])
        peak = peak_by_length(study.planned[row.plan.id], row)
        errors.append(abs(peak(length) / (row.peak_memory_bytes or 1) - 1))
        if length == most:
            modes.setdefault(title_of("mode", row.plan.values["mode"]), []).append(row)
    names, limits, longest = [], [], {}
    for mode, rows in modes.items():
        names = [row.label for row in rows]
        limits.append(next(row.peak_memory_bytes or 0 for row in rows if row.is_baseline))
        longest[mode] = [
            longest_row(peak_by_length(study.planned[row.plan.id], row), limits[-1]) for row in rows
        ]
    unit, unit_name = peak_unit(study.rows)
    figure, (panels,) = grid(1, len(modes), [max(4, len(names)) * BAR_HEIGHT])
    figure.set_figwidth(WIDTH)
    for panel, (mode, tokens), limit in zip(panels, longest.items(), limits, strict=True):
        bars = panel.barh(range(len(names)), tokens, color=colour("c1"), height=0.66)
        panel.bar_label(bars, fmt="%d", padding=3, fontsize=8.5)
        panel.set_title(f"{mode}: longest row in {limit / unit:.1f} {unit_name}")
        panel.set_yticks(range(len(names)), names if panel is panels[0] else [""] * len(names))
        panel.set_ylim(len(names) - 0.5, -0.5)
        panel.set_xlim(0, 1.2 * max(tokens))
        panel.grid(visible=False, axis="y")
        panel.set_xlabel("tokens")
    caption = (
        f"Tokens of the longest row within the memory that the first strategy takes for rows of "
        f"{most}. Planned for each length by the formulas of `shardwise plan`, which are at most "
        f"{percent(max(errors), 1)} off the measured peaks of this study."
    )
    return Drawn("lengths", "Context length at a fixed memory", caption, figure)


def peak_by_length(content: Mapping[str, Any], row: Row) -> Callable[[int], int]:
    """Return what gives the planned peak of a cell, in bytes, with rows of so many tokens.

    A pipeline is cut where the cell's was.
    """
    # The tokenizer of the study may not be there.
    model = {**content["model"], "tokenizer": str(STARTER)}
    cfg = parse_config({**content, "model": model}, row.plan.id)
    run = describe(cfg, row.plan.nproc)
    pipeline = row.record.pipeline if row.record else None
    boundaries = pipeline["boundaries"] if pipeline else None
    first = dict.fromkeys(run.sizes, 0)

    def peak(length: int) -> int:
        longer = replace(cfg, data=replace(cfg.data, sequence_length=length))
        return max(
            memory_of_rank(longer, run, {**first, "pp": stage}, boundaries).total
            for stage in range(run.sizes["pp"])
        )

    return peak


def longest_row(peak: Callable[[int], int], limit: int) -> int:
    """Return the most tokens of a row, a multiple of STEP, whose planned peak is in the limit."""
    low, high = 0, LONGEST // STEP
    while high - low > 1:
        middle = (low + high) // 2
        if peak(middle * STEP) <= limit:
            low = middle
        else:
            high = middle
    return low * STEP


def of(name: str, draw: Callable[[Study], Drawn | None]) -> tuple[str, Callable[..., Drawn | None]]:
    """Return the study that a figure needs, and what draws it if the study is there."""
    return name, lambda studies: draw(studies[name]) if name in studies else None


FIGURES: dict[str, tuple[str, Callable[[Studies], Drawn | None]]] = {
    "strategies": of("cpu", strategies),
    "models": of("models", strategies),
    "experts": of("experts", strategies),
    "memory": of("cpu", memory),
    "losses": of("cpu", curves),
    "lengths": of("cpu", lengths),
    "microbatches": of("microbatches", microbatches),
    "sent": of("cpu", sent),
    "sent-compositions": of("compositions", sent),
    "memory-compositions": of("compositions", memory),
    "memory-demo": of(DEMO, memory),
}
"""The study of each figure, and what draws it."""
