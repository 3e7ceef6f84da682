"""Attention kernels: the one that is asked for runs, in the recomputation too, or nothing does."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.assembly.build import build
from shardwise.parallel.mesh import build_mesh
from shardwise.training.step import forward_backward
from tests.distributed import run_ranks
from tests.parity.harness import Cell, DrawnStart, microbatches, run_config

FLASH = "aten._scaled_dot_product_flash_attention_for_cpu.default"
SOFTMAX = "aten._safe_softmax.default"  # of the math kernel's


class _Counts(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


def _run(
    family: str, backend: str, checkpointing: str
) -> tuple[float, list[torch.Tensor], int, int]:
    cfg = run_config(Cell(family, "single", "lora"))
    training = replace(cfg.training, checkpointing=checkpointing)
    cfg = replace(cfg, model=replace(cfg.model, sdpa_backend=backend), training=training)
    mesh = build_mesh(cfg, torch.device("cpu"))
    job = build(cfg, mesh, DrawnStart())
    with _Counts() as modes:
        loss, _ = forward_backward(job.pm, microbatches(cfg, mesh, 1)[:1], mesh)
    grads = [p.grad for p in job.trainable()]
    return loss.item(), grads, modes.counts[FLASH], modes.counts[SOFTMAX]


@pytest.mark.parametrize("checkpointing", [pytest.param("none", marks=pytest.mark.slow), "full"])
def test_the_kernel_asked_for_is_the_one_that_runs(checkpointing):
    # The llama has 4 layers; each runs twice if it is computed again.
    runs = 8 if checkpointing == "full" else 4
    ((loss, grads, flash, softmax),) = run_ranks(1, _run, "llama", "auto", checkpointing)
    assert (flash, softmax) == (runs, 0)
    ((by_flash, _, flash, softmax),) = run_ranks(1, _run, "llama", "flash", checkpointing)
    assert (flash, softmax) == (runs, 0)
    assert by_flash == loss
    ((by_math, math_grads, flash, softmax),) = run_ranks(1, _run, "llama", "math", checkpointing)
    assert (flash, softmax) == (0, runs)
    # Float32 throughout, in another order: as two layouts of the parity cells.
    assert by_math == pytest.approx(loss, rel=1e-6)
    for one, other in zip(grads, math_grads):
        assert (one - other).abs().max() <= 1e-5 * one.abs().max()


@pytest.mark.parametrize("backend", ["efficient", pytest.param("cudnn", marks=pytest.mark.slow)])
def test_a_kernel_that_cannot_run_is_refused(backend):
    with pytest.raises(
        RuntimeError, match=rf"UserError: model.sdpa_backend is {backend}, but .* use auto or math"
    ):
        run_ranks(1, _run, "qwen3_5_text", backend, "none")
