"""What `torch.distributed.pipelining` (2.13) does that shardwise refuses or works around, shown
without shardwise.

Each test passes while torch does it, and fails when torch mends it: then the refusal or detour that
it names can go. The controls beside them are what shardwise does instead.
"""

from __future__ import annotations

import faulthandler
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from math import inf
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts, noop_context_fn

from tests.distributed import run_ranks

pytestmark = pytest.mark.pins("torch")

SINGLE = {"gpipe": schedules.ScheduleGPipe, "1f1b": schedules.Schedule1F1B}
LOOPED = {
    "looped-bfs": schedules.ScheduleLoopedBFS,
    "interleaved-1f1b": schedules.ScheduleInterleaved1F1B,
}
WHOLE = {**SINGLE, **LOOPED}
SPLIT = {  # the input's and the weights' gradients apart
    "interleaved-zero-bubble": schedules.ScheduleInterleavedZeroBubble,
    "zbv": schedules.ScheduleZBVZeroBubble,
    "dualpipe-v": schedules.ScheduleDualPipeV,
}
SCHEDULES = {**WHOLE, **SPLIT}
RANKS, MICROBATCHES, ROWS, WIDTH = (
    2,
    4,
    2,
    8,
)  # DualPipe-V needs twice as many micro-batches as ranks
RIGHT, WRONG = 1e-5, 1e-2
"""Of a gradient, relative to its largest element: rounding of so short sums is far less, a lost
term far more."""


class Chunk(nn.Sequential):
    """A stage's part of the model; `asks`: its input is made to require a gradient, as an
    embedding's output can be."""

    def __init__(self, index: int, frozen: bool, asks: bool) -> None:
        torch.manual_seed(index)
        super().__init__(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.requires_grad_(not frozen)
        self.asks = asks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.detach().requires_grad_() if self.asks else x)


