"""The orders against those that torch's schedules list, or run where they only draw their list."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.pipelining import schedules as torch_schedules

from shardwise.base.schedule.orders import ORDERS, Pipeline

CLASSES = {
    "gpipe": torch_schedules.ScheduleGPipe,
    "1f1b": torch_schedules.Schedule1F1B,
    "interleaved-1f1b": torch_schedules.ScheduleInterleaved1F1B,
    "looped-bfs": torch_schedules.ScheduleLoopedBFS,
    "interleaved-zero-bubble": torch_schedules.ScheduleInterleavedZeroBubble,
    "zbv": torch_schedules.ScheduleZBVZeroBubble,
    "dualpipe-v": torch_schedules.ScheduleDualPipeV,
}
SINGLE = ("gpipe", "1f1b")
SIZES = [(p, m) for p in (1, 2, 3, 4, 6) for m in (1, 2, 3, 4, 5, 6, 8, 9, 12, 16)]
VIRTUAL = {"gpipe": [1], "1f1b": [1], "zbv": [2], "dualpipe-v": [2]}  # the others have any number


class Stage(SimpleNamespace):
    """As much of a pipeline stage as a schedule looks at; it writes down what it is made to run."""

    def __init__(self, index: int, rank: int, pipeline: Pipeline) -> None:
        super().__init__(
            stage_index=index,
            num_stages=pipeline.num_chunks,
            group_size=pipeline.num_ranks,
            group_rank=rank,
            is_first=index == 0,
            is_last=index == pipeline.num_chunks - 1,
            submod=None,
            ran=[],
        )

    def forward_one_chunk(self, microbatch: int, *args: Any, **kwargs: Any) -> None:
        self.ran.append((self.stage_index, "F", microbatch, False))

    def backward_one_chunk(self, microbatch: int, **kwargs: Any) -> None:
        self.ran.append((self.stage_index, "B", microbatch, False))

    def perform_reduce_grad(self, scale: float) -> None:
        pass

    def no_messages(self, microbatch: int) -> list[Any]:
        return []

    get_fwd_recv_ops = get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = no_messages


def from_torch(pipeline: Pipeline) -> list[list[tuple[int, str, int, bool]]]:
    """Each rank's (chunk, kind, micro-batch, joined)."""
    make = CLASSES[pipeline.schedule]
    if pipeline.schedule in SINGLE:
        return [
            _run(make(Stage(rank, rank, pipeline), pipeline.num_microbatches))
            for rank in range(pipeline.num_ranks)
        ]
    stages = [Stage(chunk, 0, pipeline) for chunk in pipeline.chunks_of(0)]
    listed = make(stages, pipeline.num_microbatches).pipeline_order
    return [
        [a for action in listed[rank] if action for a in _flat(action)]
        for rank in range(pipeline.num_ranks)
    ]


def _run(schedule: Any) -> list[tuple[int, str, int, bool]]:
    schedule._initialize_stage = lambda *args: None
    microbatches = schedule._n_microbatches
    schedule._step_microbatches([()] * microbatches, [{}] * microbatches)
    return schedule._stage.ran


def _flat(action: Any) -> list[tuple[int, str, int, bool]]:
    parts = action.sub_actions or (action,)
    return [
        (a.stage_index, a.computation_type.value, a.microbatch_index, a is not parts[-1])
        for a in parts
    ]


@pytest.mark.parametrize("schedule", ORDERS)
def test_orders_are_torchs(schedule):
    compared = 0
    for p, m in SIZES:
        for v in VIRTUAL.get(schedule, [1, 2, 3]):
            try:
                pipeline = Pipeline(schedule, p, m, v)
            except AssertionError:
                # What is refused here, torch refuses too.
                with pytest.raises(ValueError, match="icrobatches"):
                    CLASSES[schedule](*_first_stages(schedule, p, m, v))
                continue
            ours = [[tuple(action) for action in pipeline.order(rank)] for rank in range(p)]
            assert ours == from_torch(pipeline), (p, m, v)
            compared += 1
    assert compared >= 20


def _first_stages(schedule: str, p: int, m: int, v: int) -> tuple[Any, int]:
    shape = SimpleNamespace(num_chunks=p * v, num_ranks=p)
    stages = [Stage(i, 0, shape) for i in range(v)]
    return (stages[0] if schedule in SINGLE else stages), m


def test_torchs_own_list_for_1f1b_leaves_out_a_forward():
    # The list that torch draws 1F1B from is off by one on the last rank (it runs right), so
    # `from_torch` runs it.
    pipeline = Pipeline("1f1b", 2, 4)
    listed = torch_schedules.Schedule1F1B(Stage(1, 1, pipeline), 4).pipeline_order[1]
    assert [a.microbatch_index for a in listed if a and a.computation_type.value == "F"] == [
        1,
        2,
        3,
        4,
    ]


def test_chunks_lie_in_a_loop_or_a_v():
    assert [Pipeline("looped-bfs", 2, 4, 3).chunks_of(rank) for rank in (0, 1)] == [
        (0, 2, 4),
        (1, 3, 5),
    ]
    assert [Pipeline("zbv", 3, 4, 2).chunks_of(rank) for rank in (0, 1, 2)] == [
        (0, 5),
        (1, 4),
        (2, 3),
    ]
