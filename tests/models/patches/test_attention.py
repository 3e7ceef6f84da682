"""Attention kernels: the one that is asked for runs, in the recomputation too, or nothing does."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.assembly.build import build
from shardwise.assembly.describe import describe
from shardwise.config import UserError
from shardwise.models.load import build_meta, read_config
from shardwise.models.patches import attention
from shardwise.parallel.mesh import build_mesh
from shardwise.training.step import forward_backward
from tests.distributed import run_ranks
from tests.parity.harness import Cell, DrawnStart, microbatches, run, run_config

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
    cfg = replace(cfg, model=replace(cfg.model, attention=backend), training=training)
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
    _check_equal((by_math, math_grads), (loss, grads))


def _check_equal(one: tuple[float, list], other: tuple[float, list]) -> None:
    assert one[0] == pytest.approx(other[0], rel=1e-6)
    for grad, expected in zip(one[1], other[1], strict=True):
        assert (grad - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize("family", ["gpt2", "qwen3_5_text", "gemma3_text", "kimi_linear"])
def test_eager_attention_is_transformers_own_and_computes_the_same(family):
    """Gemma 3 has layers with a window, which the eager form has from its mask alone."""
    ((loss, grads, flash, softmax),) = run_ranks(1, _run, family, "sdpa", "full")
    ((by_eager, eager_grads, no_flash, no_math),) = run_ranks(1, _run, family, "eager", "full")
    assert flash + softmax > 0
    assert (no_flash, no_math) == (0, 0)
    _check_equal((by_eager, eager_grads), (loss, grads))


def _split(layout: str, attention: str) -> tuple[list[float], list[float]]:
    cell = Cell("llama", layout, "full", dist.get_world_size())
    cfg = run_config(cell)
    cfg = replace(cfg, model=replace(cfg.model, attention=attention))
    outcome = run(cfg, lambda mesh, step: microbatches(cfg, mesh, step))
    return outcome.losses, outcome.norms


def test_eager_attention_in_layouts():
    ((losses, norms),) = run_ranks(1, _split, "single", "sdpa")
    for layout, num_ranks in (("fsdp2", 2), ("tp-sp", 2)):
        for others in run_ranks(num_ranks, _split, layout, "eager"):
            assert others[0] == pytest.approx(losses, rel=1e-6)
            assert others[1] == pytest.approx(norms, rel=1e-5)


def test_flash_attention_is_refused_where_it_cannot_run():
    with pytest.raises(RuntimeError, match="CUDA GPU alone, and this run is on cpu; use"):
        run_ranks(1, _run, "llama", "flash_attention_2", "none")


@pytest.mark.parametrize(
    ("precision", "is_installed", "message"),
    [
        ("bfloat16", False, "the package flash-attn is not installed; install it, or use sdpa"),
        ("float32", True, "no kernel for float32 products; compute in bfloat16, or use sdpa"),
        ("bfloat16", True, None),
    ],
)
def test_flash_attention_is_set_by_transformers(precision, is_installed, message, monkeypatch):
    monkeypatch.setattr(attention, "is_flash_attn_2_available", lambda: is_installed)
    cfg = run_config(Cell("gpt2", "single", "full"))
    cfg = replace(cfg, training=replace(cfg.training, precision=precision))
    cfg = replace(cfg, model=replace(cfg.model, attention="flash_attention_2"))
    hf = build_meta(cfg.model, read_config(cfg.model))
    taken = []
    monkeypatch.setattr(type(hf), "set_attn_implementation", lambda hf, name: taken.append(name))
    with pytest.raises(UserError, match=message or "transformers has no such form of GPT2LMHead"):
        attention.apply(SimpleNamespace(hf=hf), cfg, torch.device("cuda"))
    assert taken == ([] if message else ["flash_attention_2"])


@pytest.mark.parametrize("backend", ["efficient", pytest.param("cudnn", marks=pytest.mark.slow)])
def test_a_kernel_that_cannot_run_is_refused(backend):
    with pytest.raises(
        RuntimeError, match=rf"UserError: model.attention is {backend}, but .* use auto or math"
    ):
        run_ranks(1, _run, "qwen3_5_text", backend, "none")


def test_the_record_says_what_was_asked_for():
    cfg = run_config(Cell("llama", "single", "full"))
    eager = replace(cfg, model=replace(cfg.model, attention="eager"))
    assert describe(eager, 1, torch.device("cpu")).kernels["attention"] == "eager"
    assert "attention" not in describe(cfg, 1, torch.device("cpu")).kernels
