"""A step that cannot end within the run's own time-out is refused before weights are loaded."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from shardwise.assembly import step_time
from shardwise.assembly.build import build
from shardwise.metrics.hardware import PeakFlops
from shardwise.parallel.mesh import build_mesh
from tests.distributed import run_ranks
from tests.parity.harness import CONFIGS, Cell, run_config

RATE = 1e12


def flops_of_step(length: int, rows: int) -> float:
    """6 FLOPs per token and weight that is multiplied, and those of causal attention: a token meets
    (T + 1) / 2 others on average, by two products of 2 D FLOPs per head, and twice that back."""
    config = AutoConfig.from_pretrained(str(CONFIGS / "tiny-llama"))
    model = AutoModelForCausalLM.from_config(config)
    looked_up = model.get_input_embeddings().weight.numel()
    norms = sum(p.numel() for n, p in model.named_parameters() if "norm" in n)
    tied = looked_up if config.tie_word_embeddings else 0
    weights = sum(p.numel() for p in model.parameters()) - looked_up - norms + tied
    heads = config.num_attention_heads * config.head_dim
    attention = 3 * 2 * heads * (length + 1) * config.num_hidden_layers
    return (6 * weights + attention) * length * rows


def _build(seconds: float, packing: str) -> None:
    cfg = run_config(Cell("llama", "single", "full"))
    data = replace(cfg.data, sequence_length=4096, packing=packing)
    launch = replace(cfg.launch, timeout_seconds=seconds)
    cfg = replace(cfg, data=data, launch=launch)
    build(cfg, build_mesh(cfg, torch.device("cpu")))


@pytest.mark.parametrize(("packing", "is_counted"), [("concat", True), ("isolated", False)])
def test_a_step_is_refused_from_the_time_on_that_it_takes_at_the_peak(
    packing, is_counted, monkeypatch
):
    monkeypatch.setattr(step_time, "peak_of", lambda cfg, device: PeakFlops(RATE, ""))
    monkeypatch.setitem(step_time.SLOW, "cpu", 0.0)
    rows = run_config(Cell("llama", "single", "full")).training.global_batch_size
    least = flops_of_step(4096, rows) / (4 * RATE)
    run_ranks(1, _build, least * 1.001, packing)
    if is_counted:
        message = f"a step of {rows} rows of 4,096 tokens has .*timeout_seconds ends it after"
        with pytest.raises(RuntimeError, match=message):
            run_ranks(1, _build, least * 0.999, packing)
    else:  # nobody knows where documents end: what attention needs is not held against it
        run_ranks(1, _build, least * 0.999, packing)
