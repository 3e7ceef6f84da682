"""Instruments of a run: the choice within a budget of memory, and a recorder of its steps."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from shardwise.assembly.build import Job, StageSplit
from shardwise.base.batches import AnyBatch
from shardwise.base.interfaces import Mesh
from shardwise.base.schedule.timeline import Event
from shardwise.config import RunConfig
from shardwise.lab.planner.recompute import chosen_of
from shardwise.parallel.reduce import from_every_rank
from shardwise.training.instruments import Instruments

if TYPE_CHECKING:
    from shardwise.lab.planner.collectives import Collectives
    from shardwise.lab.planner.timeline import Recorder


class StepRecorder:
    """Counts what a step sends, and keeps a pipeline's actions; see `StepObserver`."""

    def __init__(self, cfg: RunConfig, mesh: Mesh) -> None:
        self._cfg, self._mesh = cfg, mesh
        self._actions: Recorder | None = None  # recorder of a pipeline
        self._sent: Collectives | None = None  # messages of the step that `watching` has counted
        self._cut: StageSplit | None = None  # split of that step
        self._num_targets: list[int] | None = None  # numbers of its micro-batches, on this rank

    @contextlib.contextmanager
    def watching(self, job: Job, microbatches: Sequence[AnyBatch], number: int) -> Generator[None]:
        """Count what the step sends if it is one of the last two of the warm-up (not timed).

        The last one stays, as earlier ones make stages ready, unless it has a message that cannot
        be counted: in its second step DDP agrees on its buckets.
        """
        measure = self._cfg.measure
        is_seen = not self._cfg.training.is_compiled
        if not (measure.memory and is_seen and measure.warmup_steps - number in (0, 1)):
            yield
            return
        from shardwise.lab.planner.collectives import Collectives, targets_on_rank

        num_targets = targets_on_rank(job, microbatches)
        with Collectives(self._mesh) as sent:
            yield
        if self._sent is None or not sent.uncounted:
            self._sent, self._cut, self._num_targets = sent, job.cut, num_targets

    def took(self, events: Sequence[Event]) -> None:
        """Keep the actions of a step."""
        if events:  # none without a pipeline
            self._recorder().step(events)

    def _recorder(self) -> Recorder:
        from shardwise.lab.planner.timeline import Recorder

        if self._actions is None:
            self._actions = Recorder(self._cfg.measure.warmup_steps)
        return self._actions

    def moved(self) -> None:
        """Forget the actions of the steps so far."""
        self._actions = None

    def fields_of_pipeline(self, job: Job) -> dict[str, Any]:
        """Return the field `pipeline`, and write its timelines; {} without a pipeline."""
        if job.cut is None:
            return {}
        from shardwise.lab.planner.timeline import record_timeline

        return record_timeline(self._cfg, self._mesh, job, self._recorder())

    def fields_of_bytes(self, job: Job, note: Callable[[str], object]) -> dict[str, Any]:
        """Return the bytes that a step has sent, and that formulas say; see `StepObserver`."""
        counted = from_every_rank(None if self._sent is None else self._sent.sent_bytes)
        predicted = from_every_rank(self._predicted_bytes(job, note))
        return {
            "sent_bytes_per_step": None if None in counted else counted,
            "sent_bytes_by_formula": None if None in predicted else predicted,
        }

    def _predicted_bytes(self, job: Job, note: Callable[[str], object]) -> int | None:
        """Return what a step sends by formula. No mistake in it ends a run whose work is done."""
        from shardwise.lab.planner.collectives import predicted_bytes

        job = job if self._sent is None else replace(job, cut=self._cut)
        try:
            return predicted_bytes(self._cfg, job, self._mesh, self._num_targets)
        except Exception as error:
            note(f"what a step sends by formula is not known: {type(error).__name__}: {error}")
            return None


INSTRUMENTS = Instruments(chosen_of, StepRecorder)
