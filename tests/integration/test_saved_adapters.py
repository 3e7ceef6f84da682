"""Whatever a run trains is found again by plain PEFT on the plain base."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor

from shardwise.assembly.build import Job, build
from shardwise.checkpoint.export import save_result
from shardwise.config import Model, RunConfig
from shardwise.models.adapters.lora import reach
from shardwise.models.copy import copy_model
from shardwise.models.families import FAMILIES, spec_of
from shardwise.models.load import weights
from shardwise.models.save import save_model
from shardwise.parallel.mesh import build_mesh
from tests.distributed import run_ranks
from tests.left_out import some_now
from tests.models.tiny import (
    CONFIGS,
    TINY_OF,
    loaded_by_transformers,
    logits,
    on_meta,
    relative_error,
)
from tests.parity.features.bases import FAMILIES as WIDE
from tests.parity.harness import BASES, Cell, run_config

TARGETS = ("auto", "attention", "all-linear", "layer", "stacks")
"""`lora.targets`; `layer`: all linears and stacks of the last layer, `stacks`: all stacks."""
EVERY = [
    (family, base, targets)
    for family, base, targets in product(FAMILIES, ("none", *BASES), TARGETS)
    if (base != "nf4" or family in WIDE)
    and (targets != "stacks" or FAMILIES[family].named("experts"))
]
NOW = [
    *(("qwen3_moe", base, "all-linear") for base in ("none", "int8", "fp8")),
    *(("qwen3_next", "int8", targets) for targets in ("auto", "layer", "stacks")),
    *(("granitemoehybrid", "nf4", "all-linear"), ("lfm2_moe", "nf4", "layer")),
    *(("nemotron_h", "fp8", "stacks"), ("gpt2", "int8", "layer"), ("llama", "fp8", "layer")),
]


def config_of(cell: Cell, targets: str) -> RunConfig:
    """The run of a cell; with bases, of a tiny model where there is no wide one."""
    cfg = run_config(cell)
    if cell.variant in BASES and cell.family not in WIDE:
        path = str(CONFIGS / TINY_OF[cell.family])
        cfg = replace(cfg, model=replace(cfg.model, path=path))
    hf = on_meta(cfg.model)
    spec, chosen = spec_of(hf.config, hf), targets
    if targets in ("layer", "stacks"):
        every = reach(hf, spec, "all-linear")
        last = f"{spec.layers[-1].name}."
        stacks = tuple(f".{name}" for name in FAMILIES[cell.family].named("experts"))
        chosen = [
            path
            for path in every
            if (path.startswith(last) if targets == "layer" else path.endswith(stacks))
        ]
    assert cfg.lora is not None
    return replace(cfg, lora=replace(cfg.lora, targets=chosen))


def trained_job(cfg: RunConfig) -> Job:
    """The job of a run, with factors B that are not 0."""
    job = build(cfg, build_mesh(cfg, torch.device("cpu")))
    torch.manual_seed(0)
    for name, parameter in job.pm.named_parameters():
        if ".lora_B." in name:
            local = parameter.data
            (local.to_local() if isinstance(local, DTensor) else local).normal_(0, 0.05)
    return job


def save(cell: Cell, targets: str, out: Path) -> torch.Tensor | None:
    """Write the adapter of a run, and return what the run computes, if one process has all."""
    cfg = config_of(cell, targets)
    job = trained_job(cfg)
    save_result(job, cfg, build_mesh(cfg, torch.device("cpu")), out)
    return logits(job.run.hf) if cell.layout == "single" else None


def plain_base(model: Model, base: str, out: Path) -> None:
    """Write the base as plain weights: the values that are stored in its format, or its own."""
    if base != "none":
        copy_model(model, base, out)  # ty: ignore[invalid-argument-type]
        return
    hf = on_meta(model)
    save_model(hf, weights(hf, model, 0), out)


# PEFT 0.21 uses a name that transformers will drop. A key without a place is a UserWarning.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
@pytest.mark.parametrize(("family", "base", "targets"), some_now(EVERY, NOW))
def test_peft_finds_every_factor_on_the_plain_base(family, base, targets, tmp_path):
    cell = Cell(family, "single", "lora", 1, base if base != "none" else "")
    (expected,) = run_ranks(1, save, cell, targets, tmp_path)
    cfg = config_of(cell, targets)
    plain_base(cfg.model, base, tmp_path / "base")
    loaded = PeftModel.from_pretrained(
        loaded_by_transformers(tmp_path / "base"), str(tmp_path / "adapter")
    )
    saved = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    factors = [value for name, value in loaded.named_parameters() if ".lora_" in name]
    assert len(factors) == len(saved) > 0
    assert sum(map(torch.Tensor.numel, factors)) == sum(map(torch.Tensor.numel, saved.values()))
    assert relative_error(logits(loaded), expected) < 1e-5
    plain = logits(loaded_by_transformers(tmp_path / "base"))
    assert relative_error(plain, expected) > 1e-3


LAID_OUT = [
    Cell(family, layout, "lora", nproc, base, schedule)
    for family, layout, nproc, base, schedule in (
        ("granitemoehybrid", "ddp-ep", 2, "nf4", ""),
        ("lfm2_moe", "fsdp2", 2, "int8", ""),
        ("jamba", "pp", 2, "fp8", "1f1b"),
        ("qwen3_moe", "zero1", 2, "fp8", ""),
        ("qwen3_moe", "ddp", 2, "int8", ""),
    )
]


@pytest.mark.parametrize("cell", LAID_OUT, ids=lambda cell: cell.id)
def test_every_layout_writes_the_adapter_of_one_process(cell, tmp_path):
    single = replace(cell, layout="single", nproc=1, schedule="")
    for each, out in ((cell, tmp_path / "laid-out"), (single, tmp_path / "single")):
        out.mkdir()
        run_ranks(each.nproc, save, each, "all-linear", out)
    configs, files = (
        [tmp_path / out / "adapter" / name for out in ("laid-out", "single")]
        for name in ("adapter_config.json", "adapter_model.safetensors")
    )
    assert configs[0].read_text() == configs[1].read_text()
    ours, theirs = map(load_file, files)
    assert ours.keys() == theirs.keys()
    for key, value in theirs.items():
        if ".lora_A." in key:  # drawn by name; B is drawn here, by process
            assert torch.equal(ours[key], value), key
        assert ours[key].shape == value.shape, key


OWN_SIZES = [
    (family, target, size)
    for family, targets in {
        "qwen3_moe": ("up_proj", "down_proj", "experts.gate_up_proj"),
        "qwen3_next": ("shared_expert.down_proj", "shared_expert.gate_proj"),
        "deepseek_v3": ("shared_experts.up_proj",),
        "glm4_moe": ("gate_proj", "shared_experts.gate_proj"),
        "mixtral": ("experts.down_proj", "q_proj"),
        "llama": ("up_proj",),
    }.items()
    for target, size in product(targets, ([4, 1], [3, 1], [3, 16]))
]
"""A weight with a rank and alpha of its own; PEFT renames linears of MLPs in some families.

