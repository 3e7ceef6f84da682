"""fsdp1 leaves the model's modules and names alone, holds pieces between forwards, and says what it
cannot do."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.distributed.fsdp import FullyShardedDataParallel

from shardwise.assembly.build import build
from shardwise.parallel.mesh import build_mesh
from shardwise.parallel.place import full_tensor
from tests.distributed import run_ranks
from tests.left_out import some_now
from tests.parity.harness import Cell, microbatches, run_config


def _seen_from_outside(
    layout: str, variant: str, nproc: int
) -> tuple[list[str], list[str], list[int], list[int], bool]:
    cfg = run_config(Cell("qwen3_5_text", layout, "lora", nproc, variant))
    mesh = build_mesh(cfg, torch.device("cpu"))
    job = build(cfg, mesh)
    (part,) = job.pm.parts
    types = [type(module).__name__ for module in part.modules()]
    before = [p.numel() for p in part.parameters()]
    part.eval()
    with torch.no_grad():
        part(microbatches(cfg, mesh, 1)[0], return_logits=True)
    after = [p.numel() for p in part.parameters()]
    wrapped = any(isinstance(module, FullyShardedDataParallel) for module in part.modules())
    return types, list(part.hf.state_dict()), before, after, wrapped


@pytest.mark.parametrize("variant", some_now(("", "naive", "tied"), ("",)))
def test_the_model_is_the_same_from_outside(variant):
    ((types, names, whole, *_),) = run_ranks(
        1, _seen_from_outside, "single", "" if variant == "naive" else variant, 1
    )
    ranks = run_ranks(2, _seen_from_outside, "fsdp1", variant, 2)
    for one in ranks:
        assert (one[0], one[1]) == (types, names)
        assert (
            one[2] == one[3]
        )  # a forward without a backward leaves pieces behind, not whole weights
        assert not one[4]
    assert [
        sum(pieces) for pieces in zip(*(one[2] for one in ranks))
    ] == whole  # every element on one rank


def _round_trip() -> bool:
    cfg = run_config(Cell("qwen3_5_text", "fsdp1", "full", 3))
    cfg = replace(cfg, training=replace(cfg.training, global_batch_size=3))
    job = build(cfg, build_mesh(cfg, torch.device("cpu")))
    right = True
    for name, parameter in job.pm.named_parameters():
        portable = job.pm.to_portable(name, parameter)
        whole = full_tensor(portable)
        new = torch.arange(whole.numel(), dtype=torch.float32).view(whole.shape)
        job.pm.from_portable(name, parameter, new)  # whole
        right &= torch.equal(full_tensor(job.pm.to_portable(name, parameter)), new)
        job.pm.from_portable(name, parameter, portable)  # as it was
        right &= torch.equal(full_tensor(job.pm.to_portable(name, parameter)), whole)
    return right


def test_pieces_become_whole_tensors_and_pieces_again():
    assert all(run_ranks(3, _round_trip))  # nothing divides by 3
