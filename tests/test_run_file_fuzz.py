"""Any value of any key of a run file: a RunConfig or one line with a way out, quickly."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardwise.config import RunConfig, UserError, keys
from shardwise.config.run_file import load_config, parse_config

KEYS = [(section, key) for section in keys.known_keys() for key in keys.known_keys(section)]
WAYS_OUT = (
    *("give", "set", "did you mean", "known ", "add it", "name "),
    *("leave", "write", "quote it", "correct it", "lower it", "use ", "is for", "see "),
)

extremes = st.sampled_from(
    [0, -1, 1, 2**31, 2**63, -(2**63), 10**30, math.nan, math.inf, -math.inf, 1e30, 1e-320]
)
words = st.sampled_from(
    [
        "",
        " ",
        "auto",
        "none",
        "full",
        "fsdp2",
        "chat",
        "latest",
        "a\0b",
        "\ud800",
        "𝕏é‮",
        "x" * 10_000,
        "1e30",
        "true",
    ]
)
scalars = (
    st.none()
    | st.booleans()
    | st.integers(-3, 3)
    | st.floats()
    | extremes
    | words
    | st.binary(max_size=3)
)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(scalars, inner, max_size=2)
        | st.tuples(inner, inner)
    ),
    max_leaves=5,
)


def base() -> dict[str, Any]:
    return {
        "model": {"path": "a"},
        "data": {"train": "a"},
        "training": {"output_dir": "a"},
        "lora": {},
    }


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


def check(answer: Callable[[], RunConfig]) -> None:
    """Call `answer`, which gives a RunConfig or one short line with a way out."""
    begin, line = time.process_time(), ""
    try:
        assert isinstance(answer(), RunConfig)
    except UserError as error:
        line = str(error)
    assert time.process_time() - begin < 5  # seconds of CPU: a hundred times what the slowest takes
    assert len(line.splitlines()) <= 1
    assert len(line) < 1000
    assert not line or any(way_out in line for way_out in WAYS_OUT), line


@given(st.data())
@settings(
    deadline=None, max_examples=600, derandomize=True, suppress_health_check=list(HealthCheck)
)
def test_any_values_of_any_keys(data):
    run = base()
    for section, key in data.draw(st.lists(st.sampled_from(KEYS), min_size=1, max_size=3)):
        run[section] = (
            {**run[section], key: data.draw(values)} if section in run else {key: data.draw(values)}
        )
    check(lambda: parse_config(run))


def test_what_breaks_a_parser_in_each_key():
    breaking = (
        nested(900),
        [nested(5)] * 500,
        {"a": nested(100)},
        16**5000,
        -(16**5000),
        "x" * 10_000,
        [math.nan] * 99,
    )
    for section, key in KEYS:
        for value in breaking:
            run = {**base(), section: {**base().get(section, {}), key: value}}
            check(lambda run=run: parse_config(run))


@given(section=st.sampled_from(keys.known_keys()) | words, value=values)
@settings(deadline=None, max_examples=150, derandomize=True)
def test_any_value_of_a_section(section, value):
    check(lambda: parse_config({**base(), section: value}))
    check(lambda: parse_config({section: value}))


@given(
    key=st.sampled_from([f"{s}.{k}" for s, k in KEYS]) | st.text(max_size=8),
    text=st.text(max_size=20) | values.map(repr),
)
@settings(
    deadline=None, max_examples=150, derandomize=True, suppress_health_check=list(HealthCheck)
)
def test_any_override(tmp_path_factory, key, text):
    path = tmp_path_factory.getbasetemp() / "run.yaml"
    path.write_text(json.dumps(base()))
    check(lambda: load_config(path, [f"--{key}={text}"]))


@given(
    st.binary(max_size=60)
    | st.text(max_size=60).map(lambda text: text.encode("utf-8", "surrogatepass"))
)
@settings(
    deadline=None, max_examples=150, derandomize=True, suppress_health_check=list(HealthCheck)
)
def test_any_file(tmp_path_factory, content):
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    path.write_bytes(content)
    check(lambda: load_config(path))
