"""A pipeline's steps: which is kept, what is said of it, and the files."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace
from itertools import pairwise
from xml.etree import ElementTree

import pytest
import torch.distributed as dist
from pydantic import TypeAdapter

from shardwise.assembly.costs import costs_of
from shardwise.base.records.record import PipelineRecord, RunRecord
from shardwise.base.schedule.costs import COUNTED, CostSource
from shardwise.base.schedule.orders import Pipeline
from shardwise.base.schedule.simulate import simulate
from shardwise.base.schedule.split import Split, predict
from shardwise.base.schedule.timeline import Event, Timeline, unpack
from shardwise.checkpoint.output_dir import TIMELINES
from shardwise.config import Parallel
from shardwise.lab.planner.timeline import MOST_STEPS, Recorder, describe, write_files
from tests.distributed import run_ranks
from tests.integration.conftest import make_corpus
from tests.integration.test_train import config, run_on
from tests.schedule.test_simulate import cost

PIPELINE = Pipeline("1f1b", 2, 4)


def predicted() -> Split:
    # Embedding, three layers and head; each layer takes 1 second forward and 2 backward.
    units = [cost(0.0, 0.0, 0.0), *[cost(1.0, 1.0, 1.0)] * 3, cost(0.0, 0.0, 0.0)]
    return predict(units, (0, 3, 5), PIPELINE)


def late(timeline: Timeline) -> Timeline:
    """Every action takes a quarter longer."""
    events = (e._replace(start=1.25 * e.start, end=1.25 * e.end) for e in timeline.events)
    return Timeline(timeline.num_ranks, tuple(events))


def _events(length: float, begin: float = 10.0) -> list[Event]:
    """Return this rank's events in a step: rank 0 begins it, and rank 1 ends it."""
    rank = dist.get_rank()
    start, end = (begin, begin + length / 2) if rank == 0 else (begin + 0.5, begin + length)
    return [Event(rank, rank, 0, "F", start, end)]


def _median() -> tuple[Timeline | None, Timeline | None, Timeline | None]:
    recorder = Recorder(warmup_steps=1)
    nothing = recorder.median_step()
    # The first is of the warm-up; of the others 2 is the lower median.
    for length in (100.0, 3.0, 1.0, 4.0, 2.0):
        recorder.step(_events(length))
    median = recorder.median_step()
    # With the 2 that makes 50, of which the 25th is a 28.
    for length in range(5, 5 + MOST_STEPS - 1):
        recorder.step(_events(float(length)))
    return nothing, median, recorder.median_step()


def test_the_step_of_median_length_begins_at_0_and_is_the_same_on_every_rank():
    (nothing, median, last), other = run_ranks(2, _median)
    assert other == (nothing, median, last)
    assert nothing is None
    assert median == Timeline(2, (Event(0, 0, 0, "F", 0.0, 1.0), Event(1, 1, 0, "F", 0.5, 2.0)))
    assert last.seconds == 28.0


def _two_pipelines() -> Timeline | None:
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    pipeline, rank = dist.get_rank() % 2, dist.get_rank() // 2
    recorder = Recorder(warmup_steps=0)
    recorder.step([Event(rank, rank, 0, "F", 5.0 + rank, 7.0 + rank + pipeline)])
    return recorder.median_step(groups[pipeline])


def test_a_pipeline_beside_another_is_told_alone():
    first, second, *others = run_ranks(4, _two_pipelines)
    assert others == [first, second]
    assert first == Timeline(2, (Event(0, 0, 0, "F", 0.0, 2.0), Event(1, 1, 0, "F", 1.0, 3.0)))
    assert second.seconds == 4.0


def test_what_is_said_of_a_step(tmp_path):
    split = predicted()
    simulated, measured = split.timeline, late(split.timeline)
    told = describe(Parallel(pp=2, split=[2, 1]), split, "by hand", measured, simulated)
    assert (told.schedule, told.split, told.boundaries, told.layers) == (
        "1f1b",
        [2, 1],
        [0, 3, 5],
        [2, 1],
    )
    # Rank 0 has 4 micro-batches of 6 seconds, two forwards of which end at 4; rank 1 has 3 seconds
    # of the first one, from 2 on, so rank 0 waits for a second then, and never again.
    assert told.simulated.seconds == 25.0
    assert told.simulated.busy_seconds == [24.0, 12.0]
    assert told.simulated.idle_seconds == [1.0, 13.0]
    assert told.simulated.bubble == pytest.approx(14 / 50)
    assert split.timeline.waits(0) == [(4.0, 5.0)]
    assert told.measured.seconds == 1.25 * 25.0
    assert told.simulator_error_percent == pytest.approx(-20.0)
    assert unpack(told.events) == measured
    RunRecord("ok", {}, pipeline=asdict(told)).write(tmp_path / "record.json")
    assert RunRecord.read(tmp_path / "record.json").pipeline == asdict(told)