PEFT warns of patterns of parameters that they match no module, though they take effect."""
SIZES_NOW = [
    *(("qwen3_moe", "up_proj", size) for size in ([4, 1], [3, 1])),
    *(("deepseek_v3", "shared_experts.up_proj", [3, 16]), ("glm4_moe", "gate_proj", [4, 1])),
    ("qwen3_next", "shared_expert.down_proj", [3, 1]),
]


def save_sized(family: str, target: str, size: list[float], out: Path) -> torch.Tensor:
    """Write the adapter of a run with a size of its own, and return what the run computes."""
    cfg = config_of(Cell(family, "single", "lora", 1, ""), "auto")
    assert cfg.lora is not None
    sized: dict[str, list[float] | None] = {target: size}
    others = {"o_proj": None} if family != "deepseek_v3" else {"o_proj": None, "q_b_proj": None}
    cfg = replace(cfg, lora=replace(cfg.lora, r=4, alpha=8.0, targets=sized | others))
    job = trained_job(cfg)
    save_result(job, cfg, build_mesh(cfg, torch.device("cpu")), out)
    return logits(job.run.hf)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys:RuntimeWarning")
@pytest.mark.parametrize(("family", "target", "size"), some_now(OWN_SIZES, SIZES_NOW))
def test_peft_gives_each_weight_the_rank_and_scale_that_it_was_trained_with(
    family, target, size, tmp_path
):
    (expected,) = run_ranks(1, save_sized, family, target, size, tmp_path)
    model = config_of(Cell(family, "single", "lora", 1, ""), "auto").model
    plain_base(model, "none", tmp_path / "base")
    base = loaded_by_transformers(tmp_path / "base")
    plain = logits(base)
    loaded = PeftModel.from_pretrained(base, str(tmp_path / "adapter"))
    assert relative_error(logits(loaded), expected) < 1e-5
    assert relative_error(plain, expected) > 1e-3
