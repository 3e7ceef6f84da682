"""When layers should move between the ranks of a pipeline, by the times of its steps."""

import statistics
from collections import deque
from collections.abc import Sequence

import torch.distributed as dist

from shardwise.assembly.build import Job
from shardwise.assembly.costs import limits_bytes
from shardwise.base.interfaces import Mesh
from shardwise.base.schedule.resplit import Proposal, SeenTimes, better_split
from shardwise.base.schedule.timeline import Event
from shardwise.config import RunConfig
from shardwise.parallel.reduce import from_every_rank

FIRST_STEPS = 4
"""The steps under a split, after its warm-up, that are compared with the prediction. As long as the
split stays, the next comparison is after twice as many."""
MOST_STEPS = 50
"""The steps, the last ones, whose times are kept."""


class Watch:
    """Watches the steps of a pipeline, and says when another split would gain more than it costs.

    The cost of a move is taken to be that of the last one; of the first, what it took to build the
    run and what its first step took beyond the others.
    """

    def __init__(self, cfg: RunConfig, mesh: Mesh, job: Job) -> None:
        self._cfg, self._mesh = cfg, mesh
        self._warmup = max(1, cfg.measure.warmup_steps)
        self._seen: dict[tuple[int, ...], SeenTimes] = {}
        self._settled = False
        self.begin(job.build_seconds)

    def begin(self, cost_seconds: float) -> None:
        """Begin with another split; the next move is taken to cost so much."""
        self._cost = cost_seconds
        self._window, self._num_steps, self._first = FIRST_STEPS, 0, 0.0
        self._steps: deque[tuple[float, float]] = deque(maxlen=MOST_STEPS)

    def step(self, events: Sequence[Event]) -> None:
        """Keep how long this rank worked in a step, and when it had done so."""
        busy = sum(event.end - event.start for event in events)
        end = max((event.end for event in events), default=0.0)
        self._num_steps += 1
        if self._num_steps == 1:
            self._first = end
        if self._num_steps > self._warmup:
            self._steps.append((busy, end))

    def proposal(self, job: Job, steps_left: int) -> Proposal | None:
        """Return a better split, the same on every rank; None if there is none or no time for it.

        A collective when the steps are enough: four numbers from every rank to all.
        """
        is_due = self._num_steps >= self._warmup + self._window
        if self._settled or not is_due or steps_left <= 0:
            return None
        self._window *= 2
        busy, step = (statistics.median(column) for column in zip(*self._steps))
        cost = self._cost + max(0.0, self._first - step)
        ranks = from_every_rank((self._mesh.rank("pp"), busy, step, cost))
        proposal = None
        if dist.get_rank() == 0:
            assert job.cut is not None
            # Replicas wait for one another at the end of a step, so that the slowest one counts.
            slowest = [
                max(busy for place, busy, _, _ in ranks if place == rank)
                for rank in range(job.cut.pipeline.num_ranks)
            ]
            now = job.cut.split.boundaries
            self._seen.pop(now, None)  # it is the latest now
            self._seen[now] = SeenTimes(tuple(slowest), max(step for _, _, step, _ in ranks))
            proposal = better_split(
                job.cut.units,
                job.cut.pipeline,
                now,
                limits_bytes(self._cfg.parallel),
                self._seen,
                steps_left,
                max(cost for _, _, _, cost in ranks),
            )
        # One rank decides, since another make of processor may round otherwise.
        proposal = from_every_rank(proposal)[0]
        self._settled = proposal is not None and proposal.goes_back
        return proposal

    def measured(self, job: Job) -> float | None:
        """Return what a step takes under the current split; None before a comparison; on rank 0."""
        seen = self._seen.get(job.cut.split.boundaries) if job.cut else None
        return None if seen is None else seen.step_seconds