class Run:
    """This rank's stages, the lowest `frozen` of the model frozen, under a schedule of torch's.

    `static`: the stages are told what passes between them; otherwise torch finds it out by a
    forward of its own.
    """

    def __init__(
        self,
        name: str,
        wrap: Callable[[Any, DeviceMesh], nn.Module] | None = None,
        frozen: int = 0,
        asks: bool = False,
        static: bool = True,
        microbatches: int = MICROBATCHES,
    ) -> None:
        self.mesh = init_device_mesh(
            "cpu", (dist.get_world_size() // RANKS, RANKS), mesh_dim_names=("data", "pp")
        )
        rank, self.replica = self.mesh.get_local_rank("pp"), self.mesh.get_local_rank("data")
        count = RANKS if name in SINGLE else 2 * RANKS
        second = count - 1 - rank if name in ("zbv", "dualpipe-v") else rank + RANKS
        own, self.whole = (
            [Chunk(i, i < frozen, asks and i == 0) for i in range(count)] for _ in range(2)
        )
        self.stages = []
        for index in [rank] if name in SINGLE else [rank, second]:
            needed = [
                i > 0 and (asks or frozen < i) for i in (index, index + 1)
            ]  # is anything trained below?
            below, above = (torch.zeros(ROWS, WIDTH, requires_grad=flag) for flag in needed)
            known: dict[str, Any] = {"input_args": below, "output_args": above} if static else {}
            module = wrap(own[index], self.mesh) if wrap else own[index]
            group = self.mesh.get_group("pp")
            self.stages.append(
                PipelineStage(module, index, count, torch.device("cpu"), group=group, **known)
            )
        stages: Any = self.stages[0] if name in SINGLE else self.stages
        self.schedule = SCHEDULES[name](stages, microbatches, loss_fn=summed, scale_grads=False)

    def step(self, x: torch.Tensor, target: torch.Tensor, train: bool = True) -> list[float]:
        """The losses of the micro-batches, where the last stage is."""
        inputs = (x,) if self.stages[0].is_first else ()
        losses: list[torch.Tensor] = []
        with torch.set_grad_enabled(train):
            act = self.schedule.step if train else self.schedule.eval
            act(
                *inputs,
                target=target if any(stage.is_last for stage in self.stages) else None,
                losses=losses,
            )
        return [loss.item() for loss in losses]

    def errors(self) -> list[float]:
        """One step; then of each trained parameter here, how far its gradient is off from the whole
        model's."""
        self.step(*rows(self.replica))
        for replica in range(self.mesh.size(0)):
            x, target = rows(replica)
            summed(nn.Sequential(*self.whole)(x), target).backward()
        return [
            inf if parameter.grad is None else _error(parameter.grad, reference.grad)
            for stage in self.stages
            for parameter, reference in zip(
                stage.submod.parameters(), self.whole[stage.stage_index].parameters()
            )
            if reference.grad is not None
        ]


def _error(found: torch.Tensor, reference: torch.Tensor) -> float:
    whole = found.full_tensor() if isinstance(found, DTensor) else found
    return ((whole - reference).abs().max() / reference.abs().max()).item()


def summed(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().sum()


def rows(replica: int, count: int = MICROBATCHES * ROWS) -> tuple[torch.Tensor, torch.Tensor]:
    return tuple(
        torch.randn(2, count, WIDTH, generator=torch.Generator().manual_seed(100 + replica))
    )


def in_ddp(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    def add_up(group, bucket):
        future = dist.all_reduce(bucket.buffer(), group=group, async_op=True).get_future()
        return future.then(lambda done: done.value()[0])

    wrapped = DistributedDataParallel(module, process_group=mesh.get_group("data"))
    wrapped.register_comm_hook(mesh.get_group("data"), add_up)
    return wrapped


def in_fsdp(module: nn.Module, mesh: DeviceMesh, reshard: bool) -> nn.Module:
    for unit in (module[0], module[2], module):
        fully_shard(unit, mesh=mesh["data"], reshard_after_forward=reshard)
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)  # gloo has no mean
    return module


def compiled(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    module.forward = torch.compile(module.forward, backend="aot_eager")
    return module


def _errors(names: Sequence[str], options: dict[str, Any]) -> dict[str, list[float]]:
    return {name: Run(name, **options).errors() for name in names}


def errors(names: Sequence[str], processes: int = RANKS, **options: Any) -> dict[str, list[float]]:
    """Of each schedule: the errors of all ranks' parameters."""
    by_rank = run_ranks(processes, _errors, list(names), options)
    return {name: [error for found in by_rank for error in found[name]] for name in names}


def wrong(found: dict[str, list[float]]) -> set[str]:
    """The schedules with a wrong gradient; all others have right ones only."""
    assert all(max(of) < RIGHT or max(of) > WRONG for of in found.values()), found
    return {name for name, of in found.items() if max(of) > WRONG}


@pytest.mark.parametrize("static", [True, False])
def test_every_schedule_is_right_where_nothing_is_special(static):
    assert wrong(errors(SCHEDULES, static=static)) == set()


def test_split_backwards_do_not_fire_the_hooks_of_ddp():
    """Until torch mends it, no DDP wrapper under a pipeline: `reduce_grads` adds the gradients up.

    The weights' part is taken with `autograd.grad`, which fires no hook on a parameter.
    """
    assert wrong(errors(SCHEDULES, 2 * RANKS, wrap=in_ddp)) == set(SPLIT)


def test_finding_out_shapes_arms_the_reducer_of_ddp():
    """The same: after torch's own forward the first micro-batch is reduced twice. A mean hides it,
    a sum does not."""
    assert wrong(errors(WHOLE, 2 * RANKS, wrap=in_ddp, static=False)) == set(WHOLE)


def test_split_backwards_lose_gradients_of_units_that_reshard():
    """Until torch mends it, fsdp2 keeps weights gathered through the step under these schedules."""
    assert wrong(errors(SCHEDULES, 2 * RANKS, wrap=partial(in_fsdp, reshard=True))) == set(SPLIT)
    assert wrong(errors(SCHEDULES, 2 * RANKS, wrap=partial(in_fsdp, reshard=False))) == set()


def _held_before_reduction() -> tuple[int, int, int]:
    run = Run("1f1b", partial(in_fsdp, reshard=True))
    (stage,) = run.stages
    shards = list(stage.submod.parameters())
    stage.perform_reduce_grad = lambda scale: (
        None
    )  # the last thing that a step does; the weights stay whole without it
    run.step(*rows(run.replica))
    return (
        sum(_held(shards)),
        sum(_held(stage.submod.parameters())),
        sum(shard.numel() for shard in shards),
    )


def _held(parameters: Iterable[nn.Parameter]) -> list[int]:
    return [parameter.grad.numel() for parameter in parameters if parameter.grad is not None]


def test_a_sharded_stage_keeps_whole_gradients_until_the_end_of_the_step():
    """Until torch mends it, the memory of a pipeline of fsdp2 counts trainable gradients whole, not
    1/n of them."""
    for sharded, whole, parameters in run_ranks(2 * RANKS, _held_before_reduction):
        assert (sharded, whole) == (0, parameters)


def test_split_backwards_lose_the_gradients_of_a_stage_whose_input_asks_for_none():
    """Until torch mends it, the embedding's output is made to require a gradient under these
    schedules."""
    found = errors(SCHEDULES, frozen=1)
    assert wrong(found) == set(SPLIT)
    # Four parameters in the lowest trained stage; DualPipe-V takes some backwards whole, so it has
    # part of each sum.
    lost = {"interleaved-zero-bubble": 4, "zbv": 4, "dualpipe-v": 0}
    assert {name: found[name].count(inf) for name in SPLIT} == lost
    for frozen in (1, 2):
        assert wrong(errors(SPLIT, frozen=frozen, asks=True)) == set()


def _gradients_passed(name: str, options: dict[str, Any]) -> dict[int, list[int]]:
    run = Run(name, **options)
    passed = {stage.stage_index: [0, 0] for stage in run.stages}

    def counted(stage: Any, way: int, make: Callable[[int], list[Any]], i: int) -> list[Any]:
        ops = make(i)
        passed[stage.stage_index][way] += len(ops)
        return ops

    for stage in run.stages:
        stage.get_bwd_send_ops = partial(counted, stage, 0, stage.get_bwd_send_ops)
        stage.get_bwd_recv_ops = partial(counted, stage, 1, stage.get_bwd_recv_ops)
    run.step(*rows(run.replica))
    return passed


@pytest.mark.parametrize("static", [True, False])
@pytest.mark.parametrize(
    ("name", "frozen"), [(n, f) for n in WHOLE for f in ((0, 1) if n in SINGLE else (0, 1, 2))]
)
def test_no_gradient_goes_to_where_none_is_needed(name, frozen, static):
    """What the skipped backward rests on: torch passes none below the lowest trained stage, and
    does not mind."""
    by_rank = run_ranks(RANKS, _gradients_passed, name, {"frozen": frozen, "static": static})
    top = (RANKS if name in SINGLE else 2 * RANKS) - 1
    for index, passed in {i: pair for found in by_rank for i, pair in found.items()}.items():
        assert passed == [
            MICROBATCHES * (index > frozen),
            MICROBATCHES * (frozen <= index < top),
        ], index


def _buffers(name: str, microbatches: int) -> int:
    run = Run(name, microbatches=microbatches)
    run.step(*rows(0, microbatches * ROWS))
    kept = [
        micro
        for stage in run.stages
        for of in (stage.args_recv_info, stage.grad_recv_info)
        for micro in of.values()
    ]
    return len(
        {info.buffer.data_ptr() for micro in kept for info in micro if info.buffer is not None}
    )


@pytest.mark.parametrize("microbatches", [4, 12])
def test_a_stage_keeps_a_buffer_per_micro_batch(microbatches):
    """Until torch mends it, memory counts m activations and m gradients per chunk, even of 1f1b."""
    assert (
        run_ranks(RANKS, _buffers, "1f1b", microbatches) == [microbatches] * 2
    )  # rank 0: gradients, 1: activations
    # Chunks 0 to 3: gradients, both, both, activations; rank 0 has chunks 0 and 2.
    assert run_ranks(RANKS, _buffers, "interleaved-1f1b", microbatches) == [3 * microbatches] * 2


def _sent_gradients(name: str, microbatches: int) -> int:
    """How many of the gradients that a rank has sent are alive when it sends the last one."""
    run = Run(name, microbatches=microbatches)
    sent, alive = [], [0]

    def noted(make: Callable[[int], list[dist.P2POp]], i: int) -> list[dist.P2POp]:
        alive.append(sum(not kept.expired() for kept in sent))
        ops = make(i)
        sent.extend(StorageWeakRef(op.tensor.untyped_storage()) for op in ops)
        return ops

    for stage in run.stages:
        stage.get_bwd_send_ops = partial(noted, stage.get_bwd_send_ops)
    run.step(*rows(0, microbatches * ROWS))
    return alive[-1]


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_step_keeps_what_it_sends_to_its_end(name):
    """Until torch mends it, shardwise's stage sends by itself, except under 1F1B, which alone drops
    what has arrived."""
    few, many = (max(run_ranks(RANKS, _sent_gradients, name, number)) for number in (4, 12))
    assert few <= 1 == many if name == "1f1b" else many - few >= 8


def _completed() -> list[bool]:
    told = []
    if dist.get_rank():
        dist.recv(torch.empty(1000), 0)
    else:
        work = dist.isend(torch.ones(1000), 1)
    dist.barrier()
    if not dist.get_rank():
        told.append(work.is_completed())
        work.wait()
        told.append(work.is_completed())
    return told


def test_gloo_does_not_tell_that_a_message_has_left_before_somebody_waits():
    """Until torch mends it, a stage does not ask whether what it sent has arrived: it waits when it
    must have."""
    assert run_ranks(RANKS, _completed)[0] == [False, True]


def _gradients_of_inputs() -> list[bool]:
    run = Run("interleaved-zero-bubble")
    kept: list[bool] = []
    for stage in run.stages:
        weights = stage.backward_weight_one_chunk

        def noted(i: int, stage: Any = stage, weights: Any = weights, **options: Any) -> None:
            inputs = stage.backward_state[i][0]
            kept.extend(x.grad is not None for x in inputs if not stage.is_first)
            weights(i, **options)

        stage.backward_weight_one_chunk = noted
    run.step(*rows(0))
    return kept


def test_a_first_half_keeps_the_gradient_that_it_sends_for_the_second():
    """Until torch mends it, shardwise's stage drops it; the second half does not read it."""
    for kept in run_ranks(RANKS, _gradients_of_inputs):
        assert kept
        assert all(kept)


def _last_loss(name: str, counts: Sequence[int], train: bool) -> tuple[float, float]:
    """After steps of so many rows: the last micro-batch's loss, and what it should be."""
    faulthandler.disable()  # a process that is meant to abort need not say where
    run = Run(name)
    for count in counts:
        x, target = rows(0, count)
        losses = run.step(x, target, train)
    expected = [
        summed(nn.Sequential(*run.whole)(a), b).item() for a, b in zip(x.chunk(4), target.chunk(4))
    ]
    return losses[-1] if losses else inf, expected[-1]


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("count", [MICROBATCHES * ROWS // 2, MICROBATCHES * ROWS - 1])
def test_fewer_rows_are_evaluated_with_what_is_left_of_earlier_ones(name, count):
    """Until torch mends it, shardwise checks the shape of every micro-batch before: here nobody
    does."""
    _, (loss, expected) = run_ranks(RANKS, _last_loss, name, (MICROBATCHES * ROWS, count), False)
    assert abs(loss - expected) > WRONG * expected


def test_more_rows_end_the_process():
    """The same check: the receiving process aborts, and no exception names the shape."""
    counts = (MICROBATCHES * ROWS, 2 * MICROBATCHES * ROWS)
    with pytest.raises(
        RuntimeError, match=r"died without a word|Connection reset|Connection closed"
    ):
        run_ranks(RANKS, _last_loss, "1f1b", counts, True)


def recomputed(module: nn.Module, mesh: DeviceMesh, contexts: Any = noop_context_fn) -> nn.Module:
    module.forwards = 0

    def counted(x: torch.Tensor, forward: Any = module.forward) -> torch.Tensor:
        module.forwards += 1
        return forward(x)

    module.forward = partial(checkpoint, counted, use_reentrant=False, context_fn=contexts)
    return module


def keeping_products(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    kept = [torch.ops.aten.addmm.default]
    return recomputed(module, mesh, partial(create_selective_checkpoint_contexts, kept))


def _forwards(name: str) -> int:
    run = Run(name, recomputed)
    assert max(run.errors()) < RIGHT
    return max(stage.submod.forwards for stage in run.stages)


def test_split_backwards_recompute_again_for_every_weight():
    """Until torch mends it, no recomputation under these schedules: it is right, but takes many
    times as long.

    The forward, and as often again as autograd is called: for the input, and for groups of weights
    (here a layer's).
    """
    expected = {name: 2 if name in WHOLE else 4 for name in SCHEDULES}
    expected["dualpipe-v"] = (3 * 2 + 4) / 4  # halves the backward of one micro-batch of the four
    most = {name: max(run_ranks(RANKS, _forwards, name)) / MICROBATCHES for name in SCHEDULES}
    assert most == expected


def test_split_backwards_fail_where_only_some_operators_are_recomputed():
    with pytest.raises(RuntimeError, match="Trying to backward an extra time"):
        errors(["zbv"], wrap=keeping_products)


@pytest.mark.parametrize("name", SPLIT)
def test_split_backwards_refuse_compiled_stages(name):
    """Until torch mends it, so does shardwise: it compiles layers in a way that torch does not
    notice (test below)."""
    stage = SimpleNamespace(submod=torch.compile(nn.Linear(2, 2), backend="aot_eager"))
    with pytest.raises(
        RuntimeError, match=r"not supported with stage modules that have used torch\.compile"
    ):
        SCHEDULES[name]([stage], MICROBATCHES)


def test_a_split_backward_of_what_was_compiled_for_a_whole_one_fails():
    with pytest.raises(RuntimeError, match="compiled with non-empty donated buffers"):
        errors(["dualpipe-v"], wrap=compiled)
