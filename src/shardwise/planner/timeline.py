"""What the ranks of a pipeline did in a step: recorded, set beside what was predicted, and drawn."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch.distributed as dist

from shardwise.assembly.build import Job
from shardwise.checkpoint.output_dir import TIMELINES
from shardwise.config import Parallel, RunConfig, UserError
from shardwise.drawing.gantt import gantt_file
from shardwise.drawing.perfetto import perfetto_trace
from shardwise.interfaces import Mesh
from shardwise.parallel.reduce import of_every_rank
from shardwise.records.record import PipelineRecord, PipelineStep, dumps
from shardwise.schedule.split import Split
from shardwise.schedule.timeline import Event, Timeline, pack

MOST_STEPS = 50
"""As many steps are kept, the last ones: some 10 kB each."""
SCHEMA_VERSION = 1


class Recorder:
    """Keeps what this rank did in the last timed steps."""

    def __init__(self, warmup_steps: int) -> None:
        self._untimed = warmup_steps
        self._steps: deque[tuple[Event, ...]] = deque(maxlen=MOST_STEPS)

    def step(self, events: Sequence[Event]) -> None:
        """A step is done, and these are this rank's events in it, in seconds since a moment that all ranks share."""
        if self._untimed:
            self._untimed -= 1
        else:
            self._steps.append(tuple(events))

    def median_step(self, group: dist.ProcessGroup | None = None) -> Timeline | None:
        """What all ranks of a pipeline did in its step of median length, from its first event on; None without steps.

        A collective over the pipeline's ranks; on each the same.
        """
        # Two numbers for each step, then one step's events, from every rank to all.
        mine = [
            (min(e.start for e in events), max(e.end for e in events)) for events in self._steps
        ]
        by_step = zip(*of_every_rank(mine, group))
        steps = [
            (min(start for start, _ in spans), max(end for _, end in spans)) for spans in by_step
        ]
        if not steps:
            return None
        lengths = [end - start for start, end in steps]
        median = lengths.index(statistics.median_low(lengths))
        begin = steps[median][0]
        gathered = of_every_rank(self._steps[median], group)
        events = (
            e._replace(start=e.start - begin, end=e.end - begin)
            for events in gathered
            for e in events
        )
        return Timeline(
            len(gathered), tuple(sorted(events, key=lambda event: (event.rank, event.start)))
        )


def record_timeline(cfg: RunConfig, mesh: Mesh, job: Job, recorder: Recorder) -> dict[str, Any]:
    """The field `pipeline` of the record, whose step rank 0 also writes to files; nothing where there is no pipeline.

    A collective. Where data-parallel ranks have pipelines of their own, this is rank 0's.
    """
    if job.cut is None:
        return {}
    split, costs = job.cut.split, job.cut.source
    measured = recorder.median_step(mesh.dense.get_group("pp"))
    # Costs that are no times of this machine, or of whole layers where ranks have shares, tell nothing about seconds.
    simulated = split.timeline if costs.is_measured and cfg.parallel.tp == 1 else None
    pipeline = describe(cfg.parallel, split, str(costs), measured, simulated)
    if dist.get_rank() == 0:
        write_files(Path(cfg.training.output_dir), pipeline, measured, simulated)
    return {"pipeline": asdict(pipeline)}


def describe(
    cfg: Parallel, split: Split, costs: str, measured: Timeline | None, simulated: Timeline | None
) -> PipelineRecord:
    """A pipeline and its steps as a record has them.

    `costs` says where the units' costs come from. `simulated` is the step that they predict, None where they are no
    times of this machine.
    """
    return PipelineRecord(
        schedule=cfg.schedule,
        split=cfg.split,
        boundaries=list(split.boundaries),
        layers=list(split.layers),
        costs=costs,
        measured=_figures(measured) if measured else None,
        simulated=_figures(simulated) if simulated else None,
        simulator_error_percent=100 * (simulated.seconds / measured.seconds - 1)
        if measured and simulated
        else None,
        events=pack(measured) if measured else None,
    )


def _figures(timeline: Timeline) -> PipelineStep:
    idle = [timeline.idle_seconds(rank) for rank in range(timeline.num_ranks)]
    return PipelineStep(
        timeline.seconds, timeline.bubble(), [timeline.seconds - seconds for seconds in idle], idle
    )


def write_files(
    folder: Path, record: PipelineRecord, measured: Timeline | None, simulated: Timeline | None
) -> None:
    """Write TIMELINES into the folder, or nothing where there is neither timeline.

    Without matplotlib, which training does not need, the picture is left out and a line says so.
    """
    named = {"measured": measured, "simulated": simulated}
    timelines = {name: timeline for name, timeline in named.items() if timeline is not None}
    if not timelines:
        return
    content: dict[str, Any] = {"schema_version": SCHEMA_VERSION, **asdict(record)}
    del content["events"]  # packed; here they are whole
    for name, timeline in timelines.items():
        content[name]["events"] = timeline.events
    texts = [dumps(content), perfetto_trace(timelines)]
    try:
        texts.append(gantt_file(timelines))
    except UserError as error:
        print(f"{TIMELINES[-1]} is not drawn: {error}", flush=True)
    for name, text in zip(TIMELINES, texts):
        (folder / name).write_text(text + "\n", encoding="utf-8")
