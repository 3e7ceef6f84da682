"""Gradients of bfloat16 weights over 16 micro-batches, against their sum in float32."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from shardwise.assembly.build import build
from shardwise.config import UserError
from shardwise.parallel.mesh import build_mesh
from shardwise.parallel.place import full_tensor
from shardwise.training.step import forward_backward, training_step
from tests.distributed import run_ranks
from tests.parity.harness import Cell, microbatches, run_config

Grads = dict[str, torch.Tensor]


def _config(layout: str, accumulation: str, family: str = "llama", mode: str = "full") -> Any:
    """A run of bfloat16 weights; with LoRA its adapters have their dtype."""
    cfg = run_config(Cell(family, layout, mode, 1), optimizer="adamw")
    if cfg.lora is not None:
        cfg = replace(cfg, lora=replace(cfg.lora, dtype="model"))
    training = replace(
        cfg.training, accumulation=accumulation, micro_batch_size=1, global_batch_size=16
    )
    return replace(cfg, model=replace(cfg.model, dtype="bfloat16"), training=training)


def _summed(
    layout: str, accumulation: str, family: str = "llama", mode: str = "full"
) -> tuple[Grads, set[torch.dtype], bool, bool]:
    cfg = _config(layout, accumulation, family, mode)
    mesh = build_mesh(cfg, torch.device("cpu"))
    job = build(cfg, mesh)
    forward_backward(job.pm, microbatches(cfg, mesh, 1), mesh)
    named = [
        pair
        for group in job.optimizer.param_groups
        for pair in zip(group["param_names"], group["params"])
    ]
    grads = {n: full_tensor(p.grad).float().clone() for n, p in named}
    dtypes = {p.grad.dtype for _, p in named}
    job.optimizer.zero_grad(set_to_none=True)
    before = [full_tensor(p.detach()).clone() for _, p in named]
    training_step(job, microbatches(cfg, mesh, 1), mesh, 1.0)
    moved = all(not torch.equal(full_tensor(p.detach()), b) for (_, p), b in zip(named, before))
    return grads, dtypes, moved, all(p.grad is None for _, p in named)


def _one_by_one(family: str = "llama") -> tuple[Grads, Grads]:
    """The sum of each micro-batch's bfloat16 gradients, in float64, and that of their absolute
    values."""
    cfg = _config("single", "model", family)
    mesh = build_mesh(cfg, torch.device("cpu"))
    job = build(cfg, mesh)
    batches = microbatches(cfg, mesh, 1)
    tokens = sum(batch.num_target_tokens() for batch in batches)
    sums: Grads = {}
    sizes: Grads = {}
    for batch in batches:
        job.pm.run(job.pm, [batch], 1 / tokens, True)
        for name, parameter in job.pm.named_parameters():
            gradient = parameter.grad.double()
            sums[name] = sums.get(name, 0) + gradient
            sizes[name] = sizes.get(name, 0) + gradient.abs()
            parameter.grad = None
    return sums, sizes


def _worst(grads: Grads, sums: Grads, sizes: Grads) -> float:
    """The largest error in units of the sum of absolute values."""
    return max(
        ((grads[n].double() - sums[n]).abs() / sizes[n].clamp(min=1e-30)).max().item() for n in sums
    )


@pytest.fixture(scope="module")
def reference() -> tuple[Grads, Grads]:
    (sums,) = run_ranks(1, _one_by_one)
    return sums


def test_sums_of_bfloat16_lose_bits(reference):
    ((grads, dtypes, _, _),) = run_ranks(1, _summed, "single", "model")
    assert dtypes == {torch.bfloat16}
    assert _worst(grads, *reference) > 2**-8  # more than one rounding of each summand would


@pytest.mark.parametrize(
    ("layout", "nproc", "limit"),
    [
        ("single", 1, 16 * 2**-24),  # 15 float32 roundings
        pytest.param("ddp", 2, 16 * 2**-24, marks=pytest.mark.slow),
        pytest.param("zero1", 2, 16 * 2**-24, marks=pytest.mark.slow),
        ("zero2", 2, 16 * 2**-24),
        # One rounding to bfloat16, of the sum.
        pytest.param("hsdp", 2, 2**-8, marks=pytest.mark.slow),
        ("fsdp2", 2, 2**-8),  # of each micro-batch's sum over ranks
    ],
)
def test_sums_of_float32_keep_them(reference, layout, nproc, limit):
    outcomes = run_ranks(nproc, _summed, layout, "float32")
    for grads, dtypes, moved, empty in outcomes:
        assert dtypes == {torch.float32}
        assert _worst(grads, *reference) <= limit
        assert moved
        assert empty


@pytest.mark.parametrize("layout", ["ddp-ep", pytest.param("zero1-ep", marks=pytest.mark.slow)])
def test_experts_and_all_others_are_summed_once(layout):
    (reference,) = run_ranks(1, _one_by_one, "qwen3_moe")
    for grads, dtypes, moved, empty in run_ranks(2, _summed, layout, "float32", "qwen3_moe"):
        assert dtypes == {torch.float32}
        # Rows of a token meet an expert in another order, whose products are rounded to bfloat16.
        assert _worst(grads, *reference) <= 2**-6
        assert moved
        assert empty


def test_adapters_beside_experts_are_summed_once():
    run = "float32", "qwen3_moe", "lora"
    ((alone, *_),) = run_ranks(1, _summed, "single", *run)
    for grads, dtypes, *_ in run_ranks(2, _summed, "ddp-ep", *run):
        assert dtypes == {torch.float32}
        for name, gradient in grads.items():
            assert (gradient - alone[name]).norm() <= 2**-6 * alone[name].norm(), name


def _offloaded(offload: str) -> tuple[Grads, Grads, set[torch.dtype]]:
    """The first step's gradients, and the weights after two."""
    cfg = _config("fsdp2", "float32")
    cfg = replace(
        cfg,
        parallel=replace(cfg.parallel, offload=offload),
        training=replace(cfg.training, global_batch_size=8),
    )
    mesh = build_mesh(cfg, torch.device("cpu"))
    job = build(cfg, mesh)
    forward_backward(job.pm, microbatches(cfg, mesh, 1), mesh)
    named = [
        pair
        for group in job.optimizer.param_groups
        for pair in zip(group["param_names"], group["params"])
    ]
    dtypes = {p.grad.dtype for _, p in named}
    grads = {n: full_tensor(p.grad) for n, p in named}
    job.optimizer.zero_grad(set_to_none=True)
    for step in (1, 2):
        training_step(job, microbatches(cfg, mesh, step), mesh, 1.0)
    return (
        grads,
        {n: full_tensor(job.pm.to_portable(n, p)) for n, p in job.pm.named_parameters()},
        dtypes,
    )


