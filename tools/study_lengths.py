"""The figure of docs/study.md on the longest row in a memory: see study_table.py."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from tools.study import LENGTH, WIDTH, Study, title_of

from shardwise.assembly.describe import describe
from shardwise.base.words import percent
from shardwise.config.presets import STARTER
from shardwise.config.run_file import parse_config
from shardwise.lab.drawing.svg import colour
from shardwise.lab.planner.peak import memory_of_rank
from shardwise.lab.report.panels import BAR_HEIGHT, Drawn, grid, peak_unit
from shardwise.lab.report.tables import Row

LONGEST, STEP = 4096, 16
"""Tokens: the longest row that is tried, and what lengths are a multiple of."""


def lengths(study: Study) -> Drawn | None:
    """Draw the longest row of each strategy within the memory that the baseline takes for one.

    Peaks are the measured one of the longest rows of the study, and what formulas add or take for
    another length. The caption says how far that is from what the study measured at other lengths.
    """
    if not study.is_current:  # the peaks of another version of the code are not planned ones
        return None
    cells = [row for row in study.rows if row.peak_memory_bytes and not row.plan.control]
    most = max(int(row.plan.values[LENGTH]) for row in cells)
    modes: dict[str, dict[str, Callable[[int], int]]] = {}
    limits: dict[str, int] = {}
    for row in cells:
        if int(row.plan.values[LENGTH]) == most:
            mode, measured = mode_of(row), row.peak_memory_bytes or 0
            planned = peak_by_length(study.planned[row.plan.id], row)
            modes.setdefault(mode, {})[row.label] = anchored(planned, most, measured)
            if row.is_baseline:
                limits[mode] = measured
    errors = [
        abs(modes[mode_of(row)][row.label](length) / (row.peak_memory_bytes or 1) - 1)
        for row in cells
        if (length := int(row.plan.values[LENGTH])) != most
    ]
    names = list(dict.fromkeys(name for peaks in modes.values() for name in peaks))
    unit, unit_name = peak_unit(study.rows)
    figure, (panels,) = grid(1, len(modes), [max(4, len(names)) * BAR_HEIGHT])
    figure.set_figwidth(WIDTH)
    for panel, (mode, peaks) in zip(panels, modes.items(), strict=True):
        tokens = [longest_row(peaks[name], limits[mode]) for name in names]
        bars = panel.barh(range(len(names)), tokens, color=colour("c1"), height=0.66)
        panel.bar_label(bars, fmt="%d", padding=3, fontsize=8.5)
        panel.set_title(f"{mode}: longest row\nin {limits[mode] / unit:.1f} {unit_name}")
        panel.set_yticks(range(len(names)), names if panel is panels[0] else [""] * len(names))
        panel.set_ylim(len(names) - 0.5, -0.5)
        panel.set_xlim(0, 1.2 * max(tokens))
        panel.grid(visible=False, axis="y")
        panel.set_xlabel("tokens")
    caption = (
        f"Tokens of the longest row within the memory that the first strategy takes for rows of "
        f"{most}. What a longer row adds is planned by the formulas of `shardwise plan`: from the "
        f"measured peaks of these rows they give those of the study's other length to within "
        f"{percent(max(errors), 1)}."
    )
    return Drawn("lengths", "Context length at a fixed memory, planned", caption, figure)


def mode_of(row: Row) -> str:
    """Return how a cell trains, in words."""
    return title_of("mode", row.plan.values["mode"])


def anchored(planned: Callable[[int], int], length: int, measured: int) -> Callable[[int], int]:
    """Return planned peaks, all moved by what the measured one of this length differs."""
    difference = measured - planned(length)
    return lambda other: planned(other) + difference


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
    steps = range(1, LONGEST // STEP)
    return STEP * bisect_right(steps, limit, key=lambda number: peak(number * STEP))
