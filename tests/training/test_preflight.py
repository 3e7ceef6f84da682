"""One check of a run for the launcher, `shardwise split` and `build`: the same refusals, in the same words."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardwise.config import RunConfig, UserError
from shardwise.parallel.mesh import mesh_sizes
from shardwise.run_file import parse_config
from shardwise.training import preflight
from shardwise.training.build import build
from shardwise.training.split_view import plan
from tests.parallel.test_pipeline_parallel import REFUSED as PIPELINES
from tests.training.test_split import tiny

LORA = {"r": 4}
EXPERTS = {"r": 4, "targets": ["experts"]}
BFLOAT16 = {"dtype": "bfloat16"}
FLOAT32_SUMS = {"accumulation": "float32"}
IN_A_PIPELINE: list[tuple[str, dict[str, dict[str, Any]], str]] = [
    ("llama", {"model": {"router_aux_loss_coef": 0.01}}, "router_aux_loss_coef is 0.01, but llama has no router"),
    ("llama", {"training": {"compile": "inductor", "checkpointing": "operators"}}, "checkpointing operators chooses"),
    ("llama", {"training": {"checkpointing": ["mamba2"]}}, "names mamba2, but this model's layers"),
    ("llama", {"training": {"loss": "triton"}}, "training.loss is triton, but "),
    ("llama", {"lora": {"r": 4, "kernel": "triton"}}, "lora.kernel is triton, but "),
    ("llama", {"lora": {"r": 4, "targets": ["nonesuch"]}}, "nonesuch is no linear of this llama"),
    ("llama", {"lora": {"r": 4, "modules_to_save": ["nonesuch"]}}, "no module nonesuch in this llama"),
    ("gpt2", {"data": {"sequence_length": 4096}}, "has learned only 1024 positions"),
    ("gpt2", {"data": {"packing": "isolated"}}, "gpt2 adds positions before its first layer"),
    ("qwen3_moe", {"lora": {**EXPERTS, "kernel": "torch"}}, "lora.kernel is torch, but no adapter here"),
    ("qwen3_moe", {"lora": {**EXPERTS, "dropout": 0.1}}, "the adapters on routed experts have no input to drop from"),
    ("llama", {"parallel": {"tp": 3}}, "which cannot be dealt out evenly"),
    ("llama", {"parallel": {"split": [1, 2]}}, "does not cover the model; give 2 numbers"),
    ("llama", {"parallel": {"pp": 5}}, "5 pipeline stages (5 ranks x 1) are more than the model's 4 layers"),
    ("llama", {"model": BFLOAT16, "training": {"precision": "float16"}}, "change their dtype on the way"),
    ("llama", {"training": {"global_batch_size": 1}}, "1f1b on 2 ranks needs 2 micro-batches or more, not 1"),
]
"""Refused with pp = 2 too: name of the tiny model, sections of the run file, a part of what is said."""
ELSEWHERE: list[tuple[str, dict[str, dict[str, Any]], int, str]] = [
    ("llama", {"parallel": {"data": "single"}}, 2, "parallel.data is single but there are 2 processes"),
    ("llama", {"parallel": {"data": "ddp"}}, 3, "global_batch_size 16 is not a multiple of 3"),
    ("llama", {"parallel": {"data": "fsdp1"}}, 1, "fsdp1 but there is one process"),
    ("qwen3_moe", {"parallel": {"data": "fsdp1"}, "lora": EXPERTS}, 2, "leave the experts out of lora.targets"),
    (
        "llama",
        {"parallel": {"data": "fsdp1", "fsdp1_wrap": "naive"}, "lora": LORA, "model": BFLOAT16},
        2,
        "set lora.dtype to model, or parallel.fsdp1_wrap to separate",
    ),
    ("llama", {"parallel": {"data": "fsdp1"}, "model": BFLOAT16, "training": FLOAT32_SUMS}, 2, "fsdp1 keeps the"),
    ("llama", {"parallel": {"tp": 2}, "model": BFLOAT16, "training": FLOAT32_SUMS}, 2, "with tensor parallelism the"),
    (
        "llama",
        {"parallel": {"tp": 2}, "lora": {"r": 4, "targets": ["o_proj"], "modules_to_save": ["layers.0"]}},
        2,
        "holds whole layers",
    ),
    ("llama", {"parallel": {"data": "fsdp1", "tp": 2}}, 2, "fsdp1-tp is not offered"),
]
"""And such as have no pipeline, on so many ranks."""


def run(model: str, sections: dict[str, dict[str, Any]]) -> RunConfig:
    usual = {
        "model": {"path": tiny(model), "init": "random"},
        "data": {"train": "unused", "sequence_length": 32},
        "training": {"output_dir": "unused", "device": "cpu", "global_batch_size": 16},
    }
    return parse_config({name: usual.get(name, {}) | sections.get(name, {}) for name in {**usual, **sections}})


def in_a_pipeline(model: str, sections: dict[str, dict[str, Any]]) -> RunConfig:
    return run(model, {**sections, "parallel": {"pp": 2, **sections.get("parallel", {})}})


def refusals(cfg: RunConfig, num_ranks: int) -> set[str]:
    """What the check and `build` say of a run, without a process group."""
    mesh: Any = SimpleNamespace(dense=SimpleNamespace(size=lambda: num_ranks), device=torch.device("cpu"))
    said = set()
    for ask in (lambda: preflight.check(cfg, num_ranks), lambda: build(cfg, mesh)):
        with pytest.raises(UserError) as error:
            ask()
        said.add(str(error.value))
    assert not dist.is_initialized()
    return said


@pytest.mark.parametrize(("model", "sections", "told"), IN_A_PIPELINE, ids=[told for *_, told in IN_A_PIPELINE])
def test_split_refuses_what_a_run_refuses_in_the_same_words(model, sections, told):
    cfg = in_a_pipeline(model, sections)
    num_ranks = cfg.parallel.pp * cfg.parallel.tp
    with pytest.raises(UserError) as error:
        plan(cfg)
    assert told in str(error.value)
    assert refusals(cfg, num_ranks) == {str(error.value)}


NEEDS_COSTS = ("a limit no split meets", "a limit that uniform breaks")
"""Known once rank 0 has looked up what the units cost."""


@pytest.mark.parametrize("name", [name for name in PIPELINES if name not in NEEDS_COSTS])
def test_split_refuses_the_pipelines_that_build_refuses(name):
    cfg, _ = PIPELINES[name]
    num_ranks = cfg.parallel.pp * cfg.parallel.tp
    with pytest.raises(UserError) as error:
        plan(cfg, num_ranks)
    assert refusals(cfg, num_ranks) == {str(error.value)}


@pytest.mark.parametrize(("model", "sections", "num_ranks", "told"), ELSEWHERE, ids=[told for *_, told in ELSEWHERE])
def test_a_run_without_a_pipeline_is_refused_before_a_rank_starts(model, sections, num_ranks, told):
    cfg = run(model, sections)
    try:  # a rank cannot have a mesh of another size than the check's
        mesh_sizes(cfg, num_ranks)
        (said,) = refusals(cfg, num_ranks)
    except UserError as error:
        said = str(error)
        with pytest.raises(UserError) as again:
            preflight.check(cfg, num_ranks)
        assert str(again.value) == said
    assert told in said


def test_a_run_that_may_begin_has_its_facts_and_no_memory():
    facts = preflight.check(in_a_pipeline("qwen3_moe", {"lora": LORA, "parallel": {"data": "fsdp2"}}), 4)
    assert facts.sizes == {"pp": 2, "dp_replicate": 1, "dp_shard": 2, "cp": 1, "tp": 1}
    assert {p.device.type for p in facts.hf.parameters()} == {"meta"}
    assert facts.coverage is not None
    assert facts.has_plain_adapters
    assert facts.pipeline is not None
    assert facts.pipeline.num_microbatches == 8


def test_attention_dropout_is_known_before_a_rank_starts(tmp_path):
    config = json.loads(Path(tiny("llama"), "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "attention_dropout": 0.1}))
    cfg = run("llama", {})
    cfg = dataclasses.replace(cfg, model=dataclasses.replace(cfg.model, path=str(tmp_path)))
    with pytest.raises(UserError, match=r"attention_dropout is 0\.1 .* set it to 0\.0"):
        preflight.check(cfg, 1)
