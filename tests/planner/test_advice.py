"""The first answer is an engineer's: plain, with room where that costs little, and a stored base
where memory asks for one."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from shardwise.lab.planner.search import search
from shardwise.lab.planner.ties import TIE, has_room, intricacy
from tests.planner.test_search import question

PLAIN = r"micro-batch \d+(, recompute (full|operators))?"
ON_THE_DEVICE = r"(?!.*offload).*"
slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("asked", "base", "layout", "details", "faster_base"),
    [
        (("qwen3_5-9b", "1xRTX4090", 1, 512), "none", "single", ON_THE_DEVICE, "nf4"),
        # Cards whose messages go by way of the host: stages send least.
        (("qwen3_5-9b", "2xRTX3090", 1, 512), "none", "pp:2", rf"1f1b, {PLAIN}", None),
        (("qwen3_5-9b", "1xH100-80GB", 1, 32, True, 32_768), "none", "single", ON_THE_DEVICE, None),
        pytest.param(
            *(("qwen3_5-9b", "2xRTX4090", 1, 256, True, 4_096), "none", r"\w+:2"),
            *(ON_THE_DEVICE, None),
            marks=slow,
        ),
        # FSDP with QLoRA; more than the weights has to leave the cards.
        pytest.param(
            ("llama-3.1-70b", "2xRTX4090", 1, 512), "nf4", "fsdp2:2", r".*", None, marks=slow
        ),
        pytest.param(
            *(("llama-3.1-70b", "2xRTX4090", 1, 512), "none", "fsdp2:2"),
            *(r"micro-batch 4, recompute full, offload all", "nf4"),
            marks=slow,
        ),
        pytest.param(
            *(("qwen3-next-80b-a3b", "8xH100-80GB", 1, 128, True, 8_192), "none", "fsdp2:8"),
            *(ON_THE_DEVICE, None),
            marks=slow,
        ),
        pytest.param(
            *(("nemotron-3-nano-30b-a3b", "8xH100-80GB", 2, 128, False, 8_192), "none"),
            *("fsdp2:16", PLAIN, None),
            marks=slow,
        ),
        # A row for each device: ranks of cp would have a slower kernel of attention.
        pytest.param(
            *(("qwen3_5-9b", "8xH100-80GB", 1, 8, True, 131_072), "none", "fsdp2:8", PLAIN, None),
            marks=slow,
        ),
        pytest.param(
            *(("kimi-linear-48b-a3b", "4xH100-80GB", 1, 128, True, 8_192), "none", r"\w+:4"),
            *(ON_THE_DEVICE, None),
            marks=slow,
        ),
        pytest.param(
            ("kimi-linear-48b-a3b", "1xH200", 1, 256, True, 4_096),
            *("none", "single", PLAIN, None),
            marks=slow,
        ),
        pytest.param(
            ("llama-3.1-8b", "8xH100-80GB", 1, 128, False, 8_192),
            *("none", "fsdp2:8", ON_THE_DEVICE, None),
            marks=slow,
        ),
        pytest.param(
            ("llama-3.1-8b", "8xRTX4090", 1, 16),
            "none",
            r"[\w:]+-[\w:]+",
            ON_THE_DEVICE,
            None,
            marks=slow,
        ),
    ],
)
def test_the_first_answer_is_an_engineers(asked, base, layout, details, faster_base):
    plan = question(*asked)
    model = replace(plan.cfg.model, base=base)
    answer = search(replace(plan, cfg=replace(plan.cfg, model=model)))
    best, fastest = answer.best, answer.fastest
    assert re.fullmatch(layout, best.title)
    assert re.fullmatch(details, best.details)
    assert best.time.total <= TIE * fastest.time.total
    assert [*answer.faster_bases] == ([] if faster_base is None else [faster_base])
    # Room is left, or nothing that is as fast and as simple leaves it.
    tied = [c for c in answer.computed if c.fits and c.time.total <= TIE * fastest.time.total]
    least = min(intricacy(choice, plan) for choice in tied)
    assert intricacy(best, plan) == least
    assert has_room(best, plan) or least[1]
