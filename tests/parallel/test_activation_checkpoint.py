"""Checkpointing saves memory, in every layer; that it changes no gradient is shown by the parity cells."""

from __future__ import annotations

from dataclasses import replace

import torch

from shardwise.metrics.memory import PeakMemory
from shardwise.parallel.mesh import build_mesh
from shardwise.training.build import build
from shardwise.training.step import forward_backward
from tests.distributed import run_ranks
from tests.parity.harness import Cell, microbatches, run_config


def _peak(checkpointing: str) -> tuple[int, list[int]]:
    cfg = run_config(Cell("llama", "single", "lora"))
    cfg = replace(cfg, training=replace(cfg.training, checkpointing=checkpointing))
    mesh = build_mesh(cfg, torch.device("cpu"))
    job = build(cfg, mesh)
    runs = [0] * len(job.spec.layers)

    def count(index: int) -> None:
        runs[index] += 1

    for i, layer in enumerate(job.spec.layers):
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


def test_each_layer_runs_twice_and_the_peak_is_lower():
    ((plain, once),) = run_ranks(1, _peak, "none")
    ((lower, twice),) = run_ranks(1, _peak, "full")
    assert once == [2] * 4  # two passes
    assert twice == [4] * 4
    # Four layers' activations are kept without it, and one layer's and four inputs with it.
    assert lower < 0.7 * plain
