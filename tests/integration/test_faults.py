"""Faults, each one for real: signals, killed ranks, a full disk, no memory, damaged files, code in
a model folder."""

from __future__ import annotations

import ctypes
import json
import os
import pickle
import re
import resource
import shutil
import signal
from dataclasses import replace
from functools import partial
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import save_file

from shardwise.checkpoint.checkpointer import Checkpointer
from shardwise.cli import main
from shardwise.interfaces import Evaluation
from shardwise.models import load
from shardwise.records.record import RunRecord
from shardwise.run_file import load_config
from tests.command import run_command
from tests.distributed import PATIENCE
from tests.integration import kill
from tests.integration.test_train import CONFIGS, config, run_on


@pytest.fixture(scope="module")
def path(folder) -> Path:
    """The run file of every run here: of a model with short steps."""
    cfg = kill.kill_config(folder)
    return kill.run_file(
        folder, replace(cfg, model=replace(cfg.model, path=str(CONFIGS / "tiny-llama")))
    )


@pytest.fixture(scope="module")
def reference(path, folder) -> RunRecord:
    """The run that nobody disturbs, in forked processes, which need not import anything."""
    return run_on(kill.NPROC, load_config(path, [f"training.output_dir={folder / 'reference'}"]))


def test_a_killed_rank_costs_the_steps_since_the_last_checkpoint_and_nothing_else(
    path, reference, tmp_path
):
    # The first before there is a checkpoint, the second between two.
    exit_code, told = kill.run_killed(path, tmp_path / "out", (5, 0.0, 0), (27, 0.0, 1))
    assert exit_code == 0, told
    for line, rank, restart in zip(told.splitlines(), (0, 1), (1, 2), strict=True):
        assert line.startswith(f"error: rank {rank} of 2 was killed by SIGKILL")
        assert line.endswith(f"starting again ({restart} of 2)")
    record = RunRecord.read(tmp_path / "out" / "record.json")
    assert record.losses == reference.losses
    # The second restart took up checkpoint 24; only where the kill came late, after four more
    # steps, 32.
    assert record.resumed_from["step"] in (24, 32)


@pytest.mark.slow  # in memory of two nodes: tests/checkpoint/test_memory.py
def test_a_killed_rank_costs_a_step_where_checkpoints_are_in_memory(
    path, reference, tmp_path, monkeypatch
):
    monkeypatch.setenv("SHARDWISE_MEMORY", str(tmp_path))
    memory = ("--training.memory_checkpoint_every=1", "--training.save_every=0")
    exit_code, told = kill.run_killed(path, tmp_path / "out", (27, 0.0, 1), overrides=memory)
    assert exit_code == 0, told
    record = RunRecord.read(tmp_path / "out" / "record.json")
    assert record.losses == reference.losses
    assert record.resumed_from["step"] >= 26
    assert not list(tmp_path.glob("shardwise-*"))


def test_a_killed_rank_of_a_pipeline_is_named_in_one_line(path, tmp_path):
    layout = ["--parallel.data=single", "--parallel.pp=2", "--parallel.schedule=interleaved-1f1b"]
    process = kill.start(path, tmp_path, *layout)
    kill.wait_for_step(process, tmp_path, 2)
    kill.ranks(process)[1].send_signal(signal.SIGKILL)
    told = process.communicate(timeout=PATIENCE)[1]
    assert process.returncode == 1
    assert (
        told
        == "error: rank 1 of 2 was killed by SIGKILL; the system does that when memory runs out\n"
    )


@pytest.mark.parametrize(("number", "nproc"), [(signal.SIGTERM, 2), (signal.SIGINT, 1)])
def test_a_signal_ends_the_run_after_its_step_and_nothing_is_lost(
    number, nproc, path, reference, tmp_path
):
    out = tmp_path / "out"
    overrides = ["--training.save_every=0"] + (["--parallel.data=single"] if nproc == 1 else [])
    process = kill.start(path, out, *overrides, nproc=nproc)
    kill.wait_for_step(process, out, 3)
    process.send_signal(number)
    told = process.communicate(timeout=PATIENCE)[1]
    assert process.returncode == 128 + number
    done = kill.steps_done(out)
    saved = out / "checkpoints" / f"step-{done}"
    # Ranks are told of Ctrl-C by SIGTERM where it did not reach them; here one process gets it
    # itself.
    name = signal.Signals(number).name
    assert told.startswith(f"stopped by {name} after step {done}, saved as {saved}; ")
    assert told.endswith("--resume latest\n")
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


CLONE_NEWNS, CLONE_NEWUSER, MS_REC_PRIVATE, NOT_ALLOWED = 0x20000, 0x10000000, 0x44000, 77


def mount_small_disk(folder: Path) -> None:
    """Make `folder` a disk of 1200 kB for this process alone; a checkpoint takes some 350 kB.

    Not every system lets every user: namespaces, their ids and mounts can each be forbidden.
    """
    libc, ids = ctypes.CDLL(None, use_errno=True), {"uid_map": os.getuid(), "gid_map": os.getgid()}
    try:
        allowed = libc.unshare(CLONE_NEWUSER | CLONE_NEWNS) == 0
        if allowed:
            Path("/proc/self/setgroups").write_text("deny")
            for name, number in ids.items():
                Path(f"/proc/self/{name}").write_text(f"0 {number} 1")
            allowed = libc.mount(b"none", b"/", None, MS_REC_PRIVATE, None) == 0
            allowed = (
                allowed and libc.mount(b"none", bytes(folder), b"tmpfs", 0, b"size=1200k") == 0
            )
    except PermissionError:
        allowed = False
    if not allowed:
        os._exit(NOT_ALLOWED)


def show_what_is_left(folder: Path) -> None:
    """Print what nobody sees after this process."""
    left = {
        "names": os.listdir(folder / "checkpoints"),
        "record": json.loads((folder / "record.json").read_text()),
    }
    print(json.dumps(left))


def test_a_disk_that_is_full_ends_the_run_and_keeps_the_checkpoints_before(path, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    arguments = ["--parallel.data=single", "--training.keep_last=9", f"--training.output_dir={out}"]
    around = partial(mount_small_disk, out), partial(show_what_is_left, out)
    done = run_command(["train", str(path), *arguments], {}, *around)
    if done.returncode == NOT_ALLOWED:
        pytest.skip("this system lets nobody mount a disk of his own")
    assert done.returncode == 1, (done.stdout, done.stderr)
    (line,) = done.stderr.strip().splitlines()
    assert "No space left on device" in line
    assert "make room" in line
    assert "--resume latest-good" in line
    assert re.search(r"checkpoint step-\d+ could not be written", line)
    left = json.loads(done.stdout.splitlines()[-1])
    assert "step-8" in left["names"]
    assert not any("tmp" in name for name in left["names"])
    assert left["record"]["status"] == "failed"


def take_away(folder: Path, how: str) -> None:
    """Let the folder of a run go after its second step, from under it."""
    after_step = Checkpointer.after_step

    def gone(self: Checkpointer, step: int, evaluation: Evaluation | None) -> None:
        if step == 2:
            shutil.rmtree(folder) if how == "removed" else folder.rename(
                folder.with_name("elsewhere")
            )
        after_step(self, step, evaluation)

    Checkpointer.after_step = gone


@pytest.mark.parametrize(("how", "save_every"), [("removed", 2), ("moved", 3), ("removed", 0)])
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


@pytest.mark.parametrize("nproc", [1, 2])
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
