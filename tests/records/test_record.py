from __future__ import annotations

import json
import math
import subprocess
import sys

import pytest

from shardwise.base.records.record import MetricsFile, RunRecord
from shardwise.config import UserError

RECORD = RunRecord(
    status="ok",
    config={"data": {"train": "nan"}},
    mesh={"dp_shard": 2},
    parameters={"trainable": 1, "frozen": 2, "total": 3},
    losses=[2.5, math.inf, math.nan],
    grad_norms=[1.0, -math.inf, 0.0],
    eval=[{"step": 3, "loss": math.nan, "perplexity": math.inf, "tokens": 7}],
    tokens_per_second=12.5,
    peak_memory_bytes=[10, 20],
    memory_parts=[{"weights": 1, "gradients": 2, "optimizer": 3, "activations": 4, "temporary": 0}]
    * 2,
    state_bytes=[{"weights": 1, "gradients": 2, "optimizer": 3}] * 2,
)


def refuse(word: str) -> float:
    raise ValueError(f"{word} is not JSON")


def test_a_record_survives_strict_json(tmp_path):
    path = tmp_path / "record.json"
    RECORD.write(path)
    data = json.loads(path.read_text(), parse_constant=refuse)
    assert data["losses"] == [2.5, "inf", "nan"]
    assert data["tokens_per_second"] == 12.5
    assert data["mfu"] is None  # not measured: null, not 0

    again = RunRecord.read(path)
    assert repr(again) == repr(RECORD)  # by repr, since nan != nan
    assert again.config == {"data": {"train": "nan"}}  # a user's own string stays one


def test_writing_is_all_or_nothing(tmp_path):
    path = tmp_path / "record.json"
    RECORD.write(path)
    before = path.read_text()
    with pytest.raises(TypeError):
        RunRecord(status="ok", config={"not json": object()}).write(path)
    assert path.read_text() == before
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("[]", "schema version None"),
        (
            '{"schema_version": 99, "status": "ok", "config": {}}',
            "schema version 99, but this program reads 1",
        ),
        ('{"schema_version": 1, "status": "ok"}', "config is unknown or missing"),
        (
            '{"schema_version": 1, "status": "ok", "config": {}, "los": 1}',
            "los is unknown or missing",
        ),
    ],
)
def test_what_is_no_record_is_refused_in_one_line(tmp_path, text, message):
    path = tmp_path / "record.json"
    path.write_text(text)
    with pytest.raises(UserError, match=message) as error:
        RunRecord.read(path)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


def test_a_missing_record(tmp_path):
    with pytest.raises(UserError, match="cannot read the record"):
        RunRecord.read(tmp_path / "record.json")


def test_metrics_are_on_disk_line_by_line_and_are_continued(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with MetricsFile(path) as metrics:
        metrics.write(step=1, loss=0.5)
        assert json.loads(path.read_text()) == {"step": 1, "loss": 0.5}
        metrics.write(step=2, loss=math.nan)
    with MetricsFile(path) as metrics:
        metrics.write(step=3)
    rows = [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]
    assert rows == [{"step": 1, "loss": 0.5}, {"step": 2, "loss": "nan"}, {"step": 3}]


def test_a_record_is_read_without_torch():
    code = "import sys, shardwise.base.records.record; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
