"""`shardwise.train` and `shardwise.run`: what a script or a notebook gets."""

from __future__ import annotations

import gc
import multiprocessing
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import shardwise
from tests.distributed import PATIENCE
from tests.integration.conftest import make_corpus

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def run_file(tmp_path_factory):
    """A run of two steps as plain data, except its output folder."""
    folder = tmp_path_factory.mktemp("library")
    make_corpus(folder)
    return {
        "model": {
            "path": str(ROOT / "configs" / "models" / "tiny-llama"),
            "init": "random",
            "tokenizer": str(folder / "tokenizer"),
        },
        "data": {"train": str(folder / "corpus.jsonl"), "sequence_length": 16},
        "training": {"steps": 2, "global_batch_size": 4, "device": "cpu"},
        "measure": {"memory": False},
    }


def with_folder(run_file, folder):
    return {**run_file, "training": {**run_file["training"], "output_dir": str(folder)}}


def in_a_fork(function, *args):
    """Call a function in a fork of this process, which has one thread and so forks ranks."""
    process = multiprocessing.get_context("fork").Process(target=one_thread, args=(function, args))
    process.start()
    process.join(2 * PATIENCE)
    assert process.exitcode == 0


def one_thread(function, args):
    torch.set_num_threads(1)  # with more, ranks are spawned
    function(*args)


def train_on_two(config):
    record = shardwise.train(config, 2, ["--parallel.data=ddp"])
    assert (record.status, record.mesh["dp_replicate"]) == ("ok", 2)


def test_train_returns_the_record(run_file, tmp_path):
    alone = shardwise.train(with_folder(run_file, tmp_path / "1"))
    assert (alone.status, alone.mesh["dp_replicate"]) == ("ok", 1)
    in_a_fork(train_on_two, with_folder(run_file, tmp_path / "2"))
    both = shardwise.RunRecord.read(tmp_path / "2" / "record.json")
    assert both.losses == pytest.approx(alone.losses, rel=1e-6)


def open_things() -> tuple[int, int, int]:
    """The descriptors, threads and children of this process, as the system counts them."""
    return (
        len(os.listdir("/proc/self/fd")),
        len(os.listdir("/proc/self/task")),
        len(multiprocessing.active_children()),
    )


def call_again_and_again(run_file, folder):
    def nothing(cfg, mesh):
        raise ValueError("a mistake of the caller")

    def once(number):
        config = with_folder(run_file, folder / str(number))
        kinds = ["--measure.trackers=[tensorboard]", "--training.async_save=true"]
        shardwise.train(config, None, [*kinds, "--training.save_every=1"])
        shardwise.train(config, None, ["--training.resume=latest", "--parallel.offload=disk"])
        with pytest.raises(shardwise.UserError):
            shardwise.train(config)  # the folder holds another run
        with pytest.raises(shardwise.RunFailed):
            shardwise.run(nothing, with_folder(run_file, folder / f"{number}-failed"))

    gc.disable()  # a collection may come at any time, or not
    once(0)  # what is imported stays open
    before = open_things()
    for number in (1, 2):
        once(number)
        assert open_things() == before


def test_calls_leave_no_descriptor_and_no_thread(run_file, tmp_path):
    in_a_fork(call_again_and_again, run_file, tmp_path)


def test_a_mistake_is_raised_and_not_printed(run_file, tmp_path, capfd):
    overrides = [f"--training.output_dir={tmp_path}", "--training.steps=0"]
    with pytest.raises(shardwise.UserError, match=r"training\.steps is 0"):
        shardwise.train(run_file, overrides=overrides)
    with pytest.raises(shardwise.UserError, match=r"give at least 1"):
        shardwise.train(with_folder(run_file, tmp_path), 0)
    assert capfd.readouterr().err == ""


def nothing(cfg, mesh): ...


SMALL = {
    "model": {"path": "m"},
    "data": {"train": "d"},
    "training": {"output_dir": "o", "steps": 1},
}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: shardwise.train(None), "given as NoneType"),
        (lambda: shardwise.train([1]), "given as list"),
        (lambda: shardwise.run(nothing, {"model": "tiny"}), "model is"),
        (lambda: shardwise.run(nothing, {"model": [1]}), "model is"),
        (lambda: shardwise.run(None, {}), r"function\(cfg, mesh\)"),
        (lambda: shardwise.train({}, overrides="--training.steps=2"), "give a list"),
        (lambda: shardwise.train({}, overrides=[5]), r"overrides is \[5\]"),
        (lambda: shardwise.train({}, overrides=None), "overrides is None"),
        (lambda: shardwise.train(SMALL, "2"), "--nproc is '2'"),
        (lambda: shardwise.train(SMALL, True), "--nproc is True"),
        (lambda: shardwise.train(SMALL, 1.0), "--nproc is 1.0"),
        (lambda: shardwise.run(nothing, SMALL, [1]), r"--nproc is \[1\]"),
    ],
)
def test_a_wrong_argument_gets_one_line(call, message):
    with pytest.raises(shardwise.UserError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_one_run_at_a_time_goes_on_in_a_process(run_file, tmp_path):
    in_a_fork(run_others_beside, run_file, tmp_path)


def run_others_beside(run_file, tmp_path):
    config = with_folder(run_file, tmp_path / "first")
    others = []

    def main(cfg, mesh):
        other = threading.Thread(target=lambda: others.append(refusal("thread")))
        other.start()
        others.append(refusal("nested"))
        other.join()

    def refusal(name):
        with pytest.raises(shardwise.UserError, match="another run goes on") as caught:
            shardwise.train(with_folder(run_file, tmp_path / name))
        return str(caught.value)

    shardwise.run(main, config)
    assert len(others) == 2
    assert shardwise.train(config, overrides=["--training.overwrite=true"]).status == "ok"
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    refusal("group")
    dist.destroy_process_group()


def fails_on_last(cfg, mesh):
    if dist.get_rank() == 1:
        raise KeyError("lost")
    dist.barrier()


def run_what_fails(config):
    with pytest.raises(shardwise.RunFailed, match="KeyError on rank 1 of 2") as caught:
        shardwise.run(fails_on_last, config, 2, ["--parallel.data=ddp"])
    assert (caught.value.exit_code, caught.value.status) == (1, "failed")


def test_a_failure_is_raised_with_its_code(run_file, tmp_path, capfd):
    in_a_fork(run_what_fails, with_folder(run_file, tmp_path))
    assert "fails_on_last" in capfd.readouterr().err  # the traceback


@pytest.mark.slow  # training/test_own_loop.py runs the examples
def test_an_example_runs_as_a_command(tmp_path):
    """From a new interpreter, which spawns or forks as it finds right."""
    command = [sys.executable, "examples/own_module.py", "--nproc", "2", "--parallel.data=fsdp2"]
    command += [f"--training.output_dir={tmp_path}", "--training.steps=2", "--measure.memory=false"]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert shardwise.RunRecord.read(tmp_path / "record.json").mesh["dp_shard"] == 2
