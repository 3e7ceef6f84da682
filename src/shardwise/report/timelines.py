"""Pipelines: what each rank did in a measured step, cell above cell on one time axis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pydantic

from shardwise.drawing.gantt import gantt_svg
from shardwise.records.record import PipelineRecord
from shardwise.report.folder import Bench
from shardwise.report.panels import NAME
from shardwise.report.tables import Row, flat, groups_of
from shardwise.report.words import group_title, percent, printable, seconds
from shardwise.schedule.timeline import Timeline, unpack

TIMELINES = "timelines"
"""How the names of these charts begin."""
WORDS = ("Cell", "Schedule", "Split: layers per stage")
FIGURES = ("Step predicted", "Step measured", "Error", "Bubble predicted", "Bubble measured")
SPLITS = ("uniform", "parameters", "balanced")


@dataclass(frozen=True)
class Run:
    """A cell that ran as a pipeline."""

    row: Row
    pipeline: PipelineRecord
    timeline: Timeline

    @property
    def split(self) -> str:
        """The split's name."""
        return self.pipeline.split if isinstance(self.pipeline.split, str) else "given"

    @property
    def words(self) -> list[str]:
        """Its row of the table under WORDS."""
        layers = " + ".join(map(str, self.pipeline.layers))
        return [self.row.name, self.pipeline.schedule, f"{self.split}: {layers}"]

    @property
    def figures(self) -> list[str]:
        """Its row of the table under FIGURES."""
        told = self.pipeline
        steps = [told.simulated, told.measured]
        step = [seconds(one.seconds if one else None) for one in steps]
        bubble = [percent(one.bubble if one else None, 1) for one in steps]
        return [*step, self._error(), *bubble]

    def _error(self) -> str:
        """How far the simulator is off, and from where to where over the rounds."""
        record = self.row.record
        spread = record.spread.get("pipeline.simulator_error_percent") if record and self.row.good_rounds > 1 else None
        value = self.pipeline.simulator_error_percent
        told = percent(None if value is None else value / 100, 1)
        return f"{told} ({spread[0]:.1f} to {spread[1]:.1f})".replace("-", "−") if spread else told


@dataclass(frozen=True)
class Chart:
    """Pipelines on one time axis."""

    name: str  # of its file; an id in the page
    title: str  # what sets these cells apart from those of other charts
    runs: list[Run]

    def svg(self) -> str:
        """Draw the pipelines (see `gantt_svg`)."""
        timelines = {printable(run.row.name, NAME): run.timeline for run in self.runs}
        return gantt_svg(timelines, self.name)


def charts(bench: Bench, rows: Sequence[Row]) -> list[Chart]:
    """A chart for the cells of each group on as many ranks that have a measured step and whose figures may be told."""
    found = []
    for group, cells in groups_of(rows).items():
        by_ranks: dict[int, list[Run]] = {}
        for run in filter(None, map(_run, cells)):
            by_ranks.setdefault(run.timeline.num_ranks, []).append(run)
        for num_ranks, runs in by_ranks.items():
            ranks = f"{num_ranks} ranks" if len(by_ranks) > 1 else ""
            title = " · ".join(filter(None, [group_title(group, bench.sweep), ranks]))
            found.append(Chart(f"{TIMELINES}-{len(found) + 1}" if found else TIMELINES, title, _in_order(runs)))
    return found


def _run(row: Row) -> Run | None:
    told = row.record.pipeline if row.record and row.measured else None
    if told is None:
        return None
    pipeline = pydantic.TypeAdapter(PipelineRecord).validate_python(told)
    return Run(row, pipeline, unpack(pipeline.events)) if pipeline.events else None


def _in_order(runs: Sequence[Run]) -> list[Run]:
    """Those that differ in their split alone stand together, the uniform one on top and the balanced one below."""
    families: list[dict[str, object]] = []
    keys = []
    for place, run in enumerate(runs):
        assert run.row.record is not None
        family = {key: value for key, value in flat(run.row.record).items() if key != "parallel.split"}
        if family not in families:
            families.append(family)
        keys.append((families.index(family), SPLITS.index(run.split) if run.split in SPLITS else 1, place))
    return [run for _, run in sorted(zip(keys, runs, strict=True), key=lambda pair: pair[0])]
