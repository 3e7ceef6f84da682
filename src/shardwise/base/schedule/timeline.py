"""One step of a pipeline, simulated or measured: which rank ran which action from when to when."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from shardwise.base.schedule.orders import KIND_NAMES, Kind


class Event(NamedTuple):
    """An action of a rank and when it ran, in seconds from the start of the step."""

    rank: int
    chunk: int
    microbatch: int
    kind: Kind
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """The events of all ranks in one step."""

    num_ranks: int
    events: tuple[Event, ...]

    @property
    def seconds(self) -> float:
        """The length of the step: the end of its last event."""
        return max((event.end for event in self.events), default=0.0)

    def idle_seconds(self, rank: int) -> float:
        """Return how long a rank does nothing."""
        busy = sum(event.end - event.start for event in self.events if event.rank == rank)
        return self.seconds - busy

    def waits(self, rank: int) -> list[tuple[float, float]]:
        """Return the spans (start, end) in which a rank does nothing."""
        spans = sorted((event.start, event.end) for event in self.events if event.rank == rank)
        edges = pairwise([(0.0, 0.0), *spans, (self.seconds, self.seconds)])
        return [(before[1], after[0]) for before, after in edges if after[0] > before[1]]

    def bubble(self, rank: int | None = None) -> float:
        """Return the idle share of a rank's time, or of the time of all ranks if `rank` is None."""
        if self.seconds == 0.0:
            return 0.0
        ranks = range(self.num_ranks) if rank is None else [rank]
        return sum(self.idle_seconds(r) for r in ranks) / (self.seconds * len(ranks))


def pack(timeline: Timeline) -> list[str]:
    """Return a timeline in few bytes, as records keep it.

    Each rank has a line. It lists `kind chunk micro-batch start end` of each event, in whole
    microseconds.
    """
    lines: list[list[str]] = [[] for _ in range(timeline.num_ranks)]
    for event in timeline.events:
        microseconds = f"{event.start * 1e6:.0f} {event.end * 1e6:.0f}"
        entry = f"{event.kind} {event.chunk} {event.microbatch} {microseconds}"
        lines[event.rank].append(entry)
    return [", ".join(line) for line in lines]


def unpack(lines: Sequence[str]) -> Timeline:
    """Return the timeline that `pack` has written; ValueError where a line is not of its form."""
    events = []
    for rank, line in enumerate(lines):
        for entry in line.split(", "):
            letter, chunk, microbatch, start, end = entry.split(" ")
            (kind,) = (kind for kind in KIND_NAMES if kind == letter)
            seconds = int(start) / 1e6, int(end) / 1e6
            events.append(Event(rank, int(chunk), int(microbatch), kind, *seconds))
    return Timeline(len(lines), tuple(events))
