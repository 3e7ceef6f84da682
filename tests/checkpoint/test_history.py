"""What `metrics.jsonl` tells of a run: what it costs to read, and what is no line of it."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import pytest

from shardwise.assembly.routing import STATISTICS
from shardwise.base.records.record import MetricsFile
from shardwise.checkpoint import history, index
from shardwise.checkpoint.history import ROUTING, read_history
from shardwise.checkpoint.index import DamagedError


def write(path: Path, num_steps: int, routed: bool = False) -> list[dict[str, float]]:
    """Write the lines of a run as a run does, and return them."""
    random.seed(0)
    lines = []
    with MetricsFile(path) as file:
        for step in range(1, num_steps + 1):
            line = {"step": step, "loss": random.random(), "grad_norm": random.random(), "lr": 0.1}
            line |= {"seconds": 0.5, "tokens": 64, "skipped_steps": step // 10}
            line |= {name: random.random() for name in ROUTING if routed}
            if step % 50 == 0:
                line["loss"] = line["grad_norm"] = random.choice([math.nan, math.inf, -math.inf])
            lines.append(line)
            file.write(**line)
            if step % 7 == 0:
                file.write(step=step, eval_loss=math.inf, eval_perplexity=2.5, eval_tokens=9)
                file.write(step=step, mine=2.0)
    return lines


@pytest.mark.parametrize("routed", [False, True])
def test_a_history_is_what_json_says(routed, tmp_path, monkeypatch):
    monkeypatch.setattr(history, "_PART_BYTES", 1000)  # several parts
    lines = write(tmp_path / "metrics.jsonl", 333, routed)
    read = read_history(tmp_path / "metrics.jsonl", str(routed))
    assert repr(read.losses.tolist()) == repr([line["loss"] for line in lines])  # nan is not nan
    assert repr(read.grad_norms.tolist()) == repr([line["grad_norm"] for line in lines])
    assert {name: values.tolist() for name, values in read.routing.items()} == {
        name: [line[name] for line in lines] for name in ROUTING if routed
    }
    assert read.skipped_steps == 33
    numbers = {"loss": math.inf, "perplexity": 2.5, "tokens": 9}
    assert read.evaluations == [{"step": step, **numbers} for step in range(7, 334, 7)]


def test_the_names_of_routing_are_those_that_a_run_writes():
    assert ROUTING == STATISTICS


def test_the_work_of_a_line_does_not_contain_making_its_checks(tmp_path, monkeypatch):
    """Calls are counted, which no machine changes: 10 checks of a part each, not one of a line."""
    calls, parse = [0], index.parse

    def counted(*args):
        calls[0] += 1
        return parse(*args)

    monkeypatch.setattr(history, "parse", counted)
    write(tmp_path / "metrics.jsonl", 5000)
    made = index._adapter.cache_info().misses
    read_history(tmp_path / "metrics.jsonl", "counted")
    assert calls[0] <= (tmp_path / "metrics.jsonl").stat().st_size / 2**15
    assert index._adapter.cache_info().misses <= made + 1


LINE = {"step": 1, "loss": 1.0, "grad_norm": 1.0, "skipped_steps": 0}


@pytest.mark.parametrize(
    "text",
    [
        *("[]", "3", "null", '"text"', "{", "{}", "x", "[" * 100_000),
        *('{"step": "1"}', '{"step": 1.5}', '{"step": true}', '{"step": 1}, {"step": 2}'),
        *(json.dumps({k: v for k, v in LINE.items() if k != key}) for key in LINE if key != "loss"),
        *(json.dumps(LINE | {key: "x"}) for key in LINE),
        *(json.dumps(LINE | {key: None}) for key in LINE),
        *('{"step": 1, "eval_loss": 1.0}', '{"step": 1, "resplit": 5}'),
        json.dumps(LINE | {ROUTING[1]: "x"}),
    ],
)
@pytest.mark.parametrize("before", [0, 3])
def test_what_is_no_line_of_a_run_is_damage(text, before, tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(LINE) + "\n" for _ in range(before)) + text + "\n")
    with pytest.raises(DamagedError, match="altered") as caught:
        read_history(path, f"{text[:50]} {before}")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600
