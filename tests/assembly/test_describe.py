"""A run is described before any rank starts, and the launcher, `split` and `build` refuse alike."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from shardwise.assembly.describe import describe
from tests.assembly.test_costs import tiny
from tests.test_rules import refusal, refusal_by_description, run_of

LORA = {"r": 4}
WITHOUT_A_RULE: list[tuple[str, dict[str, dict[str, Any]], str]] = [
    ("llama", {"training": {"loss": "triton"}}, "training.loss is triton, but "),
    ("llama", {"lora": {"r": 4, "kernel": "triton"}}, "lora.kernel is triton, but "),
    ("llama", {"lora": {"r": 4, "targets": ["nonesuch"]}}, "nonesuch is no linear of this llama"),
    (
        "llama",
        {"lora": {"r": 4, "modules_to_save": ["nonesuch"]}},
        "no module nonesuch in this llama",
    ),
]
"""Runs that are refused: name of the tiny model, sections, part of the message."""


@pytest.mark.parametrize(
    ("model", "sections", "part"), WITHOUT_A_RULE, ids=[part for *_, part in WITHOUT_A_RULE]
)
def test_names_and_devices_are_checked_before_a_rank_starts(model, sections, part):
    for parallel in ({}, {"pp": 2}):
        cfg = run_of(tiny(model), {**sections, "parallel": parallel})
        assert part in (refusal(cfg, cfg.parallel.pp) or "")


def test_too_many_stages_are_told_before_their_micro_batches():
    cfg = run_of(tiny("llama"), {"parallel": {"pp": 9}})
    problem = "9 pipeline stages .* are more than the model's 4 layers; lower parallel.pp$"
    assert re.search(problem, refusal_by_description(cfg, 9) or "")
    cfg = run_of(tiny("llama"), {"parallel": {"pp": 4}})
    cfg = replace(cfg, training=replace(cfg.training, micro_batch_size=8))
    assert "1f1b on 4 ranks needs 4 micro-batches" in (refusal_by_description(cfg, 4) or "")


def test_a_run_that_may_begin_is_described_and_takes_no_memory():
    cfg = run_of(tiny("qwen3_moe"), {"lora": LORA, "parallel": {"data": "fsdp2", "pp": 2}})
    description = describe(cfg, 4)
    assert description.sizes == {"pp": 2, "dp_replicate": 1, "dp_shard": 2, "cp": 1, "tp": 1}
    assert {p.device.type for p in description.hf.parameters()} == {"meta"}
    assert description.coverage is not None
    assert description.kernels == {"loss": "chunked", "experts": "loop", "lora": "torch"}
    assert description.pipeline is not None
    assert description.pipeline.num_microbatches == 8


@pytest.mark.parametrize(
    ("data", "num_ranks", "num_gpus", "part"),
    [
        ("single", 1, 4, "one of 4 GPUs is used; --nproc 4 uses all"),
        ("fsdp2", 1, 4, "one of 4 GPUs is used; --nproc 4 uses all"),
        ("fsdp2", 1, 1, "parallel.data is fsdp2, but one process splits nothing; --nproc N"),
        ("single", 1, 1, None),
        ("fsdp2", 4, 4, None),
        ("fsdp2", 2, 4, None),
    ],
)
def test_one_process_says_what_it_leaves_unused(data, num_ranks, num_gpus, part, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    sections = {"parallel": {"data": data}, "training": {"device": "auto"}}
    notes = describe(run_of(tiny("llama"), sections), num_ranks).notes
    assert len(notes) == (part is not None)
    assert (part or "") in "".join(notes)


@pytest.mark.parametrize(
    ("family", "way", "kernels"),
    [
        ("jet_nemotron", "auto", {"attention": "ulysses", "dynamic convolution": "torch"}),
        ("qwen3_moe", "ring", {"attention": "ring"}),
        ("llama", "gather", {"attention": "gather"}),
    ],
)
def test_what_computes_attention_and_convolutions_under_cp(family, way, kernels):
    sections = {"parallel": {"cp": 2, "cp_attention": way}}
    assert kernels.items() <= describe(run_of(tiny(family), sections), 2).kernels.items()
    assert "attention" not in describe(run_of(tiny(family), {}), 1).kernels


@pytest.mark.parametrize(
    ("init", "lora", "is_told"),
    [("random", LORA, True), ("weights", LORA, False), ("random", None, False)],
)
def test_an_adapter_of_a_base_that_is_saved_nowhere_says_so(init, lora, is_told):
    cfg = run_of(tiny("llama"), {"lora": lora} if lora else {})
    cfg = replace(cfg, model=replace(cfg.model, init=init))
    notes = "\n".join(describe(cfg, 1).notes)
    assert ("saved nowhere: the adapter fits nothing else" in notes) == is_told
