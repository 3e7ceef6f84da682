from __future__ import annotations

from shardwise.base.schedule.orders import Pipeline
from shardwise.base.schedule.simulate import simulate
from shardwise.base.schedule.timeline import Event, Timeline
from tests.schedule.test_simulate import cost

INSTANT = Timeline(1, (Event(0, 0, 0, "F", 0.0, 0.0),))
"""A step that takes no time."""


def two_timelines() -> dict[str, Timeline]:
    """Return an uneven and an even split of a V-shaped schedule on two ranks."""
    pipeline = Pipeline("zbv", 2, 4, 2)
    return {
        "uniform": simulate(pipeline, [cost(1.0, 1.0, 1.0)] * 3 + [cost(3.0, 3.0, 3.0)]),
        "<balanced> & 'more'": simulate(pipeline, [cost(1.0, 1.0, 1.0)] * 4),
    }
