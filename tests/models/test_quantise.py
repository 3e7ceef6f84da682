"""Matrices in few bits: which they are, how they are loaded, and what is exported."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from shardwise.assembly.build import build
from shardwise.commands import cli
from shardwise.config import Lora, Model, UserError
from shardwise.metrics.memory import PeakMemory
from shardwise.models.adapters.writing import save_adapter
from shardwise.models.copy import copy_model
from shardwise.models.families import FAMILIES, family_of, spec_of
from shardwise.models.load import build_meta, read_config, weights
from shardwise.models.quantise import quantised, stored_paths
from shardwise.models.stored import stored_in
from shardwise.parallel.mesh import build_mesh
from tests.distributed import run_ranks
from tests.left_out import some_now
from tests.models.tiny import (
    TINY_OF,
    loaded_by_transformers,
    logits,
    on_meta,
    tiny,
    trained,
    with_adapters,
    with_every_kind,
)
from tests.parity.harness import DEEP, Cell, run_config

WIDE = str(DEEP / "wide-qwen3_5")
CPU = torch.device("cpu")


@pytest.mark.parametrize("family", some_now(FAMILIES, with_every_kind(FAMILIES)))
def test_matrices_of_layers_are_stored_and_all_else_is_not(family):
    hf = on_meta(tiny(TINY_OF[family]))
    spec, kind = spec_of(hf.config, hf), family_of(hf)
    paths = [*stored_paths(hf, spec, "nf4")]
    kept = dict(hf.named_parameters())
    stored = [kept.pop(path) for path in paths]
    assert all(parameter.dim() in (2, 3) for parameter in stored)
    apart = {*kind.named("gating"), *kind.named("gates"), *kind.named("bypassed")}
    for name, parameter in kept.items():
        layer = next((lay.name for lay in spec.layers if name.startswith(f"{lay.name}.")), None)
        if layer is not None and parameter.dim() > 1:
            short = name.removeprefix(f"{layer}.").removesuffix(".weight")
            is_small = parameter.numel() < 0.1 * sum(p.numel() for p in stored)
            assert short in apart or is_small, name


@pytest.mark.parametrize("fmt", ["nf4", "int8", "fp8"])
def test_a_copy_has_the_values_that_a_run_reads(fmt, tmp_path):
    copy_model(Model(WIDE, init="random"), fmt, tmp_path / "copy")
    copied = loaded_by_transformers(tmp_path / "copy").state_dict()
    read = run_ranks(1, read_by_a_run, fmt)[0]
    assert len(read) > 20
    assert all(torch.equal(copied[name], values) for name, values in read.items())
    original = dict(weights(on_meta(Model(WIDE, init="random")), Model(WIDE, init="random"), 0))
    assert not any(torch.equal(original[name], values) for name, values in read.items())
    same = original.keys() - read.keys()
    assert all(torch.equal(copied[name], original[name]) for name in same)


def read_by_a_run(fmt: str) -> dict[str, torch.Tensor]:
    cfg = run_config(Cell("qwen3_5_text", "single", "lora", 1, fmt))
    job = build(cfg, build_mesh(cfg, CPU))
    stored = stored_in(job.pm.parts[0].hf)
    return {
        name.replace(".base_layer", ""): part.matrix.to(torch.float32)
        for name, part in stored.items()
    }


def test_an_adapter_is_merged_into_what_it_was_trained_on(tmp_path, capsys):
    model = Model(WIDE, init="random")
    copy_model(model, "int8", tmp_path / "copy")
    copy = replace(model, path=str(tmp_path / "copy"), init="weights")
    adapted, _ = with_adapters(copy, Lora(r=4))
    save_adapter(adapted, Lora(r=4), trained(adapted), tmp_path / "adapter", WIDE)
    # A base with weights: random ones are no function of a folder.
    copy_of_base(model, tmp_path / "base")
    merge = ["export", str(tmp_path / "base"), str(tmp_path / "adapter"), str(tmp_path / "out")]
    assert cli.main([*merge, "--merge", "--base", "int8"]) == 0
    rounding, moved = rounding_of(tmp_path / "out", tmp_path / "copy")
    assert 1e-4 < rounding < 0.02 < moved < 1
    note = capsys.readouterr().out.splitlines()[0]
    assert f"model.base by {moved:.2%} of" in note
    assert f"would move them by {rounding:.2%}" in note
    merged = logits(loaded_by_transformers(tmp_path / "out"))
    torch.testing.assert_close(merged, logits(adapted), rtol=1e-4, atol=1e-5)
    assert (
        cli.main(["export", str(tmp_path / "base"), str(tmp_path / "again"), "--copy", "int8"]) == 0
    )
    again = loaded_by_transformers(tmp_path / "again").state_dict()
    copied = loaded_by_transformers(tmp_path / "copy").state_dict()
    assert all(torch.equal(again[name], values) for name, values in copied.items())
    assert cli.main([*merge, "--copy", "int8"]) == 2
    assert "--copy takes MODEL and OUT" in capsys.readouterr().err


def rounding_of(merged: Path, copy: Path) -> tuple[float, float]:
    """How far int8 moves the matrices of layers in a folder, and how far they are from a copy's."""
    after = loaded_by_transformers(merged).state_dict()
    before = loaded_by_transformers(copy).state_dict()
    linears = [  # every matrix that two roundings by rows change
        name
        for name, values in after.items()
        if values.dim() == 2 and ".layers." in name and not torch.equal(by_rows(values), values)
    ]
    stored = [name for name in linears if torch.allclose(by_rows(before[name]), before[name])]
    size = norm(after[name] for name in stored)
    rounding = norm(by_rows(after[name]) - after[name] for name in stored)
    return rounding / size, norm(after[name] - before[name] for name in stored) / size


