"""Charts of pipelines: what each rank did in a measured step, several cells on one time axis."""

from collections.abc import Sequence
from dataclasses import dataclass

import pydantic

from shardwise.base.records.record import PipelineRecord
from shardwise.base.schedule.timeline import Timeline, unpack
from shardwise.base.words import counted, one_line, percent, seconds
from shardwise.lab.drawing.gantt import gantt_svg
from shardwise.lab.report.folder import BenchFolder
from shardwise.lab.report.names import group_title
from shardwise.lab.report.panels import MAX_NAME
from shardwise.lab.report.tables import Row, groups_of, run_settings

TIMELINES = "timelines"
"""The beginning of the names of these charts."""
TEXT_COLUMNS = ("Cell", "Schedule", "Split: layers per stage")
CAPTION = (
    "What each rank did in the timed step of median length, in the round whose step is the median. "
    "All cells share one time axis, and those that differ only in their split stand together. The "
    "number in a bar is that of its micro-batch. Where the layers were timed, the step that the "
    "simulator predicts from these times stands below the measured one."
)
NUMBER_COLUMNS = ("Step predicted", "Step measured", "Error", "Bubble predicted", "Bubble measured")
SPLITS = ("uniform", "parameters", "balanced")
"""The splits in the order in which cells stand in a chart.

A split that the user gave stands second.
"""


@dataclass(frozen=True)
class PipelineRun:
    """A cell that ran as a pipeline."""

    row: Row
    pipeline: PipelineRecord
    timeline: Timeline
    simulated: Timeline | None = None  # the step that its costs predict

    @property
    def split(self) -> str:
        """Return the name of the split."""
        return self.pipeline.split if isinstance(self.pipeline.split, str) else "given"

    @property
    def texts(self) -> list[str]:
        """Return its table cells under TEXT_COLUMNS."""
        layers = " + ".join(map(str, self.pipeline.layers))
        return [self.row.name, self.pipeline.schedule, f"{self.split}: {layers}"]

    @property
    def numbers(self) -> list[str]:
        """Return its table cells under NUMBER_COLUMNS."""
        predicted, measured = self.pipeline.simulated, self.pipeline.measured
        return [
            seconds(predicted.seconds if predicted else None),
            seconds(measured.seconds if measured else None),
            self._error(),
            percent(predicted.bubble if predicted else None, 1),
            percent(measured.bubble if measured else None, 1),
        ]

    def _error(self) -> str:
        """Return predicted / measured - 1 of the step, with its range over the rounds."""
        error = self.pipeline.simulator_error_percent
        text = percent(None if error is None else error / 100, 1)
        record = self.row.record
        if record is None or self.row.num_good_rounds < 2:
            return text
        spread = record.spread.get("pipeline.simulator_error_percent")
        return f"{text} ({spread[0]:.1f} to {spread[1]:.1f})" if spread else text


@dataclass(frozen=True)
class Chart:
    """Pipelines on one time axis."""

    name: str  # name of its file, and its id on the page
    title: str  # words that distinguish these cells from those of other charts
    runs: list[PipelineRun]

    def svg(self) -> str:
        """Return the chart as an `<svg>` element, which is a valid file too."""
        timelines, predicted = {}, []
        for run in self.runs:
            name = one_line(run.row.name, MAX_NAME)
            timelines[name] = run.timeline
            if run.simulated is not None:
                predicted.append(f"{name}, as the simulator predicts it")
                timelines[predicted[-1]] = run.simulated
        return gantt_svg(timelines, self.name, predicted)


def charts(bench: BenchFolder, rows: Sequence[Row]) -> list[Chart]:
    """Return a chart for each group of cells and number of ranks.

    A chart shows the pipelines that have a measured step and whose figures are shown.
    """
    drawn = []
    for group, cells in groups_of(rows).items():
        by_ranks: dict[int, list[PipelineRun]] = {}
        for run in filter(None, map(_run, cells)):
            by_ranks.setdefault(run.timeline.num_ranks, []).append(run)
        for num_ranks, runs in by_ranks.items():
            ranks = counted(num_ranks, "rank") if len(by_ranks) > 1 else ""
            title = " · ".join(filter(None, [group_title(group, bench.sweep), ranks]))
            name = f"{TIMELINES}-{len(drawn) + 1}" if drawn else TIMELINES
            drawn.append(Chart(name, title, _in_order(runs)))
    return drawn


def costs(drawn: Sequence[Chart]) -> list[str]:
    """Return the costs from which the splits of these pipelines were made, once each."""
    return sorted({run.pipeline.costs for chart in drawn for run in chart.runs})


def _run(row: Row) -> PipelineRun | None:
    """Return a cell's pipeline, or None where it has none to show."""
    content = row.record.pipeline if row.record and row.measured else None
    if content is None:
        return None
    pipeline = pydantic.TypeAdapter(PipelineRecord).validate_python(content)
    if not pipeline.events:
        return None
    simulated = unpack(pipeline.simulated_events) if pipeline.simulated_events else None
    return PipelineRun(row, pipeline, unpack(pipeline.events), simulated)


def _in_order(runs: Sequence[PipelineRun]) -> list[PipelineRun]:
    """Return the runs in the order of SPLITS, those together that differ in their split alone."""
    families: list[dict[str, object]] = []

    def place(run: PipelineRun) -> tuple[int, int]:
        assert run.row.record is not None
        settings = run_settings(run.row.record)
        family = {key: value for key, value in settings.items() if key != "parallel.split"}
        if family not in families:
            families.append(family)
        return families.index(family), SPLITS.index(run.split) if run.split in SPLITS else 1

    return sorted(runs, key=place)