@pytest.fixture(scope="module")
def on_the_device() -> tuple[Grads, Grads, set[torch.dtype]]:
    return run_ranks(2, _offloaded, "none")[0]


@pytest.mark.parametrize("offload", [pytest.param("optimizer", marks=pytest.mark.slow), "all"])
def test_offload_keeps_every_bit_of_them(offload, on_the_device):
    grads, weights, dtypes = on_the_device
    assert dtypes == {torch.float32}
    # The optimizer must have seen more than bfloat16 can say, or the comparison would prove
    # nothing.
    assert any((g != g.bfloat16().float()).any() for g in grads.values())
    for found_grads, found_weights, found_dtypes in run_ranks(2, _offloaded, offload):
        assert found_dtypes == dtypes
        assert all(torch.equal(found_grads[n], grads[n]) for n in grads)
        assert all(torch.equal(found_weights[n], weights[n]) for n in weights)


def _refused(dtype: str) -> str:
    cfg = _config("fsdp1", "float32")
    cfg = replace(cfg, model=replace(cfg.model, dtype=dtype))
    try:
        build(cfg, build_mesh(cfg, torch.device("cpu")))
    except UserError as error:
        return str(error)
    return ""


def test_fsdp1_refuses_bfloat16_weights_only():
    assert all(
        "use fsdp2, or set model.dtype to float32" in said
        for said in run_ranks(2, _refused, "bfloat16")
    )
    assert run_ranks(2, _refused, "float32") == ["", ""]  # their gradients are float32 already


def test_a_sum_by_hand():
    # 1 + 15 / 512: each 1/512 is under half of bfloat16's step at 1, 1/128.
    for dtype, expected in ((torch.float32, 1 + 15 / 512), (torch.bfloat16, 1.0)):
        weight = torch.nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
        weight.grad_dtype = dtype
        for value in [1.0] + [2**-9] * 15:
            (weight * value).sum().backward()
        assert weight.grad.item() == expected
