"""Actions of the ranks of a pipeline in a step: recorded, compared with the prediction, and
drawn.
"""

import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch.distributed as dist

from shardwise.assembly.build import Job
from shardwise.base.interfaces import Mesh
from shardwise.base.records.record import PipelineRecord, PipelineStep, dumps
from shardwise.base.safety import write_atomically
from shardwise.base.schedule.split import Split
from shardwise.base.schedule.timeline import Event, Timeline, pack
from shardwise.checkpoint.output_dir import TIMELINES
from shardwise.config import Parallel, RunConfig, UserError
from shardwise.lab.drawing.gantt import gantt_file
from shardwise.lab.drawing.perfetto import perfetto_trace
from shardwise.parallel.reduce import from_every_rank

MOST_STEPS = 50
"""The number of steps, the last ones, whose events are kept: some 10 kB each."""
SCHEMA_VERSION = 1


class Recorder:
    """Keeps what this rank did in the last timed steps."""

    def __init__(self, warmup_steps: int) -> None:
        self._num_untimed = warmup_steps
        self._steps: deque[tuple[Event, ...]] = deque(maxlen=MOST_STEPS)

    def step(self, events: Sequence[Event]) -> None:
        """Keep this rank's events of a step, in seconds from a moment common to all ranks."""
        if self._num_untimed:
            self._num_untimed -= 1
        else:
            self._steps.append(tuple(events))

    def median_step(self, group: dist.ProcessGroup | None = None) -> Timeline | None:
        """Return what all ranks of a pipeline did in the step of median length; None without steps.

        Times count from the step's first event. A collective over the pipeline's ranks, which all
        get the same.
        """
        spans = [(min(e.start for e in step), max(e.end for e in step)) for step in self._steps]
        # Two numbers for each step, then one step's events, from every rank to all.
        by_step = [zip(*ranks) for ranks in zip(*from_every_rank(spans, group))]
        steps = [(min(starts), max(ends)) for starts, ends in by_step]
        if not steps:
            return None
        lengths = [end - start for start, end in steps]
        median = lengths.index(statistics.median_low(lengths))
        begin = steps[median][0]
        ranks = from_every_rank(self._steps[median], group)
        events = [
            event._replace(start=event.start - begin, end=event.end - begin)
            for rank_events in ranks
            for event in rank_events
        ]
        events.sort(key=lambda event: (event.rank, event.start))
        return Timeline(len(ranks), tuple(events))


def record_timeline(cfg: RunConfig, mesh: Mesh, job: Job, recorder: Recorder) -> dict[str, Any]:
    """Return the record's field `pipeline`, and write its step to files; {} without a pipeline.

    A collective; rank 0 writes. Where data-parallel ranks have pipelines of their own, the step is
    one of rank 0's.
    """
    if job.cut is None:
        return {}
    split, costs = job.cut.split, job.cut.source
    measured = recorder.median_step(mesh.dense.get_group("pp"))
    # Seconds compare only where costs are times of this machine, and of what a rank computes.
    simulated = split.timeline if costs.is_measured and cfg.parallel.tp == 1 else None
    pipeline = describe(cfg.parallel, split, str(costs), measured, simulated)
    if dist.get_rank() == 0:
        write_files(Path(cfg.training.output_dir), pipeline, measured, simulated)
    return {"pipeline": asdict(pipeline)}


def describe(
    cfg: Parallel, split: Split, costs: str, measured: Timeline | None, simulated: Timeline | None
) -> PipelineRecord:
    """Return a pipeline and its steps as a record has them.

    `costs` names the source of the units' costs. `simulated` is the step that they predict, None
    where they are no times of this machine.
    """
    error_percent = None
    if measured and simulated:
        error_percent = 100 * (simulated.seconds / measured.seconds - 1)
    return PipelineRecord(
        schedule=cfg.schedule,
        split=cfg.split,
        boundaries=list(split.boundaries),
        layers=list(split.layers),
        costs=costs,
        measured=_figures(measured) if measured else None,
        simulated=_figures(simulated) if simulated else None,
        simulator_error_percent=error_percent,
        events=pack(measured) if measured else None,
        simulated_events=pack(simulated) if simulated else None,
    )


def _figures(timeline: Timeline) -> PipelineStep:
    idle = [timeline.idle_seconds(rank) for rank in range(timeline.num_ranks)]
    busy = [timeline.seconds - seconds for seconds in idle]
    return PipelineStep(timeline.seconds, timeline.bubble(), busy, idle)


def write_files(
    folder: Path, record: PipelineRecord, measured: Timeline | None, simulated: Timeline | None
) -> None:
    """Write TIMELINES into the folder, or nothing where there is neither timeline.

    Without matplotlib, which training does not need, a line says that the picture is left out.
    """
    both = {"measured": measured, "simulated": simulated}
    timelines = {name: timeline for name, timeline in both.items() if timeline is not None}
    if not timelines:
        return
    content: dict[str, Any] = {"schema_version": SCHEMA_VERSION, **asdict(record)}
    del content["events"], content["simulated_events"]  # those of the record are packed
    for name, timeline in timelines.items():
        content[name]["events"] = timeline.events
    texts = [dumps(content), perfetto_trace(timelines)]
    try:
        texts.append(gantt_file(timelines))
    except UserError as error:
        print(f"{TIMELINES[-1]} is not drawn: {error}", flush=True)
    for name, text in zip(TIMELINES, texts):
        write_atomically(folder / name, text + "\n")
