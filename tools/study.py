"""A study: a sweep of configs/, its records, and what tables and figures of docs/study.md share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardwise.lab.report.folder import BenchFolder
from shardwise.lab.report.panels import Groups
from shardwise.lab.report.tables import Row, groups_of

WIDTH = 5.0
"""Inches."""
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
COLOURS = ("c1", "c2", "c3", "c4", "c5", "c6", "c7", "c8")
LENGTH = "data.sequence_length"
DEMO = "demo"
"""The bench of `make demo`, of which the README shows the memory."""


@dataclass(frozen=True)
class Study:
    """A bench and its rows."""

    bench: BenchFolder
    rows: list[Row]
    planned: Mapping[str, Mapping[str, Any]]
    """The run of each cell that the sweep has now, by id; without controls."""
    pipelines: Mapping[str, Sequence[Mapping[str, Any]]]
    """Figures of the good rounds of each pipeline, by id: see study_summary.py."""

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
