from __future__ import annotations

import tempfile
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.testing import assert_close

from shardwise.assembly.build import build
from shardwise.assembly.state import portable_tensors
from shardwise.config import Recomputation
from shardwise.lab.planner.collectives import Collectives, predicted_bytes, targets_on_rank
from shardwise.lab.planner.communication import unknown
from shardwise.lab.planner.recompute import as_way, chosen_of
from shardwise.parallel.mesh import build_mesh
from shardwise.parallel.place import full_tensor
from shardwise.training.measure import MeasuredMemory, measure_memory
from shardwise.training.step import training_step
from tests.distributed import run_ranks
from tests.left_out import some_now
from tests.models.tiny import on_meta, tiny
from tests.parity.harness import BALANCED, Cell, microbatches, run_config


def _measure(cell: Cell, on_disk: bool = False) -> MeasuredMemory:
    cfg = run_config(cell, optimizer="adamw")
    if on_disk:
        disk = {"offload": "disk", "offload_folder": tempfile.gettempdir()}
        cfg = replace(cfg, parallel=replace(cfg.parallel, **disk))
    mesh = build_mesh(cfg, torch.device("cpu"))
    job = build(cfg, mesh)
    for step in (1, 2):  # AdamW has no state before its first step
        memory = measure_memory(job, microbatches(cfg, mesh, step), mesh, cfg)
        job.optimizer.zero_grad()
    return memory


GRADIENTS = {"ddp": 2}
"""How often the peak holds the gradients of `state_bytes`, where that is not once.

ddp: the last micro-batch fills buckets, and the gradients of those before it are beside them.
zero1 has freed the complete gradients when it has their shards.
"""


@pytest.mark.parametrize(
    ("layout", "nproc"),
    some_now(
        [("single", 1), ("ddp", 2), ("zero1", 2), ("zero2", 2), ("fsdp1", 2), ("fsdp2", 2)],
        [("zero2", 2), ("fsdp1", 2), ("fsdp2", 2)],
    ),
)
def test_parts_of_the_peak(layout, nproc):
    for memory in run_ranks(nproc, _measure, Cell("llama", layout, "full", nproc)):
        for peak, parts, state in zip(
            memory.peak_bytes, memory.parts, memory.state_bytes, strict=True
        ):
            assert sum(parts.values()) == peak
            assert parts["weights"] == state["weights"]
            assert parts["optimizer"] == state["optimizer"]
            assert parts["gradients"] == GRADIENTS.get(layout, 1) * state["gradients"]


def _twice(cell: Cell, is_measured: bool) -> dict[str, torch.Tensor]:
    """All that a run changes in two steps, of which the second one may be measured."""
    cfg = run_config(cell, optimizer="adamw")
    mesh = build_mesh(cfg, torch.device("cpu"))
    job = build(cfg, mesh)
    training_step(job, microbatches(cfg, mesh, 1), mesh, cfg.optimizer.max_grad_norm)
    if is_measured:
        measure_memory(job, microbatches(cfg, mesh, 2), mesh, cfg)
    else:
        training_step(job, microbatches(cfg, mesh, 2), mesh, cfg.optimizer.max_grad_norm)
    assert all(p.grad is None for p in job.trainable())
    named = {"lr": torch.tensor(job.optimizer.param_groups[0]["lr"])}
    named |= {
        key: full_tensor(t).clone() for key, t in portable_tensors(job.pm, job.optimizer, False)
    }
    if job.routing is not None:
        named |= {"given": job.routing.given, "total": job.routing.total}
    return named


@pytest.mark.parametrize(
    "cell",
    [
        Cell("nemotron_h", "single", "full", variant=BALANCED),
        Cell("nemotron_h", "fsdp2-ep", "full", 2, variant=BALANCED),
        Cell("llama", "pp", "lora", 2, schedule="1f1b"),
    ],
    ids=str,
)
def test_a_step_that_is_measured_is_the_same_step(cell):
    measured, plain = (run_ranks(cell.nproc, _twice, cell, is_measured) for is_measured in (1, 0))
    assert_close(measured, plain, rtol=0, atol=0)
    assert all(any(name.startswith("optimizer/") for name in rank) for rank in plain)


def _with_weights_that_are_not_finite() -> tuple[bool, bool]:
    cfg = run_config(Cell("llama", "single", "lora"))
    mesh = build_mesh(cfg, torch.device("cpu"))
    job = build(cfg, mesh)
    weights = [p.detach().clone() for p in job.trainable()]
    with torch.no_grad():
        for part in job.pm.parts:
            part.hf.get_parameter("model.norm.weight").fill_(torch.inf)
    memory = measure_memory(job, microbatches(cfg, mesh, 1), mesh, cfg)
    is_whole = sum(memory.parts[0].values()) == memory.peak_bytes[0]
    return is_whole, all(map(torch.equal, weights, job.trainable()))


def test_a_measured_step_may_have_a_loss_that_is_not_finite():
    assert run_ranks(1, _with_weights_that_are_not_finite) == [(True, True)]


