"""Which linears multiply in 8 bits, with each of LoRA's forwards, and what a run prints of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from shardwise.assembly.build import build
from shardwise.assembly.describe import describe
from shardwise.config import UserError
from shardwise.kernels import float8 as kernel
from shardwise.models.families import FAMILIES, family_of, spec_of
from shardwise.models.names import hf_name
from shardwise.models.patches import float8
from shardwise.parallel.mesh import build_mesh
from tests.distributed import run_ranks
from tests.left_out import some_now
from tests.models.tiny import TINY_OF, on_meta, tiny, with_every_kind
from tests.parity.harness import Cell, Outcome, microbatches, run, run_config

CPU = torch.device("cpu")
LORA = Cell("qwen3_5_text", "single", "lora", variant="tensorwise")


@pytest.mark.parametrize("family", some_now(FAMILIES, with_every_kind(FAMILIES)))
def test_linears_of_layers_multiply_in_8_bits_and_gates_do_not(family):
    hf = on_meta(tiny(TINY_OF[family]))
    spec, kind = spec_of(hf.config, hf), family_of(hf)
    chosen = {path for path, _ in float8.linears(hf, spec)}
    apart = {*kind.named("gating"), *kind.named("gates"), *kind.named("bypassed")}
    for path, module in hf.named_modules():
        if type(module) in (nn.Linear, Conv1D):
            layer = next((lay.name for lay in spec.layers if path.startswith(f"{lay.name}.")), None)
            is_apart = layer is None or path.removeprefix(f"{layer}.") in apart
            assert (path in chosen) is not is_apart, path
    assert 0 < float8.num_linears(hf, spec) <= len(chosen)


def test_the_forwards_of_chosen_linears_alone_are_replaced():
    for mode in ("full", "lora"):
        run_ranks(1, check_forwards, replace(LORA, mode=mode))


def check_forwards(cell: Cell) -> None:
    cfg = run_config(cell)
    job = build(cfg, build_mesh(cfg, CPU))
    (part,) = job.pm.parts
    replaced = {
        hf_name(f"{path}.").removesuffix(".")
        for path, module in job.run.hf.named_modules()
        if isinstance(module, nn.Linear) and "forward" in vars(module) and ".lora_" not in path
    }
    spec = job.run.spec
    assert replaced - {spec.head} == {
        hf_name(f"{path}.").removesuffix(".") for path, _ in float8.linears(job.run.hf, spec)
    }
    assert len(part.float8) == 25
    assert job.run.kernels["matmul"] == "fp8_tensorwise (emulated)"


def test_lora_kernels_agree():
    (torch_kernel,) = run_ranks(1, with_kernel, "torch")
    (peft,) = run_ranks(1, with_kernel, "peft")
    assert torch_kernel.losses[0] == pytest.approx(peft.losses[0], rel=1e-3)
    (plain,) = run_ranks(1, with_kernel, "peft", "default")
    # 8 bits move the loss by more than what the kernels differ by.
    moved = abs(plain.losses[0] - peft.losses[0])
    assert moved > 10 * abs(torch_kernel.losses[0] - peft.losses[0])


def with_kernel(kernel_name: str, matmul: str = "fp8_tensorwise") -> Outcome:
    cfg = run_config(LORA)
    assert cfg.lora is not None
    cfg = replace(cfg, lora=replace(cfg.lora, kernel=kernel_name))
    cfg = replace(cfg, training=replace(cfg.training, matmul=matmul))
    return run(cfg, lambda mesh, step: microbatches(cfg, mesh, step))


def test_notes_name_what_keeps_its_product():
    cfg = run_config(Cell("llama", "single", "full"))
    cfg = replace(cfg, training=replace(cfg.training, matmul="fp8_rowwise"))
    notes = [note for note in describe(cfg, 1).notes if "training.matmul" in note]
    text = " ".join(notes)
    assert len(notes) == 3
    assert "16 linears" in text
    assert "emulated" in text
    assert "model.layers.*.mlp.down_proj" in text
    assert "self_attn" not in text
    plain = replace(cfg, training=replace(cfg.training, matmul="default"))
    assert not any("training.matmul" in note for note in describe(plain, 1).notes)


def test_a_gpu_without_such_products_is_refused(monkeypatch):
    monkeypatch.setattr(kernel, "missing", lambda device: "this GPU is old")
    cfg = run_config(LORA)
    with pytest.raises(UserError, match=r"training\.matmul.*this GPU is old; set it to default"):
        float8.kernel_for(cfg, CPU)
