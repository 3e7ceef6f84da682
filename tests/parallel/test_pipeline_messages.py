"""A pipeline keeps no more messages of many micro-batches than of few, and a plan counts them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from torch.distributed.pipelining import PipelineStage
from torch.multiprocessing.reductions import StorageWeakRef

from shardwise.assembly import build
from shardwise.assembly.describe import describe
from shardwise.base.schedule.orders import ORDERS
from shardwise.config import RunConfig
from shardwise.lab.planner.passes import progress_of
from shardwise.lab.planner.peak import Rank
from shardwise.lab.planner.share import boundaries_of, share_of
from shardwise.metrics.memory import PeakMemory
from shardwise.parallel.mesh import build_mesh
from shardwise.parallel.pipeline_stage import ScheduledStage
from tests.distributed import run_ranks
from tests.left_out import some_now
from tests.parallel.test_pipeline_parallel import RANKS, UPPER, WHOLE, config
from tests.parity.harness import microbatches

HIDDEN = 2 * 24 * 64 * 4
"""Bytes of the hidden states of a micro-batch."""
FORWARDS_FIRST = ("gpipe", "looped-bfs")
"""Schedules whose activations grow with the micro-batches."""
COUNTS = (8, 16, 64)
CASES = [*((name, "full") for name in ORDERS), *((name, "upper") for name in WHOLE)]
NOW = [*((name, "full") for name in ("1f1b", "interleaved-1f1b", "zbv")), ("looped-bfs", "upper")]

REPLACED = (
    *("forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk"),
    *("get_fwd_recv_ops", "get_bwd_recv_ops", "get_bwd_send_ops"),
)
Action = tuple[str, int]
"""The kind of an action, and its chunk."""


class Watch:
    """What is alive of this rank's messages as its actions begin."""

    def __init__(self) -> None:
        self.outputs: dict[tuple[int, int], StorageWeakRef] = {}
        """What left each chunk, by micro-batch."""
        self.gradients: list[StorageWeakRef] = []
        self.received: dict[tuple[int, int], StorageWeakRef] = {}
        self.early: dict[tuple[int, int, str], StorageWeakRef] = {}
        """What was received for a chunk, a micro-batch and a forward or a backward to come."""
        self.ended: set[tuple[int, int]] = set()
        """Chunks and micro-batches after their backward, or their forward where none follows."""
        self.most: dict[Action, int] = defaultdict(int)
        """Outputs, gradients and what came early at once, except the action's own."""
        self.unneeded = 0
        """Outputs and received tensors after all that reads them, and gradients that are sent."""

    def begin(self, stage: ScheduledStage, kind: str, number: int) -> None:
        place = stage.stage_index, number
        outputs = {key for key, kept in self.outputs.items() if not kept.expired()}
        received = {key for key, kept in self.received.items() if not kept.expired()}
        self.gradients = [kept for kept in self.gradients if not kept.expired()]
        own = {place} if kind in "BI" else set()
        action = kind, stage.stage_index
        self.early.pop((*place, "F" if kind == "F" else "B"), None)
        number = len(outputs - own) + len(self.gradients) + len(self.early)
        self.most[action] = max(self.most[action], number)
        late = len(outputs & self.ended) + len(received & self.ended) + len(self.gradients)
        self.unneeded = max(self.unneeded, late)


def watched() -> Callable[[], Watch]:
    """Watch the stages of this process; the result starts anew and returns what it then finds."""
    watch = Watch()
    torchs = {name: getattr(PipelineStage, name) for name in REPLACED}

    def forward_one_chunk(stage: Any, number: int, *args: Any, **kwargs: Any) -> Any:
        watch.begin(stage, "F", number)
        place = stage.stage_index, number
        output = torchs["forward_one_chunk"](stage, number, *args, **kwargs)
        if not stage.is_last:
            watch.outputs[place] = StorageWeakRef(output.untyped_storage())
        if not stage.runs_backward:
            watch.ended.add(place)
        return output

    def backward_one_chunk(stage: Any, number: int, loss: Any, full: bool, last: bool) -> None:
        if full or not stage.is_first:
            watch.begin(stage, "B" if full else "I", number)
        torchs["backward_one_chunk"](stage, number, loss, full, last)
        if full:
            watch.ended.add((stage.stage_index, number))

    def backward_weight_one_chunk(stage: Any, number: int, last: bool) -> None:
        watch.begin(stage, "B" if stage.is_first else "W", number)
        torchs["backward_weight_one_chunk"](stage, number, last)
        watch.ended.add((stage.stage_index, number))

    def get_fwd_recv_ops(stage: Any, number: int) -> Any:
        ops = torchs["get_fwd_recv_ops"](stage, number)
        for op in ops:
            place = stage.stage_index, number
            watch.received[place] = StorageWeakRef(op.tensor.untyped_storage())
            watch.early[*place, "F"] = watch.received[place]
        return ops

    def get_bwd_recv_ops(stage: Any, number: int) -> Any:
        ops = torchs["get_bwd_recv_ops"](stage, number)
        for op in ops:
            early = stage.stage_index, number, "B"
            watch.early[early] = StorageWeakRef(op.tensor.untyped_storage())
        return ops

    def get_bwd_send_ops(stage: Any, number: int) -> Any:
        ops = torchs["get_bwd_send_ops"](stage, number)
        watch.gradients += [StorageWeakRef(op.tensor.untyped_storage()) for op in ops]
        return ops

    replacements = locals()
    for name in REPLACED:
        setattr(PipelineStage, name, replacements[name])

    def anew() -> Watch:
        nonlocal watch
        watch = Watch()
        return watch

    return anew


