from __future__ import annotations

import pytest

from shardwise.base.schedule.orders import Pipeline
from shardwise.base.schedule.simulate import simulate
from shardwise.base.schedule.timeline import pack, unpack
from tests.schedule.test_simulate import cost


def test_a_packed_timeline_is_what_it_was_to_the_microsecond():
    short = simulate(Pipeline("zbv", 2, 4, 2), [cost(0.0010004, 0.002, 0.003)] * 4)
    again = unpack(pack(short))
    assert again.num_ranks == 2
    for event, same in zip(short.events, again.events, strict=True):
        assert same[:4] == event[:4]
        assert same[4:] == pytest.approx(event[4:], abs=0.51e-6)
    for broken in ("F 0 0 1", "X 0 0 1 2", "F 0 0 1 two", ""):
        with pytest.raises(ValueError, match=r"unpack|invalid literal"):
            unpack([broken])
