"""ZeRO's shards are views into the weights, uneven ones too, and buckets of any size give the same
sums."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from shardwise.assembly.build import build
from shardwise.base.interfaces import Mesh
from shardwise.base.layouts import shard_dim
from shardwise.metrics.memory import state_bytes
from shardwise.parallel import zero
from shardwise.parallel.mesh import build_mesh
from shardwise.parallel.place import full_tensor, local
from shardwise.training.step import forward_backward
from tests.distributed import run_ranks
from tests.models.tiny import on_meta, tiny
from tests.parity.harness import Cell, microbatches, run_config

SHAPES = (
    (7, 5),
    (2,),
    (3, 4),
    (1, 1),
)  # on 3 ranks: rows 3, 3, 1; an empty shard; even; two empty shards


def _sums(bucket_bytes: int) -> bool:
    zero.BUCKET_BYTES = bucket_bytes
    mesh = Mesh(
        init_device_mesh("cpu", (1, 3, 1, 1, 1), mesh_dim_names=Mesh.AXES),
        torch.device("cpu"),
        context_joins="dp_replicate",
    )
    rank = mesh.dense.get_local_rank("dp_replicate")
    dtypes = (torch.float32, torch.float32, torch.bfloat16, torch.float32)
    wholes = [nn.Parameter(torch.ones(shape, dtype=dtype)) for shape, dtype in zip(SHAPES, dtypes)]
    trained = [zero._trained(whole, shard_dim(whole.shape, 3), mesh) for whole in wholes]
    shards = zero.Shards(zero._buckets(trained, mesh))
    right = True
    for repeat in (1, 2):  # the second time gradients are added to those of the first
        for whole in wholes:
            places = torch.arange(whole.numel(), dtype=whole.dtype).view(whole.shape)
            whole.grad = places * (rank + 1)
        shards.reduce_all()
        for entry in trained:
            assert isinstance(entry.shard.grad, DTensor)
            expected = (
                torch.arange(entry.whole.numel(), dtype=entry.whole.dtype).view(entry.whole.shape)
                * 6
                * repeat
            )
            right &= torch.equal(full_tensor(entry.shard.grad), expected)  # 1 + 2 + 3
            right &= entry.whole.grad is None
    for entry in trained:
        assert isinstance(entry.shard, DTensor)
        within = (
            entry.whole.untyped_storage().data_ptr()
            == entry.shard.to_local().untyped_storage().data_ptr()
        )
        right &= within or local(entry.shard).numel() == 0
        with torch.no_grad():
            local(entry.shard).fill_(rank)
    shards.gather()
    for entry in trained:
        right &= torch.equal(entry.whole.detach(), full_tensor(entry.shard.detach()))
    return right


@pytest.mark.parametrize("bucket_bytes", [1, 150, 2**20])  # alone, by twos, all of a dtype together
def test_uneven_shards_are_summed_and_gathered(bucket_bytes):
    assert all(run_ranks(3, _sums, bucket_bytes))


def _one_without_a_gradient(stage: str) -> None:
    cfg = run_config(Cell("llama", stage, "full", 2))
    mesh = build_mesh(cfg, torch.device("cpu"))
    job = build(cfg, mesh)
    (part,) = job.pm.parts
    part.hf.get_submodule("model.layers.1").forward = lambda hidden, *args, **kwargs: hidden
    forward_backward(job.pm, microbatches(cfg, mesh, 1), mesh)


@pytest.mark.parametrize("stage", ["zero1", "zero2"])
def test_a_trained_parameter_without_a_gradient_is_an_error(stage):
    with pytest.raises(RuntimeError, match="a trained parameter has no gradient"):
        run_ranks(2, _one_without_a_gradient, stage)


def _held_with_shares_of_layers() -> dict[str, int]:
    cfg = run_config(Cell("qwen3_5_text", "zero1-tp", "full", 4), optimizer="adamw")
    mesh = build_mesh(cfg, torch.device("cpu"))
    job = build(cfg, mesh)
    forward_backward(job.pm, microbatches(cfg, mesh, 1), mesh)
    job.optimizer.step()
    return state_bytes(job.pm.stored(), job.optimizer)


@pytest.mark.slow
def test_bytes_with_shares_of_layers():
    """2 x 2 ranks: tensor parallelism halves all except norms, zero1 what is not one per head."""
    held = {"weights": 0, "gradients": 0, "optimizer": 0}
    for name, parameter in on_meta(tiny("tiny-qwen3_5")).named_parameters():
        weights = parameter.numel() * 4 // (1 if "norm" in name else 2)
        updated = weights // (1 if name.endswith(("A_log", "dt_bias")) else 2)
        held["weights"] += weights
        held["gradients"] += updated
        held["optimizer"] += 2 * updated + 4  # two moments, and a count of steps
    assert run_ranks(4, _held_with_shares_of_layers) == [held] * 4
