"""What a state fills: a resume reads nothing that it would overwrite, and keeps no copies."""

from __future__ import annotations

import gc
from dataclasses import replace
from unittest import mock

import pytest
import torch

from shardwise.assembly.build import build
from shardwise.assembly.state import FRESH
from shardwise.checkpoint.resume import find_start
from shardwise.config import Parallel, RunConfig
from shardwise.metrics.memory import PeakMemory, tensor_bytes
from shardwise.models import weight_files
from shardwise.models.adapters import lora
from shardwise.parallel.mesh import build_mesh
from tests.checkpoint.test_checkpointer import config, equal, save_steps, values
from tests.checkpoint.test_resume import run_of_a_model
from tests.distributed import run_ranks
from tests.left_out import some_now


def reads_of_a_build(cfg: RunConfig) -> tuple[int, int]:
    """Tensors that a build reads from the model's files, and LoRA factors that it draws."""
    mesh = build_mesh(cfg, torch.device("cpu"))
    state = find_start(cfg).state()
    read = weight_files._Reader.__call__
    with (
        mock.patch.object(
            weight_files._Reader, "__call__", autospec=True, side_effect=read
        ) as reads,
        mock.patch.object(lora, "stable_seed", wraps=lora.stable_seed) as draws,
    ):
        build(cfg, mesh, state)
    return reads.call_count, draws.call_count


@pytest.mark.parametrize("mode", ["lora", "full"])
def test_a_resume_reads_nothing_that_it_would_overwrite(mode, tmp_path):
    resumed = run_of_a_model(tmp_path, mode)
    fresh = replace(resumed, training=replace(resumed.training, resume=None))
    ((reads, draws),) = run_ranks(1, reads_of_a_build, fresh)
    assert reads > 0
    assert (draws > 0) == (mode == "lora")
    # The frozen weights of a LoRA run are in the model's files only; a checkpoint has all others.
    assert run_ranks(1, reads_of_a_build, resumed) == [(reads if mode == "lora" else 0, 0)]


def peaks(cfg: RunConfig) -> tuple[int, int, int, int]:
    """Peak bytes of a fresh build and of a resume, and bytes of states and the largest tensor."""
    mesh = build_mesh(cfg, torch.device("cpu"))
    peak_bytes = []
    for state in (FRESH, find_start(cfg).state()):
        with PeakMemory(mesh.device) as memory:
            job = build(cfg, mesh, state)
        assert memory.peak_bytes is not None
        assert memory.entry_bytes is not None
        peak_bytes.append(memory.peak_bytes - memory.entry_bytes)
        states = tensor_bytes(t for held in job.optimizer.state.values() for t in held.values())
        largest = max(p.nbytes for p in values(job, cfg).values())
        del job
        gc.collect()
    return peak_bytes[0], peak_bytes[1], states, largest


@pytest.mark.parametrize(
    ("layout", "copies"), some_now([("ddp", 1), ("fsdp2", 1), ("fsdp1", 3)], [("fsdp1", 3)])
)
def test_a_resume_takes_one_parameter_beside_what_it_keeps(layout, copies, tmp_path):
    """fsdp1 lays a parameter out in its own shape, and gathers it, before it copies a piece."""
    cfg = replace(config(tmp_path), lora=None)
    cfg = replace(cfg, parallel=Parallel(layout))
    run_ranks(2, save_steps, cfg, 1)
    cfg = replace(cfg, training=replace(cfg.training, resume="latest"))
    for fresh, resumed, states, largest in run_ranks(2, peaks, cfg):
        assert states > 0
        assert resumed <= fresh + states + copies * largest


def values_of_a_resume(cfg: RunConfig) -> dict[str, torch.Tensor]:
    job = build(cfg, build_mesh(cfg, torch.device("cpu")), find_start(cfg).state())
    return values(job, cfg)


def test_both_copies_of_a_module_to_save_are_filled(tmp_path):
    """The trained copy comes from the checkpoint, the original from the model's files."""
    cfg = config(tmp_path)
    assert cfg.lora is not None
    cfg = replace(cfg, lora=replace(cfg.lora, modules_to_save=["lm_head"]))
    (saved,) = run_ranks(1, save_steps, cfg, 1)
    assert any(".modules_to_save." in key for key in saved)
    cfg = replace(cfg, training=replace(cfg.training, resume="latest"))
    (resumed,) = run_ranks(1, values_of_a_resume, cfg)
    assert equal(resumed, saved)
