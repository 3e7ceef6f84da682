"""Which trained weights in 16 bits stay where they are, and that a run says so."""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.config import Lora, RunConfig
from shardwise.metrics.spacing import unmoved_note
from tests.distributed import run_ranks
from tests.integration.conftest import make_corpus
from tests.integration.test_resume import PROCESSES, cheap, config, record, run
from tests.models.test_carried import in_files

__all__ = ["cheap"]  # a fixture


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("run")
    make_corpus(path)
    return path


def note_of(cfg: RunConfig, **named: torch.Tensor) -> str | None:
    parameters = [(name, torch.nn.Parameter(value)) for name, value in named.items()]
    return unmoved_note(parameters, cfg, lambda counts: [counts, Counter[str]()])


def cfg_of(lr: float, name: str = "adamw", **sections: object) -> RunConfig:
    cfg = config(Path("unused"), "unused", lora=False)
    return replace(cfg, optimizer=replace(cfg.optimizer, lr=lr, name=name), **sections)


@settings(deadline=None, max_examples=50)
@given(
    # Where a step is half of a spacing, even numbers stay and odd ones move.
    lr=st.floats(1e-7, 1e-1).filter(lambda lr: abs(math.log2(lr) % 1 - 0.5) < 0.48),
    scale=st.floats(1e-3, 10.0),
    dtype=st.sampled_from([torch.bfloat16, torch.float16]),
    seed=st.integers(0, 100),
)
def test_the_share_is_that_of_weights_which_torch_leaves(lr, scale, dtype, seed):
    """Of a step of the learning rate away from 0; one towards 0 may move a power of two."""
    generator = torch.Generator().manual_seed(seed)
    values = (torch.randn(4_000, generator=generator) * scale).to(dtype)
    moved = (values.float() + lr * values.float().sign()).to(dtype)
    share = (moved == values).float().mean().item()
    note = note_of(cfg_of(lr), weight=values)
    if share > 0.11:
        assert note is not None
        assert abs(int(re.search(r"(\d+)% of the trained", note)[1]) - 100 * share) <= 1.5  # ty: ignore[not-subscriptable]
    elif share < 0.09:
        assert note is None


def test_norms_are_told_where_all_else_moves():
    """At 1 and above neighbours are 2^-7 apart, below it 2^-8; weights of a linear are small."""
    norm, linear = torch.ones(64).bfloat16(), torch.full((64, 64), 1e-3).bfloat16()
    note = note_of(cfg_of(1e-3), model_norm=norm, up_proj=linear)
    assert note is not None
    assert "and of 100% of those of norms" in note
    assert "model.dtype: float32" in note
    assert note_of(cfg_of(5e-3), model_norm=norm, up_proj=linear) is None


def test_no_note_where_every_weight_moves_or_nothing_is_known():
    norm = torch.ones(64)
    assert note_of(cfg_of(1e-5), norm=norm) is None  # float32
    assert note_of(cfg_of(1e-5, "sgd"), norm=norm.bfloat16()) is None
    assert note_of(cfg_of(0.0), norm=norm.bfloat16()) is None
    assert note_of(cfg_of(1e-5, "adamw8bit"), norm=norm.bfloat16()) is not None
    assert note_of(cfg_of(1e-5, "muon"), norm=norm.bfloat16()) is not None
    assert (
        unmoved_note(
            [("norm", torch.nn.Parameter(norm.bfloat16(), False))], cfg_of(1e-5), lambda n: [n]
        )
        is None
    )


def test_factors_in_16_bits_are_told_with_their_own_way_out():
    factor = {"q_proj.lora_A.default.weight": torch.ones(4, 4).bfloat16()}
    note = note_of(cfg_of(1e-5, lora=Lora(dtype="model")), **factor)
    assert note is not None
    assert "lora.dtype: float32" in note
    b = {"q_proj.lora_B.default.weight": torch.ones(4, 4).bfloat16()}
    faster = cfg_of(1e-3, lora=Lora(dtype="model"))
    assert note_of(faster, **b) is not None
    ratio = replace(faster, optimizer=replace(faster.optimizer, lora_b_lr_ratio=16.0))
    assert note_of(ratio, **b) is None


@pytest.mark.parametrize("layout", ["single", "fsdp2", "zero2", "pp", "tp"])
def test_a_run_says_it_and_torch_leaves_these_weights(layout, folder, tmp_path):
    """Of the weights that are said not to move, none has after 3 steps; under every layout."""
    cfg = config(folder, str(tmp_path / "run"), layout, lora=False, steps=3, save_every=0)
    cfg = replace(cfg, model=replace(cfg.model, dtype="bfloat16"))
    cfg = replace(cfg, optimizer=replace(cfg.optimizer, lr=1e-5, warmup_steps=0, weight_decay=0.0))
    begin = replace(cfg, optimizer=replace(cfg.optimizer, lr=0.0))
    begin = replace(begin, training=replace(begin.training, output_dir=str(tmp_path / "begin")))
    run_ranks(PROCESSES[layout], run, cfg)
    run_ranks(1 if layout == "single" else PROCESSES[layout], run, begin)
    (note,) = record(cfg).notes
    assert record(begin).notes == []
    shares = [int(found) for found in re.findall(r"(\d+)%", note)]
    before, after = (in_files(tmp_path / name / "model") for name in ("begin", "run"))
    unmoved = [float((before[key] == after[key]).float().mean()) for key in before if "norm" in key]
    assert shares[1] == 100 * min(unmoved) == 100
    kept = sum(int((before[key] == after[key]).sum()) for key in before)
    assert kept / sum(map(torch.Tensor.numel, before.values())) >= shares[0] / 100 - 0.02
    assert shares[0] > 10
