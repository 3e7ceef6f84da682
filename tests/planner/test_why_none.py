"""Why no division of the devices is allowed: each cause that is named is one."""

from __future__ import annotations

import re
from functools import cache
from itertools import product
from typing import Any

import pytest

from shardwise.commands.plan_request import wanted_layout
from shardwise.config import Data, Model, Parallel, RunConfig, Training, UserError
from shardwise.config.presets import MODELS
from shardwise.lab.planner.candidates import Question, Space, Subject, subject_of
from shardwise.lab.planner.cluster import cluster_of
from shardwise.lab.planner.why_none import refuse

KEYS: list[dict[str, Any]] = [
    *({}, {"pp": 2}, {"tp": 2}, {"cp": 2}, {"ep": 2}, {"ep": 8}, {"tp": 3}, {"pp": 8}, {"cp": 8}),
    *({"pp": 2, "tp": 2}, {"pp": 2, "tp": 4}, {"pp": 4, "tp": 2}, {"pp": 2, "cp": 4}),
    *({"ep": 8, "pp": 2}, {"dp_replicate": 2}, {"dp_replicate": 8}, {"dp_replicate": 4, "tp": 4}),
]
DATA = ("ddp", "zero1", "zero2", "fsdp1", "fsdp2", "single", None)


def question(model: str, rows: int, explain: str | None = None, **keys: Any) -> Question:
    """Return the question for a layout of eight devices with these keys of `parallel`."""
    keys = {key: value for key, value in keys.items() if value is not None}
    training = Training("any", global_batch_size=rows)
    data = Data("any", sequence_length=64)
    cfg = RunConfig(Model(str(MODELS / model)), data, training, parallel=Parallel(**keys))
    fixed = frozenset(f"parallel.{key}" for key in keys)
    wanted = wanted_layout(explain) if explain else None
    return Question(cfg, cluster_of("8xH100-80GB"), fixed, wanted)


@cache
def subject(model: str) -> Subject:
    return subject_of(question(model, 8))


def space(asked: Question, model: str) -> Space:
    return Space(asked, subject(model))


def reason(model: str, rows: int, explain: str | None = None, **keys: Any) -> str:
    """Return why no division is allowed; "" where one is."""
    try:
        asked = space(question(model, rows, explain, **keys), model)
        if not any(asked.divisions()):
            refuse(asked)
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("model", "data"), [*product(("tiny-llama", "tiny-qwen3_moe"), DATA)])
def test_rows_are_the_reason_where_others_are_allowed_and_only_there(model, data):
    for keys, rows in product(KEYS, (64, 7)):
        said = reason(model, rows, data=data, **keys)
        assert "has all of" not in said, f"{keys}: {said}"
        with_rows_for_all = any(space(question(model, 8, data=data, **keys), model).divisions())
        assert ("rows" in said) == (with_rows_for_all and bool(said)), f"{keys}: {said}"
        if "rows" in said:
            least = int(re.findall(r"multiple of (\d+)", said)[0])
            assert reason(model, least, data=data, **keys) == ""


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"data": "zero2", "pp": 2, "cp": 4}, "pp-zero2-cp is not offered: zero2 reduces"),
        ({"data": "zero1", "pp": 4, "tp": 2}, "8 devices have one beside pp:4 beside tp:2"),
        ({"data": "zero1", "dp_replicate": 2}, "which is for parallel.data fsdp2"),
        ({"dp_replicate": 8}, "dp_replicate 8 does not divide the 8 data-parallel"),
        ({"ep": 8, "pp": 2}, "ep:8 does not divide the 4 ranks"),
        ({"explain": "pp-fsdp1"}, "pp-fsdp1 is not offered: fsdp1 is not proven in a pipeline"),
        ({"explain": "pp:4-zero1-tp:2"}, "zero1 needs several data-parallel devices"),
        ({"explain": "zero1:8-cp"}, "zero1-cp needs several devices for each axis"),
        ({"explain": "fsdp1"}, "add --parallel.data=fsdp1"),
        ({"explain": "tp-sp", "tp": 4}, "needs 4 devices, and --devices and --nodes give 8"),
    ],
)
def test_the_rule_that_refuses_is_named(keys, said):
    assert said in reason("tiny-qwen3_moe", 64, **keys)


def test_what_is_asked_for_as_it_is_said_is_answered():
    assert reason("tiny-qwen3_moe", 64, "fsdp1", data="fsdp1") == ""
