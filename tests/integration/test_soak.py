"""A soak notices what grows, what is not pruned, and a curve that is another."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.integration import soak, soak_outcome

STEPS = 500
HELD = {"file_handles": 9, "threads": 3, "children": 2}
RANK = HELD | {"tensor_bytes": 4096, "children": 0}


def write_side(
    folder: Path, side: str, change: dict[str, Any], slope: float, number: int = 5
) -> None:
    """A run of one rank, as it leaves its folder; `change` is what its last sample says."""
    run = folder / side / "run"
    (run / "adapter").mkdir(parents=True)
    (folder / side / "tmp").mkdir()
    (run / "adapter" / "adapter_model.safetensors").write_bytes(b"weights")
    rows = [json.dumps({"step": step, "loss": 1 / step}) for step in range(1, STEPS + 1)]
    (run / "metrics.jsonl").write_text("\n".join([*rows, ""]))
    samples = []
    for step in range(soak_outcome.SAVE_EVERY, STEPS + 1, soak_outcome.SAVE_EVERY):
        size = int(1e8 + slope * step)
        kept = [f"step-{n}" for n in (step - soak_outcome.SAVE_EVERY, step) if n]
        command = {"pid": 7, "resident_bytes": size} | HELD
        sample = {"step": step, "process": "rank 0", "pid": 2, "resident_bytes": size} | RANK
        samples.append(sample | {"checkpoints": kept, "command": command})
    for sample in samples[-number:]:
        sample |= change
    lines = [json.dumps(sample) for sample in samples]
    (folder / side / "samples.jsonl").write_text("\n".join([*lines, '{"cut by a ki']))
    (folder / side / "kills.jsonl").write_text(
        '{"victim": "rank 0", "moment": "save", "step": 120}\n'
    )


CHANGES: dict[str, tuple[dict[str, Any], float, str]] = {
    "tensors": ({"tensor_bytes": 4100}, 0.0, "rank 0: tensor_bytes [4096, 4100]"),
    "file handles": ({"file_handles": 10}, 0.0, "rank 0: file_handles [9, 10]"),
    "threads": ({"threads": 4}, 0.0, "rank 0: threads [3, 4]"),
    "children": ({"children": 1}, 0.0, "rank 0: children [0, 1]"),
    "the command": (
        {"command": {"pid": 7, "resident_bytes": 10**8} | HELD | {"file_handles": 10}},
        0.0,
        "command: file_handles [9, 10]",
    ),
    "memory": ({}, 2.0 * soak_outcome.MOST_BYTES_PER_STEP, "bytes a step"),
    "not pruned": ({"checkpoints": ["step-1", "step-450", "step-500"]}, 0.0, "after step 500"),
    "not saved": ({"checkpoints": ["step-450"]}, 0.0, "after step 500"),
}


def test_what_is_just_in_use_does_not_grow(tmp_path):
    write_side(tmp_path, "undisturbed", {"tensor_bytes": 4100}, 0.0, number=1)
    write_side(tmp_path, "killed", {}, 0.0)
    assert soak_outcome.outcome(tmp_path, "pp", STEPS)["ok"]


@pytest.mark.parametrize("name", CHANGES)
def test_a_soak_finds_what_grows(name, tmp_path):
    change, slope, fragment = CHANGES[name]
    write_side(tmp_path, "undisturbed", change, slope)
    write_side(tmp_path, "killed", {}, 0.0)
    row = soak_outcome.outcome(tmp_path, "pp", STEPS)
    assert not row["ok"]
    assert any(fragment in text for text in row["wrong"])


def test_a_soak_compares_the_curves(tmp_path):
    for side in soak_outcome.SIDES:
        write_side(tmp_path, side, {}, 100.0)
    row = soak_outcome.outcome(tmp_path, "pp", STEPS)
    assert row["wrong"] == []
    assert (row["compared_steps"], row["kills"]) == (STEPS, 1)
    means = [sum(1 / step for step in range(j + 1, j + 51)) / 50 for j in range(0, STEPS, 50)]
    assert row["mean_losses"]["killed"] == pytest.approx(means, abs=1e-6)
    assert row["killed_after_steps"] == [120]
    soak_outcome.draw([row], tmp_path / "soak.svg")
    assert "1 kills" in (tmp_path / "soak.svg").read_text()
    unfinished = soak_outcome.outcome(tmp_path, "pp", STEPS + 1)
    assert unfinished["curve_is_equal"]
    assert "not at the end" in unfinished["wrong"][0]
    run = tmp_path / "killed" / "run"
    (run / "adapter" / "adapter_model.safetensors").write_bytes(b"others")
    assert "adapter" in soak_outcome.outcome(tmp_path, "pp", STEPS)["wrong"][0]
    text = (run / "metrics.jsonl").read_text().replace("0.5}", "0.5000000001}")
    (run / "metrics.jsonl").write_text(text)
    assert not soak_outcome.outcome(tmp_path, "pp", STEPS)["curve_is_equal"]


def test_the_kills_of_a_soak_are_the_same_each_time_and_of_every_sort():
    kills = [soak.drawn("pp", number) for number in range(100)]
    assert kills == [soak.drawn("pp", number) for number in range(100)]
    assert {kill["victim"] for kill in kills} == set(soak.VICTIMS)
    assert {kill["moment"] for kill in kills} == set(soak.MOMENTS)


def test_the_page_says_how_far_the_curves_are_equal():
    root = Path(__file__).parents[2]
    record = json.loads((root / "results" / "soak.json").read_text())
    rows = [*record["rows"], *record.get("curves", [])]
    (row,) = (row for row in rows if "mean_losses" in row)
    assert row["curve_is_equal"]
    page = " ".join((root / "docs" / "study.md").read_text().split())
    assert f"up to step {row['compared_steps']:,}, with {row['kills']} [kills]" in page
