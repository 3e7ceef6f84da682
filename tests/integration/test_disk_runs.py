"""Runs with weights on disk: checkpoints, resumes under both layouts, and what is measured."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from shardwise.base.records.record import RunRecord
from shardwise.config.presets import STARTER
from shardwise.parallel import disk_window
from tests.command import run_command
from tests.models.tiny import CONFIGS


def trained(
    folder: Path, name: str, keys: dict[str, Any], before: Callable[[], None] | None = None
) -> tuple[int, str, RunRecord]:
    document = json.dumps({"text": "The quick brown fox jumps over the lazy dog. " * 20})
    (folder / "documents.jsonl").write_text("\n".join([document] * 10))
    run: dict[str, Any] = {
        "model": {
            "path": str(CONFIGS / "tiny-qwen3_5"),
            "init": "random",
            "tokenizer": str(STARTER),
        },
        "data": {"train": str(folder / "documents.jsonl"), "sequence_length": 32},
        "optimizer": {"lr": 0.01},
        "measure": {"memory": False},
        "training": {"output_dir": str(folder / name), "steps": 4, "device": "cpu"},
    }
    run["training"] |= {"global_batch_size": 4, "micro_batch_size": 2, "save_every": 2}
    for section, values in keys.items():
        run[section] = run.get(section, {}) | values
    (folder / f"{name}.yaml").write_text(json.dumps(run))  # JSON is YAML
    command = ["train", str(folder / f"{name}.yaml"), "--nproc", "1"]
    done = run_command(command, {"OMP_NUM_THREADS": "1"}, before)
    return done.returncode, done.stderr, RunRecord.read(folder / name / "record.json")


DISK: dict[str, Any] = {"parallel": {"offload": "disk"}}


@pytest.mark.parametrize("mode", ["lora", pytest.param("full", marks=pytest.mark.slow)])
def test_a_run_resumes_on_disk_and_in_memory(tmp_path, mode):
    keys: dict[str, Any] = {"lora": {"r": 4}} if mode == "lora" else {}
    code, said, memory = trained(tmp_path, "memory", keys)
    assert code == 0, said
    code, said, disk = trained(tmp_path, "disk", keys | DISK | {"measure": {"memory": True}})
    assert code == 0, said
    assert disk.losses == memory.losses
    assert memory.disk_bytes_per_step is None
    assert disk.disk_bytes_per_step is not None
    ((read, written),) = disk.disk_bytes_per_step
    assert read > written > 0
    checkpoint = "checkpoints/step-2/tensors-0.safetensors"
    one, other = (load_file(tmp_path / name / checkpoint) for name in ("memory", "disk"))
    assert one.keys() == other.keys()
    assert all(tensor.equal(other[key]) for key, tensor in one.items())
    for name, layout in (("again", DISK), ("elsewhere", {})):
        resume = {"training": {"resume": str(tmp_path / "disk/checkpoints/step-2")}}
        code, said, record = trained(tmp_path, name, keys | layout | resume)
        assert code == 0, said
        assert record.losses == memory.losses


@pytest.mark.parametrize("written", [18, pytest.param(23, marks=pytest.mark.slow)])
def test_a_write_without_room_ends_the_run_and_keeps_what_was_saved(tmp_path, written):
    """As on a file system that shares blocks of files, which may be full in spite of a reserve.

    Each of four steps writes six units: it is the first one in the last step, or the last one.
    """

    def full_in_step_4() -> None:
        updates = 0

        def drop(self: Any, pages: Any, is_changed: bool = False) -> None:
            nonlocal updates
            updates += is_changed
            inner(self, pages, is_changed)

        def pwritev(*args: Any) -> int:
            if updates > written:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return write(*args)

        inner, disk_window.Window.drop = disk_window.Window.drop, drop  # type: ignore[method-assign]
        write, os.pwritev = os.pwritev, pwritev

    code, said, record = trained(tmp_path, "run", DISK, full_in_step_4)
    assert code == 1
    assert record.status == "failed"
    (line,) = said.strip().splitlines()
    assert "No space left" in line
    assert "resume" in line
    assert (tmp_path / "run" / "checkpoints" / "step-2").is_dir()
