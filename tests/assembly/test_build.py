"""`build` from memory: a job goes on under another cut, without a file."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch

from shardwise.assembly import build as training_build
from shardwise.assembly.build import Job, build
from shardwise.assembly.state import MemoryState, portable_tensors
from shardwise.base.interfaces import Mesh
from shardwise.config import Lora, Optimizer, Parallel, RunConfig, UserError
from shardwise.parallel.mesh import build_mesh
from shardwise.parallel.place import full_tensor
from shardwise.parallel.reduce import from_every_rank
from shardwise.training.step import training_step
from tests.distributed import run_ranks
from tests.left_out import some_now
from tests.notes import beside_random_base
from tests.parity.harness import MAX_NORM, Cell, DrawnStart, microbatches, run_config


def losses(job: Job, cfg: RunConfig, mesh: Mesh, steps: range) -> list[float]:
    return [
        training_step(job, microbatches(cfg, mesh, step), mesh, MAX_NORM).loss for step in steps
    ]


def cut_anew_after_two_steps(mode: str, optimizer: str) -> tuple[list[float], list[float]]:
    cfg = run_config(Cell("llama", "single", mode), optimizer)
    cfg = replace(cfg, parallel=Parallel(pp=2, split=[1, 3]))
    mesh = build_mesh(cfg, torch.device("cpu"))
    unmoved = losses(build(cfg, mesh, DrawnStart()), cfg, mesh, range(1, 4))
    job = build(cfg, mesh, DrawnStart())
    begun = losses(job, cfg, mesh, range(1, 3))
    portable = portable_tensors(job.pm, job.optimizer, trained_only=False)
    mine = {key: full_tensor(tensor).clone() for key, tensor in portable}
    everything = {key: tensor for held in from_every_rank(mine) for key, tensor in held.items()}
    moved = replace(cfg, parallel=Parallel(pp=2, split=[3, 1], schedule="gpipe"))
    again = build(moved, mesh, MemoryState(everything, step=2))
    assert [len(part.spec.layers) for part in again.pm.parts] == [[3], [1]][
        mesh.dense.get_local_rank("pp")
    ]
    return unmoved, begun + losses(again, moved, mesh, range(3, 4))


@pytest.mark.parametrize(
    ("mode", "optimizer"),
    some_now(product(("lora", "full"), ("sgd", "adamw")), [("lora", "adamw"), ("full", "sgd")]),
)
def test_a_job_is_cut_anew_from_memory(mode, optimizer):
    for unmoved, moved in run_ranks(2, cut_anew_after_two_steps, mode, optimizer):
        assert moved == pytest.approx(unmoved, rel=1e-6)
        assert len(set(unmoved)) == 3


def refused_before_memory_is_taken() -> str:
    cfg = run_config(Cell("llama", "single", "lora"))
    cfg = replace(cfg, training=replace(cfg.training, loss="triton"))
    with (
        mock.patch.object(training_build, "materialise") as materialise,
        pytest.raises(UserError) as error,
    ):
        build(cfg, build_mesh(cfg, torch.device("cpu")))
    assert not materialise.called
    return str(error.value)


def test_a_loss_that_cannot_run_is_refused_before_memory_is_taken():
    (message,) = run_ranks(1, refused_before_memory_is_taken)
    assert message.startswith("training.loss is triton, but triton")


def experts_alone(**asked: Any) -> dict[str, str]:
    cfg = run_config(Cell("qwen3_moe", "single", "lora"))
    cfg = replace(cfg, lora=Lora(r=4, targets=["experts"], **asked))
    return dict(build(cfg, build_mesh(cfg, torch.device("cpu"))).run.kernels)


def test_adapters_on_experts_alone_have_the_kernel_of_experts():
    assert run_ranks(1, experts_alone) == [{"loss": "chunked", "experts": "loop"}]


def notes_by_length() -> list[tuple[str, ...]]:
    cfg = run_config(Cell("llama", "single", "lora"))
    mesh = build_mesh(cfg, torch.device("cpu"))
    return [
        beside_random_base(
            build(replace(cfg, data=replace(cfg.data, sequence_length=length)), mesh).notes
        )
        for length in (4096, 4097)
    ]


def test_rows_beyond_the_positions_of_the_model_are_noted():
    ((within, beyond),) = run_ranks(1, notes_by_length)
    assert within == ()
    assert "max_position_embeddings 4096" in beyond[0]


@pytest.mark.parametrize(
    ("optimizer", "steps", "note"),
    [
        (
            Optimizer(warmup_steps=100),
            2,
            (
                "optimizer.warmup_steps is 100, and the run has 2: the learning rate reaches 2% of "
                "optimizer.lr",
            ),
        ),
        (Optimizer(warmup_steps=2), 2, ()),
        (Optimizer(warmup_ratio=1.0), 9, ()),
    ],
)
def test_a_warmup_that_the_run_does_not_end_is_told(optimizer, steps, note):
    assert training_build._short_warmup(optimizer, steps) == note
