"""Experts of widths that torch's grouped product cannot take: under tp 2 they equal one process."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from shardwise.config import Lora
from shardwise.models import families
from shardwise.models.adapters.lora import inject
from shardwise.models.facts import why_in_a_loop
from shardwise.models.families import spec_of
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
def test_equals_one_process(width, family, mode, variant):
    cell = Cell(family, "tp", mode, 2, variant)
    (reference,) = run_ranks(1, run_cell, cell.reference())
    assert verdict(compare(run_ranks(2, run_cell, cell), reference)) == []


@pytest.mark.parametrize(
    ("width", "tp", "dtype", "rank", "is_grouped"),
    [
        (48, 2, "bfloat16", 8, True),
        (40, 1, "bfloat16", 8, True),
        (40, 2, "bfloat16", 8, False),
        (48, 1, "bfloat16", 4, False),
        (48, 1, "float32", 8, False),
    ],
    indirect=["width"],
)
@pytest.mark.parametrize(
    "family", [name for name, family in families.FAMILIES.items() if family.named("experts")]
)
def test_what_a_grouped_product_takes_of_a_ranks_share(width, tp, dtype, rank, is_grouped, family):
    cfg = run_config(Cell(family, "tp", "lora", tp))
    hf = on_meta(replace(cfg.model, dtype=dtype))
    spec = spec_of(hf.config, hf)
    inject(hf, Lora(r=rank, targets="all-linear"), spec)
    assert (why_in_a_loop(hf, spec, tp) is None) == is_grouped