def test_checkpointing_lowers_the_activations():
    cell = Cell("llama", "single", "full")
    (plain,), (kept,) = (
        run_ranks(1, _measure, replace(cell, variant=v)) for v in ("", "checkpointing")
    )
    (before,), (after,) = plain.parts, kept.parts
    # Of four layers' activations their inputs are left, and what head and loss keep.
    assert after["activations"] < 0.5 * before["activations"]
    assert after["weights"] == before["weights"]


@pytest.mark.parametrize(
    "cell",
    [
        Cell("llama", "single", "lora"),
        Cell("llama", "single", "full"),
        Cell("llama", "pp", "lora", 2, "upper", "1f1b"),
    ],
    ids=str,
)
def test_weights_on_disk_take_the_memory_of_their_window(cell):
    layer = on_meta(tiny("tiny-llama")).get_submodule("model.layers.3")
    unit_bytes = sum(4 * p.numel() for p in layer.parameters())
    if cell.mode == "full":
        unit_bytes *= 4  # with both of AdamW's states and the gradient
    for memory in run_ranks(cell.nproc, _measure, cell, True):
        for peak, parts in zip(memory.peak_bytes, memory.parts, strict=True):
            assert sum(parts.values()) == peak
            assert min(parts.values()) >= 0
            # Three buffers, each for the largest unit, with its adapters and what aligns them.
            assert parts["weights"] == pytest.approx(3 * unit_bytes, rel=0.1)


def _predicted(cell: Cell, *budgets_gib: float) -> list[tuple[int | None, int | None]]:
    """Bytes that leave this rank in a step, counted and predicted, without and with a budget."""
    found = []
    for budget_gib in (None, *budgets_gib):
        cfg = run_config(cell)
        if budget_gib is not None:
            cfg = as_way(cfg, Recomputation(budget_gib=budget_gib))
        mesh = build_mesh(cfg, torch.device("cpu"))
        job = build(cfg, mesh, chosen=chosen_of(cfg, mesh))
        # Pipelines make stages ready in the first step, ddp agrees upon its buckets in two.
        for step in (1, 2) if cell.schedule or cell.data == "ddp" else ():
            training_step(job, microbatches(cfg, mesh, step), mesh, 1.0)
        batches = microbatches(cfg, mesh, 3)
        with Collectives(mesh) as collectives:
            training_step(job, batches, mesh, 1.0)
        num_targets = targets_on_rank(job, batches)
        found.append((collectives.sent_bytes, predicted_bytes(cfg, job, mesh, num_targets)))
    return found


@pytest.mark.parametrize(
    ("cell", "budgets_gib"),
    [
        (Cell("qwen3_5_text", "pp", "lora", 2, schedule="1f1b"), ()),
        (Cell("llama", "cp", "lora", 2), (0.5,)),
        (Cell("llama", "tp", "lora", 2), (0.5,)),
        (Cell("qwen3_moe", "ddp-ep", "lora", 2), (0.5,)),
    ],
    ids=["pp", "cp", "tp", "ddp-ep"],
)
def test_the_bytes_that_leave_a_rank_are_those_of_the_formulas(cell, budgets_gib):
    """They are also where a budget has chosen what is computed again."""
    plain, *budgeted = zip(*run_ranks(cell.nproc, _predicted, cell, *budgets_gib), strict=True)
    counted, predicted = zip(*plain, strict=True)
    if cell.ep > 1:  # routers give ranks of the same group other numbers of rows
        counted, predicted = [sum(counted)], [sum(predicted)]
    assert counted == predicted
    assert min(counted) > 0
    assert budgeted == [plain] * len(budgets_gib)


@pytest.mark.parametrize(
    ("parallel", "training", "is_known_there"),
    [
        ({"tp": 2}, {"loss": "chunked"}, True),
        ({"tp": 2}, {"loss": "plain"}, False),
        ({"data": "fsdp2"}, {"loss": "plain"}, True),
        ({"data": "fsdp2"}, {"matmul": "fp8_rowwise"}, True),
        ({"cp": 2}, {"matmul": "fp8_rowwise"}, False),
    ],
)
def test_where_the_formulas_do_not_know_all_they_say_so(parallel, training, is_known_there):
    cfg = run_config(Cell("llama", "single", "lora"))
    cfg = replace(cfg, parallel=replace(cfg.parallel, **parallel))
    cfg = replace(cfg, training=replace(cfg.training, **training))
    assert (unknown(cfg) is None) == is_known_there


def test_one_process_sends_nothing():
    assert run_ranks(1, _predicted, Cell("llama", "single", "lora")) == [[(0, 0)]]


def _with_a_broadcast() -> tuple[int | None, set[str]]:
    mesh = build_mesh(run_config(Cell("llama", "ddp", "lora", 2)), torch.device("cpu"))
    with Collectives(mesh) as collectives:
        dist.all_reduce(torch.ones(3), group=mesh.group("dp_replicate"))
        before = collectives.sent_bytes
        dist.broadcast(torch.ones(3), 0)
    assert collectives.sent_bytes is None
    return before, {name.partition(" ")[0] for name in collectives.uncounted}


def test_a_collective_of_an_unknown_kind_is_no_number():
    # Of 12 bytes 2 (n - 1) / n = 1 leave each of 2 ranks.
    assert run_ranks(2, _with_a_broadcast) == [(12, {"broadcast_"})] * 2
