"""Instruments that a run is given: a choice within a budget of memory, and what sees its steps.

Both predict, which the trainer does not. `lab/instruments.py` makes them.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from shardwise.assembly.build import Job
from shardwise.assembly.describe import Describe
from shardwise.assembly.recomputation import Chosen
from shardwise.base.batches import AnyBatch
from shardwise.base.interfaces import Mesh
from shardwise.base.schedule.timeline import Event
from shardwise.config import Lora, RunConfig


class StepObserver(Protocol):
    """Sees the steps of a run on this rank, and adds fields to its record."""

    def watching(
        self, job: Job, microbatches: Sequence[AnyBatch], number: int
    ) -> AbstractContextManager[None]:
        """Return the context of a step, the `number`-th of this process."""

    def took(self, events: Sequence[Event]) -> None:
        """Take a pipeline's actions in the step just done."""

    def moved(self) -> None:
        """Begin again: layers have moved between the ranks of a pipeline."""

    def fields_of_pipeline(self, job: Job) -> dict[str, Any]:
        """Return fields of the record, and write files of the output folder; a collective."""

    def fields_of_bytes(self, job: Job, note: Callable[[str], object]) -> dict[str, Any]:
        """Return fields on the bytes that a step sends, after a run with `measure.memory`; a
        collective. `note` gets a line where one is not known.
        """


@dataclass(frozen=True)
class Instruments:
    """Instruments of the training loop, or of a loop of the caller."""

    choose: Callable[[RunConfig, Mesh, Lora | None, Describe], Chosen | None]
    """Chooses what is computed again within a budget of memory: (run, mesh, adapter of the
    checkpoint that it resumes, what describes it)."""
    observer: Callable[[RunConfig, Mesh], StepObserver]
