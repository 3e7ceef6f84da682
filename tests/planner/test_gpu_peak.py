"""Peaks that a GPU has measured (`make gpu`), beside the plan."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardwise.config import Data, Lora, Model, RunConfig, Training
from shardwise.lab.planner.candidates import Question
from shardwise.lab.planner.cluster import cluster_of
from shardwise.lab.planner.exact import explain

MEASURED = Path(__file__).parents[2] / "results" / "gpu" / "lora_step.json"


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_a_lora_step_with_fla(checkpointing, tmp_path):
    result = json.loads(MEASURED.read_text(encoding="utf-8"))
    (row,) = (
        row
        for row in result["rows"]
        if (row["side"], row["gdn"], row["checkpointing"]) == ("shardwise", "fla", checkpointing)
    )
    work = result["workload"]
    (tmp_path / "config.json").write_text(json.dumps(work["model"]), encoding="utf-8")
    cfg = RunConfig(
        model=Model(str(tmp_path), init="random", dtype="bfloat16"),
        lora=Lora(r=work["r"], alpha=work["alpha"]),
        data=Data(train="unused", sequence_length=work["sequence_length"]),
        training=Training(
            output_dir="unused",
            global_batch_size=work["batch"],
            micro_batch_size=work["batch"],
            precision="bfloat16",
            checkpointing=checkpointing,
        ),
    )
    choice, _ = explain(Question(cfg, cluster_of("1xH200", 1)))
    planned = choice.memory.total - choice.memory.overhead  # tensors alone
    # The plan was within 4 % until norms and convolutions had kernels, which take less memory than
    # torch's operators did in this run. No GPU has run these.
    assert 0.8 * row["memory"]["peak_bytes"] < planned < row["memory"]["peak_bytes"]
