"""Experts of widths that torch's grouped product cannot take: they train, and under tp 2 equal one
process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from shardwise.models import families
from shardwise.models.causal_lm import CausalLM
from shardwise.models.families import family_of, spec_of
from shardwise.models.patches import patch
from shardwise.models.patches.experts import why_one_by_one
from tests.distributed import run_ranks
from tests.models.tiny import on_meta
from tests.parity import harness
from tests.parity.harness import FAMILIES, Cell, compare, run_cell, run_config, verdict

CONFIGS = harness.CONFIGS


@pytest.fixture
def width(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> int:
    """Let the tiny models have experts of this width."""
    for name in FAMILIES.values():
        config = json.loads((CONFIGS / name / "config.json").read_text())
        key = "moe_intermediate_size" if "moe_intermediate_size" in config else "intermediate_size"
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config | {key: request.param}))
    monkeypatch.setattr(harness, "CONFIGS", tmp_path)
    return request.param


# 44 float32 numbers are a multiple of 16 bytes, 22 are none; nor are 30.
@pytest.mark.parametrize(
    ("width", "family", "mode", "variant"),
    [(44, "qwen3_moe", "full", ""), (30, "nemotron_h", "lora", "experts")],
    indirect=["width"],
)
def test_equals_one_process(width: int, family: str, mode: str, variant: str) -> None:
    cell = Cell(family, "tp", mode, 2, variant)
    (reference,) = run_ranks(1, run_cell, cell.reference())
    assert verdict(compare(run_ranks(2, run_cell, cell), reference)) == []


@pytest.mark.parametrize(
    ("width", "tp", "odd"),
    [(48, 1, None), (44, 1, None), (44, 2, 8), (30, 1, 4)],
    indirect=["width"],
)
@pytest.mark.parametrize(
    "family", [name for name, family in families.FAMILIES.items() if family.experts]
)
def test_product_is_chosen_by_a_ranks_share(
    width: int, tp: int, odd: int | None, family: str
) -> None:
    cfg = run_config(Cell(family, "tp", "full", tp))
    hf = on_meta(cfg.model)
    spec, family = spec_of(hf.config, hf), family_of(hf)
    reason = why_one_by_one(hf, spec, family, tp)
    assert reason is None if odd is None else f"multiples of {odd}" in str(reason)
    patch(CausalLM(hf, spec, family, cfg), cfg, torch.device("cpu"))
    assert hf.config._experts_implementation == ("grouped_mm" if odd is None else "eager")
