"""Random questions to the planner: each has an answer of sound numbers, or one line."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from shardwise.config import Data, Lora, Model, RunConfig, Training, UserError
from shardwise.config.presets import MODELS
from shardwise.lab.planner import cluster
from shardwise.lab.planner.candidates import Question
from shardwise.lab.planner.cluster import cluster_of
from shardwise.lab.planner.exact import Choice
from shardwise.lab.planner.plan_page import as_data, overview
from shardwise.lab.planner.plan_screen import screen
from shardwise.lab.planner.search import Answer, search

DRAWS, MORE = 8, 1.3
DEVICES = sorted(
    yaml.safe_load(Path(cluster.__file__).with_name("devices.yaml").read_text())["devices"]
)
SMALL = sorted(folder.name for folder in MODELS.iterdir() if folder.name.startswith("tiny-"))


def drawn(seed: int) -> tuple[RunConfig, tuple[str, int]]:
    """Return a run and its devices, drawn from what a user may ask."""
    draw = random.Random(seed)
    lora = Lora(r=draw.choice((1, 8, 64))) if draw.random() < 0.6 else None
    dtype = draw.choice(("float32", "bfloat16"))
    base = draw.choice(("none", "none", "none", "int8", "nf4")) if lora else "none"
    cfg = RunConfig(
        Model(str(MODELS / draw.choice(SMALL)), dtype=dtype, base=base),
        Data("any", sequence_length=64 * 2 ** draw.randrange(12)),
        Training(
            "any",
            global_batch_size=2 ** draw.randrange(8),
            precision=draw.choice(("float32", "bfloat16")),
            loss=draw.choice(("auto", "auto", "plain")),
        ),
        lora=lora,
    )
    count = draw.choice((1, 2, 3, 4, 8))
    return cfg, (f"{count}x{draw.choice(DEVICES)}", draw.choice((1, 1, 2)))


def check(choice: Choice) -> None:
    """Check the numbers of a choice: finite, none below 0, and parts that make the whole."""
    memory = {k: v for k, v in choice.memory._asdict().items() if isinstance(v, int)}
    assert min(memory.values()) >= 0
    time = vars(choice.time)
    assert all(math.isfinite(value) and value >= 0 for value in time.values())
    assert choice.time.total > 0
    assert 0 <= choice.mfu < 1
    assert math.isfinite(choice.tokens_per_second)


def answer_to(question: Question) -> Answer | None:
    """Return the answer, of which every number has been checked; None where there is one line."""
    try:
        answer = search(question)
    except UserError as error:
        if "\n" in str(error):
            raise
        return None
    for choice in answer.computed:
        check(choice)
    as_data(answer)
    list(overview(answer))
    if answer.choices:
        list(screen(answer))
    return answer


@pytest.mark.parametrize("seed", range(DRAWS))
def test_a_random_question_has_sound_numbers_and_more_memory_never_costs_time(seed):
    cfg, (name, nodes) = drawn(seed)
    asked = cluster_of(name, nodes, None)
    if seed % 2:  # memory that binds a tiny model: little beside CUDA's context
        memory_bytes = int(random.Random(seed).uniform(1.25, 3) * 2**30)
        asked = replace(asked, device=replace(asked.device, memory_bytes=memory_bytes))
    answer = answer_to(Question(cfg, asked))
    if answer is None or not answer.choices:
        return
    larger = replace(asked.device, memory_bytes=int(MORE * asked.device.memory_bytes))
    richer = answer_to(Question(cfg, replace(asked, device=larger)))
    assert richer is not None
    assert richer.fastest.time.total <= 1.001 * answer.fastest.time.total
