from __future__ import annotations

import pytest
import torch

from shardwise.metrics import meter as module
from shardwise.metrics.meter import Meter


@pytest.fixture
def run(monkeypatch):
    """Steps that last exactly these seconds, of these tokens."""

    def run_steps(warmup_steps: int, seconds: list[float], tokens: list[int]) -> Meter:
        now = [100.0]
        monkeypatch.setattr(module.time, "perf_counter", lambda: now[0])
        meter = Meter(warmup_steps)
        for duration, count in zip(seconds, tokens, strict=True):
            meter.start()
            now[0] += duration
            meter.stop(count)
            now[0] += 50.0  # between steps: not counted
        return meter

    return run_steps


def test_warmup_is_left_out_of_every_figure(run):
    meter = run(2, [64.0, 32.0, 1.0, 2.0, 1.0], [10, 10, 100, 200, 100])
    assert meter.tokens_per_second() == 400 / 4
    assert meter.first_step_seconds == 64.0  # the warm-up too
    # Sorted 1, 1, 2: p90 lies at 0.9 * 2 = 1.8 of the indices 0..2, so between 1 and 2: 1.8.
    expected = {"mean": 4 / 3, "p10": 1.0, "p50": 1.0, "p90": 1.8, "max": 2.0, "steps": 3}
    assert meter.step_seconds() == pytest.approx(expected)
    assert meter.seconds == [64.0, 32.0, 1.0, 2.0, 1.0]  # the log of steps has them all


def test_throughput_is_tokens_over_seconds_and_no_mean_of_rates(run):
    # 100 tokens in 1 s and 100 in 4 s: 200 / 5, where the mean of the rates 100 and 25 would be
    # 62.5.
    assert run(0, [1.0, 4.0], [100, 100]).tokens_per_second() == 40.0


def test_one_timed_step_is_all_of_its_percentiles(run):
    seconds = run(1, [9.0, 2.0], [5, 5]).step_seconds()
    assert seconds == {"mean": 2.0, "p10": 2.0, "p50": 2.0, "p90": 2.0, "max": 2.0, "steps": 1}


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_a_run_within_the_warmup_has_no_figures(run, steps):
    meter = run(3, [1.0] * steps, [10] * steps)
    assert meter.tokens_per_second() is None
    assert meter.step_seconds() is None


def test_a_step_is_started_before_it_is_stopped(run):
    meter = run(0, [1.0], [1])
    with pytest.raises(AssertionError, match="without start"):
        meter.stop(1)


def test_a_run_on_the_cpu_takes_nothing_of_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    waits = []  # the first would make a context on the GPU, of some 100 MB
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waits.append("waits"))
    meter = Meter(0)
    meter.start()
    meter.stop(1)
    assert not waits
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    meter.start()
    meter.stop(1)
    assert len(waits) == 2