def by_rows(matrix: torch.Tensor) -> torch.Tensor:
    scales = matrix.abs().amax(-1, keepdim=True) / 127
    return (matrix / scales).round() * scales


def norm(parts: Iterable[torch.Tensor]) -> float:
    return sum(part.double().square().sum().item() for part in parts) ** 0.5


def copy_of_base(model: Model, folder: Path) -> None:
    from shardwise.models.save import save_model

    hf = build_meta(model, read_config(model))
    save_model(hf, weights(hf, model, 0), folder)


@pytest.mark.parametrize(
    ("layout", "num_ranks"), some_now((("single", 1), ("fsdp2", 2), ("tp", 2)), [("fsdp2", 2)])
)
def test_no_rank_holds_the_model_as_it_was(layout, num_ranks):
    """While weights are loaded, one whole matrix is in memory beside what is stored."""
    (plain,) = run_ranks(1, bytes_of_loading, "single", 1, "none")
    for stored in run_ranks(num_ranks, bytes_of_loading, layout, num_ranks, "nf4"):
        assert stored < plain / 2


def bytes_of_loading(layout: str, num_ranks: int, base: str) -> int:
    cfg = run_config(Cell("qwen3_5_text", layout, "lora", num_ranks, "nf4"))
    cfg = replace(cfg, model=replace(cfg.model, base=base))
    with PeakMemory(CPU) as peak:
        job = build(cfg, build_mesh(cfg, CPU))
    assert job.pm.parts
    assert peak.peak_bytes is not None
    assert peak.entry_bytes is not None
    return peak.peak_bytes - peak.entry_bytes


def test_weights_too_large_for_scales_of_int4_are_one_line():
    """Scales are float16, at most 65504, and codes go to 15."""
    largest = torch.full((2, 64), 15 * 65504.0)
    assert quantised(largest, "int4", "w")["scales"].isfinite().all()
    with pytest.raises(UserError, match=r"^w has values as large as 1e\+06"):
        quantised(largest * 1.02, "int4", "w")
