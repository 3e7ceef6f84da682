"""Times on a CPU; `make gpu-plan` takes those of a GPU."""

from __future__ import annotations

import time
from functools import partial

import pytest
import torch

from shardwise.metrics.stopwatch import Stopwatch


@pytest.mark.parametrize("of", ["both", "device", "host"])
def test_a_cpu_is_its_own_host(of):
    watch = Stopwatch(torch.device("cpu"), of)
    assert watch.median_seconds(partial(time.sleep, 0.01), rounds=3) >= 0.01


def test_what_runs_first_is_not_timed():
    seconds = iter([2.0, 0.0])
    watch = Stopwatch(torch.device("cpu"))
    assert watch.median_seconds(lambda: time.sleep(next(seconds)), rounds=1) < 1.0
