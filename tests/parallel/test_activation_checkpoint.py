"""Checkpointing changes no gradient by a bit, runs again what it says and no more, and saves
memory."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy

from shardwise.assembly.build import Job, build
from shardwise.assembly.describe import describe
from shardwise.base.batches import Batch
from shardwise.config import Checkpointing, Recomputation, UserError
from shardwise.metrics.memory import PeakMemory
from shardwise.parallel.activation_checkpoint import PRODUCTS, _keep_products
from shardwise.parallel.mesh import build_mesh
from shardwise.training.step import forward_backward
from tests.distributed import run_ranks
from tests.parity.harness import FAMILIES, Cell, DrawnStart, microbatches, run_config


def _build(
    family: str, mode: str, checkpointing: str | list[str], precision: str = "float32"
) -> tuple[Job, Any, list[Batch]]:
    cfg = run_config(Cell(family, "single", mode, variant="dropout"))
    cfg = replace(
        cfg, training=replace(cfg.training, checkpointing=checkpointing, precision=precision)
    )
    mesh = build_mesh(cfg, torch.device("cpu"))
    return build(cfg, mesh, DrawnStart()), mesh, microbatches(cfg, mesh, 1)[:2]


class _Products(TorchDispatchMode):
    """Counts operators whose outputs `operators` keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(func)] += func in PRODUCTS
        return func(*args, **(kwargs or {}))


def _gradients(
    family: str, mode: str, checkpointing: str | list[str], precision: str
) -> tuple[dict[str, torch.Tensor], Any]:
    job, mesh, batches = _build(family, mode, checkpointing, precision)
    with _Products() as products:
        forward_backward(job.pm, batches, mesh)
    grads = {n: p.grad.clone() for n, p in job.pm.named_parameters() if p.grad is not None}
    return grads, +products.counts


def _all_ways(
    family: str, mode: str, precision: str
) -> tuple[list[tuple[dict[str, torch.Tensor], Any]], bool]:
    layers = _build(family, mode, "none")[0].run.spec.layers
    kinds = {layer.kind for layer in layers}
    attention = sorted({layer.kind for layer in layers if layer.attention})
    ways = ("none", "operators", "full", attention)
    return [_gradients(family, mode, way, precision) for way in ways], kinds == set(attention)


LATENT = ("kimi_linear", "deepseek_v3")
"""Keys and values of these differ in size, which no kernel fuses on a CPU."""
WAYS = (("lora", "float32"), ("full", "bfloat16"))


QUICK = ("kimi_linear", "qwen3_5_text", "granitemoehybrid", "jamba", "llama")
"""`make test` runs these in one of WAYS in turn, and `make parity` every family in both."""


@pytest.mark.parametrize(
    ("family", "mode", "precision"),
    [
        pytest.param(
            family,
            *way,
            marks=[pytest.mark.slow] * (family not in QUICK or (QUICK.index(family) + j) % 2),
        )
        for family in FAMILIES
        for j, way in enumerate(WAYS)
    ],
)
def test_gradients_are_equal_by_the_bit(family, mode, precision):
    ((((plain, once), *others), attention_alone),) = run_ranks(
        1, _all_ways, family, mode, precision
    )
    for grads, _ in others:
        assert grads.keys() == plain.keys()
        assert all(torch.equal(grads[name], plain[name]) for name in plain)
    kept, again, attention_again = (counts for _, counts in others)
    assert (kept == once) == (mode == "full")  # no product is run again but those of adapters
    attention, bmm = "aten._scaled_dot_product_flash_attention_for_cpu.default", "aten.bmm.default"
    if family in LATENT:
        assert once[bmm] < attention_again[bmm] <= again[bmm]
    else:
        assert again[attention] == attention_again[attention] == 2 * once[attention] > 0
    # What has no attention layer's name is left alone; some families have nothing else.
    assert (attention_again == again) == attention_alone


def _peak(mode: str, checkpointing: Checkpointing) -> tuple[int, list[int]]:
    cfg = run_config(Cell("llama", "single", mode))
    cfg = replace(cfg, training=replace(cfg.training, checkpointing=checkpointing))
    mesh = build_mesh(cfg, torch.device("cpu"))
    job = build(cfg, mesh)
    runs = [0] * len(job.run.spec.layers)

    def count(index: int) -> None:
        runs[index] += 1

    for i, layer in enumerate(job.run.spec.layers):
        # A module inside the layer: the layer's own hooks lie outside what is recomputed.
        module = job.pm.parts[0].hf.get_submodule(f"{layer.name}.input_layernorm")
        module.register_forward_hook(lambda *_, i=i: count(i))
    one = microbatches(cfg, mesh, 1)[:1]
    forward_backward(job.pm, one, mesh)
    with PeakMemory(mesh.device) as memory:
        forward_backward(job.pm, one, mesh)
    assert memory.peak_bytes is not None
    assert memory.entry_bytes is not None
    return memory.peak_bytes - memory.entry_bytes, runs


@pytest.mark.parametrize("mode", ["lora", pytest.param("full", marks=pytest.mark.slow)])
def test_each_layer_runs_twice_and_the_peak_is_lower(mode):
    ((plain, once),) = run_ranks(1, _peak, mode, "none")
    ((kept, partly),) = run_ranks(1, _peak, mode, "operators")
    ((lower, twice),) = run_ranks(1, _peak, mode, "full")
    ((between, mixed),) = run_ranks(1, _peak, mode, Recomputation(full=(0,), operators=(2,)))
    assert once == [2] * 4  # two passes
    assert twice == partly == [4] * 4
    # Four layers' activations are kept without it, and one layer's and four inputs with it.
    assert lower < 0.7 * plain
    assert lower < kept < plain
    assert mixed == [4, 2, 4, 2]
    assert lower < between < plain


def test_a_kind_that_the_model_has_not():
    cfg = run_config(Cell("qwen3_5_text", "single", "full"))
    cfg = replace(cfg, training=replace(cfg.training, checkpointing=["full_attention", "mamba2"]))
    with pytest.raises(
        UserError, match="names mamba2, but this model's layers are of the kinds full_attention, ga"
    ):
        describe(cfg, 1)
    with pytest.raises(UserError, match="empty list"):
        replace(cfg.training, checkpointing=[])


def test_what_a_kernel_of_ours_gives_is_kept():
    op: Any = torch.library.custom_op(
        "shardwise::kept_by_checkpointing",
        torch.clone,
        mutates_args=(),
        schema="(Tensor x) -> Tensor",
    )
    op(torch.ones(2))
    found = _keep_products(
        frozenset(), None, torch.ops.shardwise.kept_by_checkpointing.default, torch.ones(2)
    )
    assert found == CheckpointPolicy.MUST_SAVE
    assert _keep_products(frozenset(), None, torch.ops.aten.clone.default, torch.ones(2)) != found
