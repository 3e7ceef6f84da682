from __future__ import annotations

from shardwise.base.schedule.orders import Pipeline
from shardwise.base.schedule.simulate import simulate
from shardwise.base.schedule.timeline import Event, Timeline
from shardwise.lab.drawing.text_chart import text_chart
from tests.drawing.conftest import INSTANT
from tests.schedule.test_simulate import cost


def test_a_chart_has_a_row_for_each_rank_on_one_axis():
    # Two micro-batches, forwards of 1 s and backwards of 2 s: rank 0 waits for rank 1's first
    # backward, and later for its second.
    even = simulate(Pipeline("1f1b", 2, 2), [cost(1.0, 2.0, 0.0)] * 2)
    half = Timeline(
        1,
        (
            Event(0, 0, 0, "F", 0.0, 2.125),
            Event(0, 0, 0, "I", 2.125, 4.0),
            Event(0, 0, 0, "W", 4.0, 4.5),
        ),
    )
    assert list(text_chart({"even": even, "half": half}, columns=18)) == [
        "█ forward  ▒ backward  ▒ backward, inputs  ░ backward, weights  · idle",
        "even",
        "  rank 0  ████····▒▒▒▒··▒▒▒▒ 33.3% idle",
        "  rank 1  ··██▒▒▒▒██▒▒▒▒···· 33.3% idle",
        "half",
        "  rank 0  ████▒▒▒▒░           0.0% idle",
    ]


def test_a_column_of_many_actions_shows_each_in_turn():
    events = [Event(0, 0, i, "F" if i % 2 else "B", i, i + 1.0) for i in range(40)]
    lines = text_chart({"short": Timeline(1, tuple(events))}, columns=10)
    (row,) = [line.split()[2] for line in lines if "rank" in line]
    assert (row.count("█"), row.count("▒")) == (5, 5)


def test_a_step_that_takes_no_time_has_a_row():
    assert list(text_chart({"nothing": INSTANT}))[2].startswith("  rank 0 ")
