"""Faults, each one for real: signals, killed ranks, a full disk, no memory, damaged files, code in a model folder."""

from __future__ import annotations

import json
import os
import pickle
import re
import resource
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from shardwise.cli import main
from shardwise.metrics.record import RunRecord
from shardwise.models import load
from shardwise.run_file import load_config
from tests.distributed import PATIENCE
from tests.integration import kill
from tests.integration.test_train import CONFIGS, config, run_on


@pytest.fixture(scope="module")
def path(folder) -> Path:
    """The run file of every run here: of a model with short steps."""
    cfg = kill.kill_config(folder)
    return kill.run_file(folder, replace(cfg, model=replace(cfg.model, path=str(CONFIGS / "tiny-llama"))))


@pytest.fixture(scope="module")
def reference(path, folder) -> RunRecord:
    """The run that nobody disturbs, in forked processes, which need not import anything."""
    return run_on(kill.NPROC, load_config(path, [f"training.output_dir={folder / 'reference'}"]))


def test_a_killed_rank_costs_the_steps_since_the_last_checkpoint_and_nothing_else(path, reference, tmp_path):
    # The first before there is a checkpoint, the second between two.
    exit_code, told = kill.run_killed(path, tmp_path / "out", (5, 0.0, 0), (27, 0.0, 1))
    assert exit_code == 0, told
    for line, rank, restart in zip(told.splitlines(), (0, 1), (1, 2), strict=True):
        assert line.startswith(f"error: rank {rank} of 2 was killed by SIGKILL")
        assert line.endswith(f"starting again ({restart} of 2)")
    record = RunRecord.read(tmp_path / "out" / "record.json")
    assert record.losses == reference.losses
    # The second restart took up checkpoint 24; only where the kill came late, after four more steps, 32.
    assert record.resumed_from["step"] in (24, 32)


def test_a_killed_rank_of_a_pipeline_is_named_in_one_line(path, tmp_path):
    layout = ["--parallel.data=single", "--parallel.pp=2", "--parallel.schedule=interleaved-1f1b"]
    process = kill.start(path, tmp_path, *layout)
    kill.wait_for_step(process, tmp_path, 2)
    kill.ranks(process)[1].send_signal(signal.SIGKILL)
    told = process.communicate(timeout=PATIENCE)[1]
    assert process.returncode == 1
    assert told == "error: rank 1 of 2 was killed by SIGKILL; the system does that when memory runs out\n"


@pytest.mark.parametrize(("number", "nproc"), [(signal.SIGTERM, 2), (signal.SIGINT, 1)])
def test_a_signal_ends_the_run_after_its_step_and_nothing_is_lost(number, nproc, path, reference, tmp_path):
    out = tmp_path / "out"
    overrides = ["--training.save_every=0"] + (["--parallel.data=single"] if nproc == 1 else [])
    process = kill.start(path, out, *overrides, nproc=nproc)
    kill.wait_for_step(process, out, 3)
    process.send_signal(number)
    told = process.communicate(timeout=PATIENCE)[1]
    assert process.returncode == 128 + number
    done = kill.steps_done(out)
    saved = out / "checkpoints" / f"step-{done}"
    # Ranks are told of Ctrl-C by SIGTERM where it did not reach them; here one process gets it itself.
    name = signal.Signals(number).name
    assert told == f"stopped by {name} after step {done}, saved as {saved}; go on with --resume latest\n"
    stopped = RunRecord.read(out / "record.json")
    assert (stopped.status, stopped.reason) == ("stopped", told.strip())
    assert saved.is_dir()
    settings = [f"training.output_dir={out}", "training.resume=latest"]
    record = run_on(nproc, load_config(path, [*overrides, *settings]))
    assert record.resumed_from == {"folder": str(saved), "step": done}
    assert record.status == "ok"
    if nproc == 2:
        assert record.losses == reference.losses
    assert len(record.losses) == kill.STEPS


FULL = """
mount -t tmpfs -o size={size} none {out} && {command}
echo "code $?"; ls {out}/checkpoints; cat {out}/record.json | head -c 400
"""


def test_a_disk_that_is_full_ends_the_run_and_keeps_the_checkpoints_before(path, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    arguments = ["--parallel.data=single", "--training.keep_last=9", f"--training.output_dir={out}"]
    command = " ".join([sys.executable, "-m", "shardwise", "train", str(path), *arguments])
    script = FULL.format(size="1200k", out=out, command=command)  # a checkpoint of this run takes some 700 kB
    done = subprocess.run(["unshare", "-rm", "sh", "-c", script], capture_output=True, text=True, timeout=PATIENCE)
    assert "code 1\n" in done.stdout, (done.stdout, done.stderr)
    (line,) = done.stderr.strip().splitlines()
    assert "No space left on device" in line
    assert re.search(r"checkpoint step-\d+ could not be written", line)
    kept, _, record = done.stdout.partition("code 1\n")[2].partition("{")
    assert "step-8" in kept.split()
    assert "tmp" not in kept
    assert '"status": "failed"' in record


@pytest.mark.parametrize("nproc", [1, 2])
def test_no_memory_left_is_told_as_such(nproc, path, tmp_path):
    limit = 3 * 2**30  # more than the libraries map (1 to 2), less than the run asks for: 4 GiB of logits alone
    model = json.loads((CONFIGS / "tiny-llama" / "config.json").read_text()) | {"vocab_size": 2**18}
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(model))
    command = [sys.executable, "-m", "shardwise", "train", str(path), f"--training.output_dir={tmp_path / 'out'}"]
    sizes = ["--data.sequence_length=1024", "--training.micro_batch_size=4", f"--model.path={tmp_path / 'model'}"]
    sizes += ["--training.loss=plain", "--data.validation=0.0"]
    layout = ["--nproc", "2"] if nproc == 2 else ["--parallel.data=single"]
    done = subprocess.run(
        [*command, *sizes, *layout],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)),
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 3, done.stderr
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("error: out of memory")
    assert RunRecord.read(tmp_path / "out" / "record.json").status == "oom"


# ------------------------------------------------------------------------------------------------------- model folders


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
    assert "set model.trust_remote_code to true if you trust that" in refused(path, model, tmp_path / "out", capfd)
    assert not (tmp_path / "touched").exists()
