"""Models of more than one dtype, and the dtype of reductions, under fsdp2 and other strategies."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from shardwise.assembly.build import build
from shardwise.parallel import zero
from shardwise.parallel.fsdp2 import left_replicated
from shardwise.parallel.mesh import build_mesh
from shardwise.parallel.place import full_tensor
from shardwise.training.step import forward_backward, training_step
from tests.distributed import run_ranks
from tests.left_out import some_now
from tests.parity.harness import Cell, DrawnStart, microbatches, run_config


def _in_bfloat16(
    cell: Cell,
) -> tuple[
    dict[str, torch.Tensor], dict[str, torch.dtype], dict[str, bool], dict[str, torch.Tensor]
]:
    cfg = run_config(cell)
    cfg = replace(cfg, model=replace(cfg.model, dtype="bfloat16"))
    mesh = build_mesh(cfg, torch.device("cpu"))
    job = build(cfg, mesh, DrawnStart())
    forward_backward(job.pm, microbatches(cfg, mesh, 1), mesh)
    named = dict(job.pm.named_parameters())
    groups = job.optimizer.param_groups
    updated = {
        name: p for group in groups for name, p in zip(group["param_names"], group["params"])
    }
    grads = {
        name: full_tensor(job.pm.to_portable(name, p.grad)).float() for name, p in updated.items()
    }
    job.optimizer.zero_grad()
    training_step(job, microbatches(cfg, mesh, 2), mesh, 1.0)
    kept = {
        n: full_tensor(job.pm.to_portable(n, p)).clone()
        for n, p in named.items()
        if n.endswith("A_log")
    }
    dtypes = {name: p.dtype for name, p in named.items()}
    return grads, dtypes, {name: isinstance(p, DTensor) for name, p in named.items()}, kept


@cache
def _alone(mode: str) -> dict[str, torch.Tensor]:
    ((grads, *_),) = run_ranks(1, _in_bfloat16, Cell("olmo_hybrid", "single", mode))
    return grads


LAYOUTS = {"ddp": 2, "zero2": 2, "fsdp1": 2, "fsdp2": 2, "hsdp": 4}
KEPT = [("zero2", "full"), ("fsdp1", "full"), ("fsdp2", "full"), ("fsdp2", "lora")]
"""What `make test` runs: weights whole, flat and in shards, of these both modes, which differ."""


@pytest.mark.parametrize(("layout", "mode"), some_now(product(LAYOUTS, ("full", "lora")), KEPT))
def test_a_model_of_two_dtypes_is_not_cast_down(layout, mode):
    nproc, reference = LAYOUTS[layout], _alone(mode)
    outcomes = run_ranks(nproc, _in_bfloat16, Cell("olmo_hybrid", layout, mode, nproc))
    grads, dtypes, sharded, kept = outcomes[0]
    assert grads.keys() == reference.keys()
    for name, grad in grads.items():
        # bfloat16 rounds by 2^-9; a gradient has been through the rounding of four layers and of
        # the sum over rows. A gradient that was not summed over the ranks would be off by about a
        # half.
        assert (grad - reference[name]).abs().max() <= 2**-4 * reference[name].abs().max(), name
    logs = [name for name in dtypes if name.endswith("A_log")]
    assert len(logs) == 3
    assert {dtypes[name] for name in logs} == {torch.float32}
    assert torch.bfloat16 in dtypes.values()
    # Frozen odd ones are sharded by fsdp2, which flattens nothing; trained ones stay whole.
    assert all(sharded[name] == (layout in ("fsdp2", "hsdp") and mode == "lora") for name in logs)
    for _, _, _, other in outcomes:
        assert all(torch.equal(other[name], kept[name]) for name in logs)


TWO_SHARDS: Any = SimpleNamespace(size=lambda axis: 2, data_axis=lambda axes: "dp_shard")
"""Of a mesh, what `left_replicated` asks for."""


def test_only_trained_parameters_of_the_lesser_dtype_are_odd():
    module = torch.nn.Module()
    module.big = torch.nn.Parameter(torch.zeros(10, dtype=torch.bfloat16))
    module.small = torch.nn.Parameter(torch.zeros(3))
    module.frozen = torch.nn.Parameter(torch.zeros(30), requires_grad=False)
    assert [p is module.small for p in left_replicated(module, TWO_SHARDS)] == [True]
    module.small.requires_grad_(False)
    assert left_replicated(module, TWO_SHARDS) == []


def _reduced_in(layout: str) -> set[torch.dtype]:
    cfg = run_config(Cell("llama", layout, "full", 2))
    cfg = replace(cfg, model=replace(cfg.model, dtype="bfloat16"))
    mesh = build_mesh(cfg, torch.device("cpu"))
    job = build(cfg, mesh)
    seen: set[torch.dtype] = set()
    names = ("all_reduce", "reduce_scatter_single", "reduce_scatter_tensor")
    for owner, name in (*((dist, name) for name in names), (zero, "reduce_scatter")):
        if collective := getattr(owner, name, None):

            def spy(*args: Any, collective: Any = collective, **kwargs: Any) -> Any:
                tensor = kwargs.get(
                    "input", args[-1] if args else None
                )  # (tensor) or (output, input)
                seen.update(
                    {tensor.dtype} if tensor.numel() > 1 else ()
                )  # scalars are counts and losses
                return collective(*args, **kwargs)

            setattr(owner, name, spy)
    forward_backward(job.pm, microbatches(cfg, mesh, 1), mesh)
    assert {p.grad.dtype for p in job.trainable()} == {torch.bfloat16}
    return seen


@pytest.mark.parametrize("layout", ["ddp", "zero1", "fsdp1", "fsdp2"])
def test_bfloat16_gradients_are_added_up_in_float32(layout):
    assert run_ranks(2, _reduced_in, layout) == [{torch.float32}] * 2
