"""What `shardwise plan` says of a choice is true of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwise.base.words import size
from shardwise.config import Parallel
from shardwise.lab.planner.exact import explain
from shardwise.lab.planner.plan_page import arithmetic, why_not_fitting
from tests.planner.test_search import question, small


def test_a_tied_weight_counts_once_in_the_arithmetic():
    asked = question("tiny-qwen3_5-tied", "1xRTX4090", lora=False)
    choice, subject = explain(asked)
    line = next(arithmetic(choice, asked, subject))
    assert choice.memory.weights == subject.weight_bytes
    assert f"are {size(choice.memory.weights)};" in line


@pytest.mark.parametrize(
    ("is_resharded", "parts", "words"),
    [
        (True, {"buffers": 2**30}, "; the layers that are gathered at once do not fit, however"),
        (False, {"buffers": 2**30}, "; gathered weights that stay do not fit, however"),
        (
            True,
            {"buffers": 2**29 + 1, "activations": 2**29, "temporary": 2**20},
            "; the layers that are gathered at once and one micro-batch's activations together do "
            "not fit, however",
        ),
    ],
)
def test_the_parts_that_do_not_fit_are_named(is_resharded, parts, words):
    """A part by itself only if it is larger than the memory that may be used."""
    asked = question("tiny-llama", "2xRTX4090", lora=False, rows=2, length=16)
    parallel = Parallel(data="fsdp2", reshard_after_forward=is_resharded)
    device = replace(asked.cluster.device, memory_bytes=2**30)
    asked = replace(
        asked,
        cfg=replace(asked.cfg, parallel=parallel),
        cluster=replace(asked.cluster, device=device),
    )
    choice, _ = explain(asked)
    memory = choice.memory._replace(**dict.fromkeys(("overhead", "temporary", "activations"), 0))
    choice = replace(choice, stages={0: memory._replace(**parts)})
    assert words in why_not_fitting(choice, asked)


def test_another_layout_is_shown_at_its_best():
    answer = small()
    for name, choice in answer.simpler.items():
        of_name = [c for c in answer.computed if c.fits and c.title == choice.title]
        fastest = min((c.time.total for c in of_name), default=choice.time.total)
        assert choice.time.total <= 1.005 * fastest, name