def test_of_costs_that_are_no_times_there_is_no_error():
    split = predicted()
    told = describe(Parallel(pp=2), split, "FLOPs", split.timeline, None)
    assert (told.simulated, told.simulator_error_percent) == (None, None)
    assert told.measured.seconds == 25.0


def test_files(tmp_path):
    split = predicted()
    simulated, measured = split.timeline, late(split.timeline)
    told = describe(Parallel(pp=2), split, "by hand", measured, simulated)
    write_files(tmp_path, told, measured, simulated)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(TIMELINES)
    content, trace = (
        json.loads((tmp_path / name).read_text()) for name in ("timeline.json", "trace.json")
    )
    assert content["schema_version"] == 1
    assert [Event(*event) for event in content["measured"]["events"]] == list(measured.events)
    assert [Event(*event) for event in content["simulated"]["events"]] == list(simulated.events)
    assert content["simulator_error_percent"] == told.simulator_error_percent
    names = [e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"]
    assert names == ["measured", "simulated"]
    svg = ElementTree.parse(tmp_path / "timeline.svg").getroot()
    assert "measured" in svg.findtext("{http://www.w3.org/2000/svg}title", "")


def test_without_matplotlib_the_picture_is_left_out_and_a_line_says_so(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    told = describe(Parallel(pp=2), predicted(), "by hand", predicted().timeline, None)
    write_files(tmp_path, told, predicted().timeline, None)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["timeline.json", "trace.json"]
    assert "timeline.svg" in capsys.readouterr().out


def test_a_run_without_a_timed_step_draws_nothing(tmp_path):
    told = describe(Parallel(pp=2), predicted(), "FLOPs", None, None)
    write_files(tmp_path, told, None, None)
    assert (told.measured, told.events, list(tmp_path.iterdir())) == (None, None, [])


def test_the_measured_step_is_small_in_a_record():
    timeline = simulate(
        Pipeline("interleaved-zero-bubble", 2, 32, 1), [cost(0.011, 0.012, 0.013)] * 2
    )
    told = describe(Parallel(pp=2), predicted(), "FLOPs", timeline, None)
    assert len(timeline.events) == 2 * 32 * 3
    assert len(json.dumps(told.events)) < 6000


@pytest.mark.parametrize(
    "costs",
    [pytest.param(COUNTED, marks=pytest.mark.slow), CostSource("of this machine", num_processes=2)],
)
def test_a_run_leaves_its_timeline(tmp_path, monkeypatch, costs):
    given = lambda *args, **more: (costs_of(*args, **more)[0], costs)  # noqa: E731
    monkeypatch.setattr("shardwise.assembly.describe.costs_of", given)
    make_corpus(tmp_path)
    cfg = config(
        tmp_path, "run", lora=False, steps=3, global_batch_size=4, micro_batch_size=1, eval_every=0
    )
    parallel = Parallel(pp=2, schedule="interleaved-1f1b", split=[1, 1, 1, 1])
    cfg = replace(cfg, parallel=parallel, data=replace(cfg.data, validation=0.0))
    record = run_on(2, cfg)
    assert record.pipeline is not None
    told = TypeAdapter(PipelineRecord).validate_python(record.pipeline)
    assert (told.layers, told.costs) == ([1, 1, 1, 1], str(costs))
    assert (told.simulated is None) == (told.simulator_error_percent is None) == (costs == COUNTED)
    # 2 of 3 steps are warm-up. Each rank has done what its schedule says, one after the other.
    events = unpack(told.events or []).events
    pipeline = Pipeline("interleaved-1f1b", 2, 4, 2)
    for rank in (0, 1):
        did = [event[1:4] for event in events if event.rank == rank]
        assert did == [
            (action.chunk, action.microbatch, action.kind) for action in pipeline.order(rank)
        ]
    assert all(
        before.end <= after.start for before, after in pairwise(events) if before.rank == after.rank
    )
    assert all((tmp_path / "run" / name).exists() for name in TIMELINES)
