"""A row that is too long for the memory of one process trains where several share it."""

from __future__ import annotations

import json
import math
import resource
from functools import partial

import psutil
import pytest

from shardwise.base.records.record import RunRecord
from shardwise.config.presets import STARTER
from tests.command import run_command

LENGTH = 8192
MODEL = {
    "model_type": "qwen3_5_text",
    "architectures": ["Qwen3_5ForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 8192,  # large activations, few operations
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "vocab_size": 256,
    "max_position_embeddings": LENGTH,
}
"""Of a row, 2.5 GB of activations at the peak of a step; a rank of four has a quarter."""


@pytest.mark.parametrize(
    ("nproc", "exit_code"), [(1, 3), pytest.param(4, 0, marks=pytest.mark.slow)]
)
def test_a_row_that_one_process_cannot_hold_trains_on_four(tmp_path, nproc, exit_code):
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    document = json.dumps({"text": "The quick brown fox jumps over the lazy dog. " * 20})
    (tmp_path / "documents.jsonl").write_text("\n".join([document] * 30))
    run = {
        "model": {"path": str(tmp_path), "init": "random", "tokenizer": str(STARTER)},
        "data": {"train": str(tmp_path / "documents.jsonl"), "sequence_length": LENGTH},
        "parallel": {"data": "ddp", "cp": nproc},
        "training": {"output_dir": str(tmp_path / "run"), "steps": 1, "device": "cpu"},
        "measure": {"memory": False},
    }
    run["training"] |= {"global_batch_size": 1, "micro_batch_size": 1}
    (tmp_path / "run.yaml").write_text(json.dumps(run))  # JSON is YAML
    limit = psutil.Process().memory_info().vms + 3 * 2**29
    set_limit = partial(resource.setrlimit, resource.RLIMIT_AS, (limit, limit))
    command = ["train", str(tmp_path / "run.yaml"), "--nproc", str(nproc)]
    done = run_command(command, {"OMP_NUM_THREADS": "1"}, set_limit)
    assert done.returncode == exit_code, done.stderr
    record = RunRecord.read(tmp_path / "run" / "record.json")
    if exit_code == 0:
        assert math.isfinite(record.losses[0])
        return
    assert record.status == "oom"
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("error: out of memory")
    assert "parallel.cp" in line
