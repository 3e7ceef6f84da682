"""The figure of docs/study.md on the longest row in a memory: see study_table.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from study import LENGTH, WIDTH, Study, title_of

from shardwise.assembly.describe import describe
from shardwise.drawing.svg import colour
from shardwise.planner.peak import memory_of_rank
from shardwise.presets import STARTER
from shardwise.report.panels import BAR_HEIGHT, Drawn, grid, peak_unit
from shardwise.report.tables import Row
from shardwise.run_file import parse_config
from shardwise.words import percent

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
