"""Memory peaks that the planner predicts, beside measured ones, over a grid of small runs.

    python -m tools.plan_grid [--out results/plan/grid.json] [--keep-measured]

Every cell of tests/planner/grid.py takes two steps on its ranks, forked processes with gloo. The
second one is measured: the exact bytes of the rank with the most. `error` is predicted over
measured, less 1; `simulated` is the peak of a simulated step of that rank, where there is one. No
cell is used to fit anything. With `--keep-measured` the rows of the file stay as they are measured
and simulated, and only predictions are made again; a cell that the file lacks is measured, and its
row has the environment.
A figure beside the file draws predicted over measured peaks.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

from tests.distributed import run_ranks
from tests.oracles.simulate import simulate
from tests.planner.grid import Cell, cells, config_of, measure_each, predict
from tools.paired import Results, command_line, table, write_json

from shardwise.config import UserError
from shardwise.lab.drawing.svg import colour, drawing, svg_file
from shardwise.metrics.hardware import environment

TOGETHER = 4
"""Cells that share processes: their start takes as long as a cell."""


def main() -> None:
    parser = command_line(__doc__, Path(__file__).parents[1] / "results" / "plan" / "grid.json")
    parser.add_argument("--keep-measured", action="store_true")
    options = parser.parse_args()
    grid = {cell.id: cell for cell in cells()}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if options.keep_measured:
            content = json.loads(options.out.read_text(encoding="utf-8"))
            kept, equal = content["rows"], content["environment"]
            added = Results(options.out.with_suffix(".added.json"), {"environment": environment()})
            lacking = {case: cell for case, cell in grid.items() if case not in kept}
            rows = {case: kept[case] for case in grid if case in kept}
            for case, row in measured_rows(added, lacking, folder).items():
                rows[case] = row | added.equal
            added.path.unlink(missing_ok=True)
        else:
            equal = environment()
            rows = measured_rows(Results(options.out, {"environment": equal}), grid, folder)
        for case, row in rows.items():
            row |= compared(grid[case], row, folder)
    measured = [cell for cell in grid.values() if cell.id in rows]
    summary = summary_of(measured, rows)
    content = {"complete": len(measured) == len(grid), "summary": summary, "environment": equal}
    write_json(options.out, content | {"rows": rows})
    options.out.with_suffix(".svg").write_text(figure_of(measured, rows))
    columns = ("cells", "median", "worst", "worst_cell", "below", "second_opinion")
    print(table(("group", *columns), [(g, *(r[c] for c in columns)) for g, r in summary.items()]))


def measured_rows(results: Results, grid: dict[str, Cell], folder: Path) -> dict[str, Any]:
    """Measure the cells that the file lacks, and return the rows of all."""
    left = [cell for cell in grid.values() if cell.id not in results.rows]
    for num_ranks, alike in groupby(left, key=lambda cell: cell.num_ranks):
        of_number = list(alike)
        for start in range(0, len(of_number), TOGETHER):
            group = of_number[start : start + TOGETHER]
            measured = zip(*run_ranks(num_ranks, measure_each, group, folder), strict=True)
            for cell, ranks in zip(group, measured, strict=True):
                results.add(cell.id, partial(row_of, cell, ranks, folder))
    return results.rows


def row_of(cell: Cell, ranks: Sequence[Any], folder: Path) -> dict[str, Any]:
    """Return what a cell's ranks measured: the states of all, and the peak of the one with most,
    beside that of its simulated step (None: a simulation refuses it).
    """
    rank = max(range(len(ranks)), key=lambda rank: ranks[rank].peak)
    most, simulated = ranks[rank], None
    with contextlib.suppress(UserError):
        simulated = simulate(config_of(cell, folder), cell.num_ranks, rank).peak_bytes
    states = [rank.states for rank in ranks]
    return {"peak": most.peak, "simulated": simulated, "parts": most.parts, "states": states}


def compared(cell: Cell, row: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return what the planner predicts of a cell, and how far it is from the measured bytes."""
    states, memory = predict(cell, folder)
    return {
        "predicted": memory._asdict() | {"total": memory.total},
        "states_equal": states == row["states"],
        "error": round(memory.total / row["peak"] - 1, 5),
    }


def summary_of(grid: Sequence[Cell], rows: dict[str, Any]) -> dict[str, Any]:
    """Return median and worst error by group: all cells of one process, of several, each layout.

    `below`: cells whose planned peak is too low; `second_opinion`: how far it is from the simulated
    one, in the median and at most.
    """
    groups = defaultdict[str, list[str]](list)
    for cell in grid:
        number = "one process" if cell.num_ranks == 1 else "distributed"
        names = (
            number,
            cell.layout,
            f"{cell.mode}, {number}",
            f"checkpointing {cell.checkpointing}",
        )
        for group in dict.fromkeys(names):
            groups[group].append(cell.id)
    return {
        group: _summary([(case, rows[case]) for case in cases]) for group, cases in groups.items()
    }


def _summary(rows: Sequence[tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    errors = [abs(row["error"]) for _, row in rows]
    others = [
        round(abs(row["predicted"]["total"] / row["simulated"] - 1), 5)
        for _, row in rows
        if row["simulated"]
    ]
    return {
        "cells": len(rows),
        "median": round(statistics.median(errors), 5),
        "worst": max(errors),
        "worst_cell": rows[errors.index(max(errors))][0],
        "below": sum(row["error"] < 0 for _, row in rows),
        "second_opinion": [round(statistics.median(others), 5), max(others)] if others else None,
        "states_equal": all(row["states_equal"] for _, row in rows),
    }


def figure_of(grid: Sequence[Cell], rows: dict[str, Any]) -> str:
    """Return the figure as SVG."""
    with drawing():
        from matplotlib.figure import Figure

        figure = Figure(figsize=(5, 4), layout="constrained")
        axes = figure.subplots()
        for place, (label, is_single) in enumerate([("one process", True), ("2, 4 ranks", False)]):
            of_kind = [rows[cell.id] for cell in grid if (cell.num_ranks == 1) == is_single]
            measured = [row["peak"] / 2**20 for row in of_kind]
            predicted = [row["predicted"]["total"] / 2**20 for row in of_kind]
            axes.scatter(measured, predicted, s=8, color=colour(f"c{place + 1}"), label=label)
        ends = [
            min(row["peak"] for row in rows.values()),
            max(row["peak"] for row in rows.values()),
        ]
        axes.plot([end / 2**20 for end in ends], [end / 2**20 for end in ends], linewidth=0.7)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter("{x:.0f}")
        axes.set(title="Peak of the rank with the most", xlabel="measured MiB")
        axes.set(ylabel="predicted MiB")
        axes.legend()
        return svg_file(figure, "grid")


if __name__ == "__main__":
    main()
