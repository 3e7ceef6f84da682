"""A fixed list of runs of tests.fuzz: every family, with odd sizes; and that a bug in the code
turns them red."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from shardwise.config import Parallel, RunConfig, UserError
from shardwise.models.families import FAMILIES
from tests.fuzz.draws import Draw, draw
from tests.fuzz.judge import judge
from tests.fuzz.report import report
from tests.left_out import some_now
from tests.parity import test_sensitivity, test_tensor_sensitivity

SEEDS = {
    2081: "falcon_h1 ddp lora 2p",
    5709: "gpt2 zero1 full 3p",
    685: "granitemoehybrid fsdp1 full 2p",
    22903: "jamba tp lora 2p",
    4439: "jet_nemotron fsdp2-tp full 4p",
    162: "kimi_linear hsdp lora 2p",
    5273: "lfm2 pp interleaved-1f1b lora 2p",
    3630: "llama tp-sp full 3p",
    1672: "nemotron_h tp lora 2p",
    212: "olmo2 ddp-tp-sp full 4p",
    20854: "olmo_hybrid pp-zero1 interleaved-zero-bubble lora 4p",
    466: "qwen3 hsdp lora 4p",
    213: "qwen3_5_text hsdp lora 2p",
    4535: "qwen3_moe fsdp1 lora 2p",
    6741: "qwen3_next pp-ddp zbv full 4p",
    12037: "qwen3_5_moe_text fsdp2 full 2p",
    22054: "lfm2_moe zero2 full 2p",
    31096: "granitemoe pp 1f1b lora 3p",
    41000: "mixtral zero1 lora 3p",
    51008: "bamba tp lora 2p",
    62061: "glm4_moe fsdp1 full 2p",
    71031: "deepseek_v3 tp full 2p",
    97004: "mistral hsdp lora 4p",
    82005: "qwen2 tp lora 2p",
    83055: "smollm3 pp-ddp looped-bfs lora 4p",
    84093: "olmo3 tp-sp lora 2p",
    85083: "exaone4 pp interleaved-1f1b full 2p",
    86006: "granite pp-ddp interleaved-1f1b full 4p",
    91087: "arcee tp full 2p",
    95015: "seed_oss tp-sp full 2p",
    140001: "ernie4_5 tp lora 3p",
    141006: "hunyuan_v1_dense tp-sp lora 2p",
    142009: "starcoder2 fsdp2 full 2p",
    143001: "glm4 tp lora 2p",
    144003: "gemma3_text tp-sp full 2p",
    145001: "phi3 tp-sp lora 3p",
    146001: "dots1 tp-sp lora 2p",
    148003: "glm4_moe_lite fsdp2-tp lora 4p",
    150001: "ministral3 hsdp full 2p",
    151007: "ernie4_5_moe tp lora 2p",
    152002: "afmoe pp gpipe lora 3p",
    153000: "cohere2 fsdp2 lora 2p",
    154000: "apertus pp-ddp interleaved-1f1b lora 6p",
    147007: "qwen2_moe pp-ddp interleaved-1f1b full 4p",
    150014: "gemma2 zero1-tp full 6p",
    155208: "gpt_oss tp-sp full 2p",
    156010: "granite_swa pp zbv lora 2p",
}
"""What each seed draws of a family: where the program draws otherwise, choose others."""


def drawn_by(seed: int, folder: Path) -> Draw:
    return draw(seed, folder, SEEDS[seed].split()[0])


@pytest.mark.parametrize("seed", some_now(SEEDS, [*SEEDS][::4]))
def test_fixed_runs_equal_one_process(seed, tmp_path):
    drawn = drawn_by(seed, tmp_path)
    assert drawn.id == f"seed {seed}: {SEEDS[seed]}"
    result = judge(drawn)
    assert result.status == "equal", result


def test_fixed_runs_cover_every_family():
    assert sorted(name.split()[0] for name in SEEDS.values()) == sorted(FAMILIES)


@pytest.mark.parametrize(
    ("bug", "seed", "reason"),
    [
        (test_sensitivity.missing_world_size_factor, 2081, "grad "),
        pytest.param(
            test_sensitivity.clip_by_the_local_norm,
            142009,
            "different losses or norms",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            test_tensor_sensitivity.tokens_of_the_first_rank_on_every_rank,
            3630,
            "grad ",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_planted_bug_is_caught(bug, seed, reason, tmp_path):
    drawn = drawn_by(seed, tmp_path)
    result = judge(drawn, bug)
    assert result.status == "failed"
    assert reason in result.reason
    text = report([(drawn, result)])
    assert f"FAILED seed {seed}" in text
    assert "1 drawn: 0 equal, 0 noise, 0 refused, 1 failed" in text


def test_refusals_are_told_apart(tmp_path, monkeypatch):
    """One process refuses too; the layout cannot be had; nothing explains why the layout alone is
    refused."""
    drawn = drawn_by(5709, tmp_path)
    isolated = replace(drawn.cfg, data=replace(drawn.cfg.data, packing="isolated"))
    tensor = replace(drawn.cfg, parallel=Parallel(data="zero2", tp=3))
    for cfg in (isolated, tensor):
        assert judge(replace(drawn, cfg=cfg)).status == "refused"

    def refuse_many(cfg: RunConfig, num_ranks: int) -> None:
        if num_ranks > 1:
            raise UserError("optimizer.lr is too small")

    monkeypatch.setattr("tests.fuzz.judge.describe", refuse_many)
    result = judge(drawn)
    assert (result.status, result.reason) == (
        "failed",
        "refused under the layout only: optimizer.lr is too small",
    )
