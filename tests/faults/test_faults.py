"""Some of the injected faults, the judge of what comes of them, and the committed table."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.faults import run
from tests.faults.cases import cases
from tests.faults.run import NOT_ALLOWED, Bad, Runs, compare, run_case, shared_folder
from tests.faults.table import PAGE, SAME, STOPPED, is_right, page, read_table
from tests.left_out import some_now

CASES = {case.key: case for case in cases()}
CHOSEN = {
    "process/kill/forward/rank 1/pp-interleaved/lora/restarts=1": SAME,
    "pairs/kill/reference/rank 1/fsdp2/dpo-full/restarts=1": SAME,
    "pairs/kill/optimizer/rank 0/ddp/dpo-lora": STOPPED,
    "numbers/bit of a gradient/clip/rank 0/ddp/lora/check_copies_every=1": STOPPED,
    "disk/full/written/rank 0/single/full": STOPPED,
    "checkpoint/flipped/rank 0/tensors-0.safetensors/single/full": STOPPED,
}


@pytest.fixture(scope="module")
def shared() -> Iterator[Path]:
    with shared_folder() as folder:
        yield folder


LATER = "numbers/bit of a gradient/clip/rank 0/ddp/lora/check_copies_every=1"
"""Which tests/integration/test_copies.py shows of a weight."""


@pytest.mark.parametrize("key", some_now(CHOSEN, CHOSEN.keys() - {LATER}))
def test_nothing_is_lost(key, shared, tmp_path):
    row = run_case(CASES[key], shared, tmp_path / "case")
    if row["outcome"] == NOT_ALLOWED:
        pytest.skip(NOT_ALLOWED)
    assert (row["outcome"], row["lost_steps"]) == (CHOSEN[key], 0), row


def test_the_judge_sees_what_is_wrong(shared, tmp_path):
    runs = Runs(shared, tmp_path, "full")
    sound = runs.undisturbed("single")
    for damage in ("loss", "no loss", "step", "result", "nan", "no result"):
        ours = tmp_path / damage
        shutil.copytree(sound, ours)
        compare(ours, sound, to_rounding=False)
        lines = (ours / "metrics.jsonl").read_text().splitlines(keepends=True)
        weights = ours / "model" / "model.safetensors"
        if damage == "loss":
            row = json.loads(lines[-2])
            lines[-2] = json.dumps({**row, "loss": row["loss"] * (1 + 1e-15)}) + "\n"
        elif damage == "no loss":
            lines[-2] = json.dumps({**json.loads(lines[-2]), "loss": float("nan")}) + "\n"
        elif damage == "nan":
            tensors = load_file(weights)
            next(reversed(tensors.values())).view(-1)[-1] = float("nan")
            save_file(tensors, weights)
        elif damage == "step":
            del lines[-2]
        elif damage == "result":
            content = weights.read_bytes()
            weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
            with pytest.raises(Bad, match="the result differs"):
                compare(ours, sound, to_rounding=True)
        else:
            weights.unlink()
        (ours / "metrics.jsonl").write_text("".join(lines))
        with pytest.raises(Bad):
            compare(ours, sound, to_rounding=False)


def test_what_hangs_is_no_outcome(shared, tmp_path, monkeypatch):
    monkeypatch.setattr(run, "LIMIT_SECONDS", 0.5)
    with pytest.raises(Bad, match="hangs"):
        Runs(shared, tmp_path, "full").start(
            "single", before=lambda: time.sleep(run.LIMIT_SECONDS * 999)
        )


def test_every_case_of_the_table_ended_right():
    table = read_table()
    assert table.keys() <= CASES.keys()
    assert len(table) >= 300
    assert [key for key, row in table.items() if not is_right(row)] == []


def test_the_page_is_that_of_the_table():
    assert PAGE.read_text() == page(read_table())
