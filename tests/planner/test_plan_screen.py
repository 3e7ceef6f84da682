"""A plan's answer on one screen: its keys are its layout, and its bars what the parts are."""

from __future__ import annotations

import io
import re
from dataclasses import replace

import pytest
from rich.console import Console

from shardwise.commands.command import show
from shardwise.lab.planner.choices import written
from shardwise.lab.planner.plan_screen import FREE, MARKS, WIDTH, bar, keys_of, screen
from shardwise.lab.planner.search import search
from tests.planner.test_search import question

ASKED = [
    ("qwen3_5-0.8b", "2xRTX4090"),
    ("qwen3_5-9b", "1xRTX4090", 1, 512),
    pytest.param(("llama-3.1-70b", "8xH100-80GB", 1, 128), marks=pytest.mark.slow),
]


@pytest.mark.parametrize("asked", ASKED, ids=str)
def test_an_answer_is_one_screen_and_its_keys_are_its_layout(asked):
    answer = search(question(*asked))
    console = Console(file=io.StringIO(), width=100)
    show(console, screen(answer))
    lines = console.file.getvalue().splitlines()
    assert len(lines) <= 36
    best = answer.best
    for text in (best.title, "tokens/s", "MFU", " instead "):
        assert any(text in line for line in lines), text
    # The layout that its keys alone say is the one that was computed.
    cfg, changed = answer.question.cfg, {"parallel": {}, "training": {}}
    for key, value in keys_of(best).items():
        section, _, name = key.partition(".")
        changed[section][name] = value
    said = replace(
        cfg,
        parallel=replace(cfg.parallel, **changed["parallel"]),
        training=replace(cfg.training, **changed["training"]),
    )
    assert said.parallel == best.cfg.parallel
    chosen = best.cfg.training
    assert said.training.micro_batch_size == chosen.micro_batch_size
    assert said.training.checkpointing == written(chosen.checkpointing)


def test_alternatives_fit_and_are_not_the_answer():
    answer = search(question("qwen3_5-0.8b", "2xRTX4090"))
    (table,) = [part for part in screen(answer) if not isinstance(part, str)]
    names = [row[0] for row in table.rows]
    assert 1 <= len(names) == len(set(names)) <= 3
    assert answer.best.title not in names
    assert not any("does not fit" in row[-1] for row in table.rows)


@pytest.mark.parametrize(
    ("parts", "drawn", "said"),
    [
        ({"a": 50.0, "b": 25.0}, {"█": 20, "▓": 10, FREE: 10}, "█ a 50  ▓ b 25"),
        ({"a": 0.0, "b": 100.0}, {"█": 40}, "█ b 100"),
        # The least of five are drawn together.
        (
            {"a": 40.0, "b": 20.0, "c": 10.0, "d": 5.0, "e": 5.0},
            {"█": 16, "▓": 8, "▒": 4, "░": 4, FREE: 8},
            "█ a 40  ▓ b 20  ▒ c 10  ░ others 10",
        ),
        ({"a": 150.0}, {"█": 40}, "█ a 150"),  # more than the whole ends where the whole does
    ],
    ids=str,
)
def test_a_bar_is_as_long_as_its_parts(parts, drawn, said):
    first, second = bar("name", parts, 100.0, "all", lambda value: f"{value:.0f}")
    assert {mark: first.count(mark) for mark in (*MARKS, FREE) if mark in first} == drawn
    assert re.search(f"[{MARKS}{FREE}]{{{WIDTH}}}  all$", first)
    assert second.strip() == said
