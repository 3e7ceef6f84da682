"""A model that is larger than the memory of a process trains with its weights on disk."""

from __future__ import annotations

import json
import resource
from functools import partial
from pathlib import Path

import psutil
import pytest

from shardwise.base.records.record import RunRecord
from shardwise.config.presets import STARTER
from tests.command import run_command

MODEL = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "vocab_size": 256,
    "max_position_embeddings": 64,
}
LAYER_BYTES = 4 * (4 * 512**2 + 3 * 512 * 2048)
"""Those of the matrices of a layer. Of three layers they are in memory at a time, in full training
four times: weights, gradients and two states."""
SIZES = {"lora": (84, 1000 * 2**20), "full": (80, 1200 * 2**20)}
"""Layers, and the memory of the process beside what it has mapped before; half of it libraries and
threads take. Weights are a third more than it, so that a run in memory ends while it loads them."""


def trained(folder: Path, name: str, keys: dict, limit: int | None) -> tuple[int, str, RunRecord]:
    run = {
        "model": {"path": str(folder), "init": "random", "tokenizer": str(STARTER)},
        "data": {"train": str(folder / "documents.jsonl"), "sequence_length": 32},
        "training": {"output_dir": str(folder / name), "steps": 2, "device": "cpu"},
        "measure": {"memory": False},
        **keys,
    }
    run["training"] |= {"global_batch_size": 2, "micro_batch_size": 1, "seed": 1}
    (folder / "run.yaml").write_text(json.dumps(run))  # JSON is YAML
    command = ["train", str(folder / "run.yaml"), "--nproc", "1"]
    before = None
    if limit is not None:
        most = psutil.Process().memory_info().vms + limit
        before = partial(resource.setrlimit, resource.RLIMIT_AS, (most, most))
    done = run_command(command, {"OMP_NUM_THREADS": "1"}, before)
    return done.returncode, done.stderr, RunRecord.read(folder / name / "record.json")


@pytest.mark.slow  # tests/parallel/test_disk.py counts the weights in memory
@pytest.mark.parametrize("mode", ["lora", "full"])
def test_a_model_larger_than_the_memory_of_a_process_trains(tmp_path, mode):
    num_layers, limit = SIZES[mode]
    assert num_layers * LAYER_BYTES > 1.06 * limit
    model = MODEL | {"num_hidden_layers": num_layers}
    (tmp_path / "config.json").write_text(json.dumps(model))
    document = json.dumps({"text": "The quick brown fox jumps over the lazy dog. " * 20})
    (tmp_path / "documents.jsonl").write_text("\n".join([document] * 10))
    keys: dict = {"lora": {"r": 4}} if mode == "lora" else {}
    code, said, record = trained(tmp_path, "limited", keys, limit)
    assert code == 3, said
    assert record.status == "oom"
    disk = {"parallel": {"offload": "disk"}}
    code, said, on_disk = trained(tmp_path, "disk", keys | disk, limit)
    assert code == 0, said
    code, said, in_memory = trained(tmp_path, "memory", keys, None)
    assert code == 0, said
    assert on_disk.losses == in_memory.losses
    assert on_disk.grad_norms == in_memory.grad_norms
    name = "adapter/adapter_model.safetensors" if mode == "lora" else "model/config.json"
    assert (tmp_path / "disk" / name).is_file()
