"""Activations in CPU memory: gradients are equal to the bit, what is kept is moved and nothing
else, and of the layers' activations the device holds those of two."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.assembly.build import Job, build
from shardwise.assembly.describe import describe
from shardwise.config import RunConfig
from shardwise.lab.planner import peak
from shardwise.models.activations import unit_memory
from shardwise.parallel import activation_offload
from shardwise.parallel.activation_offload import Offload
from shardwise.parallel.mesh import build_mesh
from shardwise.training.step import forward_backward
from tests.distributed import run_ranks
from tests.left_out import some_now
from tests.parity.harness import Cell, DrawnStart, microbatches, run_config
from tests.planner import grid


def _config(
    family: str, mode: str, precision: str, *, checkpointing: Any = "none", offload: bool = True
) -> RunConfig:
    cfg = run_config(Cell(family, "single", mode, variant="dropout"))
    return replace(
        cfg,
        training=replace(
            cfg.training,
            checkpointing=checkpointing,
            offload_activations=offload,
            precision=precision,
        ),
    )


def _gradients(cfg: RunConfig) -> tuple[dict[str, torch.Tensor], int]:
    mesh = build_mesh(cfg, torch.device("cpu"))
    job = build(cfg, mesh, DrawnStart())
    forward_backward(job.pm, microbatches(cfg, mesh, 1)[:2], mesh)
    grads = {n: p.grad.clone() for n, p in job.pm.named_parameters() if p.grad is not None}
    return grads, _moved(job)


def _moved(job: Job) -> int:
    return sum(part.offloaded_bytes for part in job.pm.parts)  # type: ignore[attr-defined]


def _all_ways(family: str, mode: str, precision: str) -> list[tuple[dict[str, Any], int]]:
    ways = ((False, "none"), (True, "none"), (True, "full"), (True, ["full_attention"]))
    return [
        _gradients(_config(family, mode, precision, checkpointing=what, offload=offload))
        for offload, what in ways
    ]


@pytest.mark.parametrize(
    ("family", "mode", "precision"),
    [
        ("llama", "lora", "bfloat16"),
        ("qwen3_5_text", "full", "float32"),
        pytest.param("granitemoehybrid", "lora", "float32", marks=pytest.mark.slow),
        pytest.param("jet_nemotron", "full", "bfloat16", marks=pytest.mark.slow),
    ],
)
def test_gradients_are_equal_by_the_bit(family, mode, precision):
    (((plain, none), (moved, most), (inputs, least), (some, between)),) = run_ranks(
        1, _all_ways, family, mode, precision
    )
    for grads in (moved, inputs, some):
        assert grads.keys() == plain.keys()
        assert all(torch.equal(grads[name], plain[name]) for name in plain)
    assert none == 0 < least <= between < most


def _moved_and_formula(family: str, mode: str, precision: str) -> list[tuple[int, int]]:
    activation_offload.LEAST_BYTES = 1  # of this process, which ends
    found = []
    for what in ("full", "none"):
        cfg = _config(family, mode, precision, checkpointing=what)
        mesh = build_mesh(cfg, torch.device("cpu"))
        job = build(cfg, mesh, DrawnStart())
        forward_backward(job.pm, microbatches(cfg, mesh, 1)[:1], mesh)
        run = describe(cfg, 1)
        layers = range(1, 1 + len(run.spec.layers))
        kept = sum(unit_memory(cfg, run.hf, run.spec, n).kept for n in layers)
        found.append((_moved(job), kept))
    return found


KEPT = (
    ("llama", "lora", "bfloat16"),
    ("qwen3_5_text", "full", "float32"),
    ("nemotron_h", "lora", "float32"),
    ("kimi_linear", "full", "bfloat16"),
)
"""Each family once, in one of its two modes and dtypes; `make parity` has each with each."""


@pytest.mark.parametrize(
    ("family", "mode", "precision"),
    some_now(product([case[0] for case in KEPT], ("lora", "full"), ("float32", "bfloat16")), KEPT),
)
def test_what_layers_keep_by_formula_is_moved(family, mode, precision):
    """Weights are not, nor is anything moved twice. The formulas leave out what all layers share,
    such as the angles of positions, and are off by 2 % themselves (docs/decisions/054)."""
    (((inputs, inputs_kept), (moved, kept)),) = run_ranks(
        1, _moved_and_formula, family, mode, precision
    )
    assert inputs == inputs_kept
    assert moved == pytest.approx(kept, rel=0.02)


def test_nothing_is_moved_where_there_is_no_backward():
    ((before, after),) = run_ranks(1, _evaluated)
    assert before == after == 0


def _evaluated() -> tuple[int, int]:
    cfg = _config("llama", "lora", "float32")
    mesh = build_mesh(cfg, torch.device("cpu"))
    job = build(cfg, mesh)
    before = _moved(job)
    with torch.no_grad():
        job.pm.parts[0](microbatches(cfg, mesh, 1)[0])
    return before, _moved(job)


def _peaks(cells: list[grid.Cell], folder: Path) -> list[int]:
    """The measured peaks. The device is the CPU, so memory that torch does not count stands for the
    CPU's."""
    plain = grid.config_of
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grid, "config_of", lambda cell, folder: _offloading(plain(cell, folder)))
        patch.setattr(Offload, "to_cpu", lambda self, tensor: tensor.numpy().copy())
        patch.setattr(Offload, "to_device", lambda self, array: (torch.tensor(array), None))
        return [measured.peak for measured in grid.measure_each(cells, folder)]


def _offloading(cfg: RunConfig) -> RunConfig:
    return replace(cfg, training=replace(cfg.training, offload_activations=True))


@pytest.mark.parametrize("layout", ["single", pytest.param("1f1b", marks=pytest.mark.slow)])
def test_a_device_has_the_activations_of_two_layers(layout, tmp_path, monkeypatch):
    """As it is planned: 0.1 to 1.4 % off on one process, -4 to +9 % on a stage of a pipeline."""
    cells = [
        replace(
            grid.Cell(family, layout, mode, 1, 256, 2, 4, what, "float32"),
            num_ranks=2 if layout == "1f1b" else 1,
        )
        for family, mode, what in (
            ("llama", "lora", "none"),
            ("qwen3_5", "full", "none"),
            ("llama", "full", "full"),
        )
    ]
    measured = zip(*run_ranks(cells[0].num_ranks, _peaks, cells, tmp_path), strict=True)
    kept = [grid.predict(cell, tmp_path)[1].total for cell in cells]
    plain = grid.config_of
    monkeypatch.setattr(grid, "config_of", lambda cell, folder: _offloading(plain(cell, folder)))
    monkeypatch.setattr(peak.Rank, "_moves_activations", True)
    planned = [grid.predict(cell, tmp_path)[1].total for cell in cells]
    for cell, peaks, offloaded, before in zip(cells, measured, planned, kept, strict=True):
        assert offloaded == pytest.approx(max(peaks), rel=0.1 if layout == "1f1b" else 0.02), (
            cell.id
        )
        assert offloaded < before