def run_of(schedule: str, mode: str, count: int) -> RunConfig:
    return config(
        schedule,
        lora=UPPER if mode == "upper" else None,
        split="uniform",
        training={"global_batch_size": 2 * count},
    )


class Found(NamedTuple):
    """What a rank took of so many micro-batches."""

    added_bytes: int
    """What a step needs beside what is there before it."""
    unneeded: int
    unneeded_in_evaluation: int
    most: dict[Action, int]


def _steps(cases: list[tuple[str, str]]) -> list[list[Found]]:
    """Return for each case and number of micro-batches what a step adds, in bytes, and what of
    messages there is in a step and in an evaluation.
    """
    anew, found = watched(), []
    for schedule, mode in cases:
        found.append([])
        for count in COUNTS:
            cfg = run_of(schedule, mode, count)
            mesh = build_mesh(cfg, torch.device("cpu"))
            job = build.build(cfg, mesh)
            rows = microbatches(cfg, mesh, 1)
            with PeakMemory(mesh.device) as memory:
                job.pm.run(job.pm, rows, 1.0, True)
            trained = anew()
            job.pm.run(job.pm, rows, 1.0, True)
            evaluated = anew()
            job.pm.run(job.pm, rows, 1.0, False)
            numbers = trained.unneeded, evaluated.unneeded, dict(trained.most)
            found[-1].append(Found(memory.added_bytes(), *numbers))
    return found


@cache
def found_in(cases: tuple[tuple[str, str], ...]) -> dict[tuple[str, str], list[list[Found]]]:
    by_rank = run_ranks(RANKS, _steps, [*cases])
    return dict(zip(cases, map(list, zip(*by_rank, strict=True)), strict=True))


def ranks_of(schedule: str, mode: str) -> list[list[Found]]:
    """Return what each rank took, by the number of micro-batches."""
    case = schedule, mode
    return found_in(tuple(NOW) if case in NOW else (case,))[case]


@pytest.mark.parametrize(("schedule", "mode"), some_now(CASES, NOW))
def test_no_more_messages_are_kept_of_many_micro_batches(schedule, mode):
    for few, some, many in ranks_of(schedule, mode):
        # An evaluation has at once what each chunk is sending, and one more that is local.
        assert few.unneeded == some.unneeded == many.unneeded <= 3
        evaluated = [found.unneeded_in_evaluation for found in (few, some, many)]
        assert evaluated[0] == evaluated[1] == evaluated[2] <= 3
        if schedule not in FORWARDS_FIRST:
            # A step keeps a loss and its parts of every micro-batch.
            assert many.added_bytes - some.added_bytes < 48 * 32 < HIDDEN


@pytest.mark.parametrize(("schedule", "mode"), some_now(CASES, NOW))
def test_a_plan_has_the_messages_that_are_kept(schedule, mode):
    for rank, numbers in enumerate(ranks_of(schedule, mode)):
        for count, found in zip(COUNTS, numbers, strict=True):
            planned = planned_messages(run_of(schedule, mode, count), rank)
            assert {action: planned[action] for action in found.most} == found.most


def planned_messages(cfg: RunConfig, rank: int) -> dict[Action, float]:
    """Return the most hidden states that a rank keeps at each action and chunk, by its plan."""
    run = describe(cfg, RANKS)
    assert run.pipeline is not None
    coordinates = dict.fromkeys(run.sizes, 0) | {"pp": rank}
    share = share_of(cfg, run, coordinates, boundaries_of(cfg, run))
    actions = [
        (kind, run.pipeline.chunks_of(rank)[place])
        for (kind, place, _), progress in progress_of(run.pipeline, rank).items()
        for _ in progress
    ]
    most: dict[Action, float] = defaultdict(int)
    passes = Rank(cfg, run, share, coordinates, {}).passes()
    for action, one in zip(actions, passes, strict=True):
        most[action] = max(most[action], one.messages / HIDDEN)
    return most
