"""Faults that tests/faults does not have: a removed folder, no memory from the start, damaged and
hostile files of models."""

from __future__ import annotations

import json
import pickle
import resource
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import psutil
import pytest
import torch
import yaml
from safetensors.torch import save_file

from shardwise.base.interfaces import Evaluation
from shardwise.base.records.record import RunRecord
from shardwise.checkpoint.checkpointer import Checkpointer
from shardwise.commands.cli import main
from shardwise.models import load
from tests.command import run_command
from tests.integration.test_train import CONFIGS, config


@pytest.fixture(scope="module")
def path(folder) -> Path:
    """The run file of every run here: of a model with short steps."""
    cfg = config(folder, "unused", "ddp", steps=40, save_every=8, eval_every=0)
    cfg = replace(cfg, model=replace(cfg.model, path=str(CONFIGS / "tiny-llama")))
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump(json.loads(json.dumps(cfg.to_dict()))))
    return file


def take_away(folder: Path, how: str) -> None:
    """Let the folder of a run go after its second step, from under it."""
    after_step = Checkpointer.after_step

    def gone(self: Checkpointer, step: int, evaluation: Evaluation | None, **asked: bool) -> None:
        if step == 2:
            shutil.rmtree(folder) if how == "removed" else folder.rename(
                folder.with_name("elsewhere")
            )
        after_step(self, step, evaluation, **asked)

    Checkpointer.after_step = gone


@pytest.mark.parametrize(
    ("how", "save_every"),
    [("removed", 2), ("moved", 3), pytest.param("removed", 0, marks=pytest.mark.slow)],
)
def test_a_folder_that_goes_from_under_a_run_ends_it_in_one_line(how, save_every, path, tmp_path):
    out = tmp_path / "out"
    arguments = [
        f"--training.save_every={save_every}",
        "--training.steps=3",
        f"--training.output_dir={out}",
    ]
    done = run_command(
        ["train", str(path), "--parallel.data=single", *arguments], {}, partial(take_away, out, how)
    )
    assert done.returncode == 1, (done.stdout, done.stderr)
    (line,) = done.stderr.strip().splitlines()
    assert str(out) in line or "step-" in line
    assert "--resume" in line
    assert not out.exists()


@pytest.mark.parametrize("nproc", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_no_memory_left_is_told_as_such(nproc, path, tmp_path):
    # More than the libraries map, less than the run asks for: 4 GiB of logits alone.
    limit = psutil.Process().memory_info().vms + 2 * 2**30
    model = json.loads((CONFIGS / "tiny-llama" / "config.json").read_text()) | {"vocab_size": 2**18}
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(model))
    command = ["train", str(path), f"--training.output_dir={tmp_path / 'out'}"]
    sizes = [
        "--data.sequence_length=1024",
        "--training.micro_batch_size=4",
        f"--model.path={tmp_path / 'model'}",
    ]
    sizes += ["--training.loss=plain", "--data.validation=0.0"]
    layout = ["--nproc", "2"] if nproc == 2 else ["--parallel.data=single"]
    set_limit = partial(resource.setrlimit, resource.RLIMIT_AS, (limit, limit))
    done = run_command([*command, *sizes, *layout], {"OMP_NUM_THREADS": "1"}, set_limit)
    assert done.returncode == 3, done.stderr
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("error: out of memory")
    assert RunRecord.read(tmp_path / "out" / "record.json").status == "oom"


# ------------------------------------------------------------------------------------------
# model folders


@pytest.fixture
def model(folder, tmp_path) -> Path:
    """A whole model folder with weights."""
    cfg = config(folder, "unused").model
    hf = load.load_whole(cfg, load.read_config(cfg))
    hf.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def refused(path: Path, model: Path, out: Path, capfd: pytest.CaptureFixture[str]) -> str:
    arguments = [f"--model.path={model}", "--model.init=weights", f"--training.output_dir={out}"]
    assert main(["train", str(path), "--parallel.data=single", *arguments]) == 2
    (line,) = capfd.readouterr().err.strip().splitlines()
    return line


@pytest.mark.parametrize("kept", [0.0, 0.5, 0.999])
def test_a_truncated_safetensors_file_is_named(kept, path, model, tmp_path, capfd):
    file = model / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[: int(len(content) * kept)])
    assert str(file) in refused(path, model, tmp_path / "out", capfd)


def test_a_safetensors_header_that_lies_is_named(path, model, tmp_path, capfd):
    file = model / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[20:40] = b"\xff" * 20
    file.write_bytes(content)
    assert str(file) in refused(path, model, tmp_path / "out", capfd)


class Touch:
    """What a pickle can do to whoever loads it."""

    def __init__(self, file: str) -> None:
        self.file = file

    def __reduce__(self):
        return open, (self.file, "w")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors", "adapter_model.bin"])
def test_no_pickle_in_a_model_folder_is_loaded(name, path, model, tmp_path, capfd):
    (model / "model.safetensors").unlink()
    (model / name).write_bytes(pickle.dumps(Touch(str(tmp_path / "touched"))))
    assert "safetensors" in refused(path, model, tmp_path / "out", capfd)
    assert not (tmp_path / "touched").exists()


def test_code_in_a_model_folder_does_not_run_unless_asked(path, tmp_path, capfd):
    model = tmp_path / "model"
    shutil.copytree(CONFIGS / "tiny-llama", model)
    content = json.loads((model / "config.json").read_text()) | {
        "model_type": "of-its-own",
        "auto_map": {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"},
    }
    (model / "config.json").write_text(json.dumps(content))
    (model / "code.py").write_text(f"open({str(tmp_path / 'touched')!r}, 'w')\n")
    save_file({"x": torch.zeros(1)}, model / "model.safetensors")
    assert "set model.trust_remote_code to true if you trust that" in refused(
        path, model, tmp_path / "out", capfd
    )
    assert not (tmp_path / "touched").exists()
