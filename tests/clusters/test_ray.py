"""Runs on a real Ray end as an undisturbed run on this machine does, whatever happens to them."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardwise.checkpoint.folder import MANIFEST
from shardwise.commands import cli
from tests.clusters.ray_nodes import RayNodes, why_not
from tests.clusters.runs import losses, prepare, wait_for, wait_for_step

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(why_not() is not None, reason=why_not() or ""),
]
STEPS = 60
RUN = ("--training.micro_batch_size=4", "--parallel.data=fsdp2", f"--training.steps={STEPS}")


@pytest.fixture(scope="module")
def nodes() -> Iterator[RayNodes]:
    with RayNodes() as cluster:
        yield cluster


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A run file and the outcome of its undisturbed run on two processes of this machine."""
    return prepare(tmp_path_factory.mktemp("run"), *RUN)


def launch(nodes: RayNodes, folder: Path, name: str, *overrides: str) -> subprocess.Popen[str]:
    """Start the run under a name, with a rank on each node."""
    return nodes.start(
        folder,
        *("launch", "run.yaml", "--on=ray", *RUN, "--training.save_every=10"),
        *("--launch.nodes=2", f"--training.output_dir=runs/{name}", *overrides),
    )


def check_finished(folder: Path, name: str, run: subprocess.Popen[str], restarts: int) -> str:
    """The run ends well after so many restarts, with every loss of the undisturbed run."""
    printed, _ = run.communicate(timeout=400)
    assert run.returncode == 0, printed
    assert len(re.findall(r"; starting again \(", printed)) == restarts, printed
    expected = losses(folder, "local")
    assert len(expected) == STEPS
    assert losses(folder, name) == pytest.approx(expected, rel=1e-6)
    assert not list((folder / "runs" / name).glob(".ray-*"))
    return printed


def pid_of_rank_0(folder: Path, name: str) -> int:
    return json.loads((folder / "runs" / name / ".lock").read_text())["pid"]


def test_two_nodes_train_as_two_processes_here(nodes, folder):
    run = launch(nodes, folder, "plain", '--launch.environment={"OF_THE_RUN":"1"}')
    wait_for_step(folder, "plain", 3)
    environ = Path(f"/proc/{pid_of_rank_0(folder, 'plain')}/environ").read_text().split("\0")
    assert "OF_THE_RUN=1" in environ
    check_finished(folder, "plain", run, restarts=0)


def test_a_dead_worker_costs_a_restart(nodes, folder):
    run = launch(nodes, folder, "worker")
    wait_for_step(folder, "worker", 15)
    os.kill(pid_of_rank_0(folder, "worker"), signal.SIGKILL)
    printed = check_finished(folder, "worker", run, restarts=1)
    assert "rank 0 of 2 died" in printed


def test_a_dead_node_costs_a_restart(nodes, folder):
    run = launch(nodes, folder, "node")
    wait_for_step(folder, "node", 15)
    nodes.order("kill")
    nodes.order("add")
    check_finished(folder, "node", run, restarts=1)


def test_restarts_end(nodes, folder):
    run = launch(nodes, folder, "ends", "--launch.restarts=0")
    wait_for_step(folder, "ends", 10)
    os.kill(pid_of_rank_0(folder, "ends"), signal.SIGKILL)
    printed, _ = run.communicate(timeout=200)
    assert run.returncode == 1
    assert "error: rank 0 of 2 died" in printed
    record = json.loads((folder / "runs" / "ends" / "record.json").read_text())
    assert record["status"] == "failed"


def test_a_stopped_run_has_saved_and_goes_on(nodes, folder):
    run = launch(nodes, folder, "stopped")
    wait_for_step(folder, "stopped", 15)
    run.send_signal(signal.SIGTERM)
    printed, _ = run.communicate(timeout=200)
    assert run.returncode == 128 + signal.SIGTERM, printed
    step = int(re.findall(r"stopped by SIGTERM after step (\d+)", printed)[0])
    assert (folder / "runs/stopped/checkpoints" / f"step-{step}" / MANIFEST).exists()
    assert len(losses(folder, "stopped")) == step
    check_finished(folder, "stopped", launch(nodes, folder, "stopped"), restarts=0)


def test_a_mistake_is_not_started_again(nodes, folder):
    run = launch(nodes, folder, "mistake", "--data.train=nowhere.jsonl")
    printed, _ = run.communicate(timeout=200)
    assert run.returncode == 2, printed
    assert "\nerror: data.train: nowhere.jsonl matches no file" in printed
    assert "starting again" not in printed


def test_a_cluster_that_is_too_small_is_waited_for(nodes, folder):
    run = launch(nodes, folder, "waits", "--launch.nodes=5", "--training.global_batch_size=20")
    assert run.stdout is not None
    note = next(line for line in run.stdout if line.startswith("note: the run needs"))
    assert "5 CPUs of which the cluster has 4" in note
    time.sleep(2)  # signals are for the run from here on
    run.send_signal(signal.SIGTERM)
    time.sleep(1)
    run.send_signal(signal.SIGTERM)
    run.communicate(timeout=60)
    assert run.returncode == 128 + signal.SIGTERM


def test_no_cluster_is_a_mistake(nodes, folder):
    run = launch(nodes, folder, "nowhere", "--launch.ray={address: 127.0.0.1:1}")
    printed, _ = run.communicate(timeout=200)
    assert run.returncode == 2, printed
    assert "no Ray cluster at 127.0.0.1:1" in printed


SWEEP = """\
base: run.yaml
set: {training.steps: 4, training.micro_batch_size: 4}
rounds: 2
axes:
  strategy:
    single: {nproc: 1, parallel.data: single}
    ddp: {nproc: 2, parallel.data: ddp}
    none: {nproc: 2, parallel.data: ddp, parallel.dp_replicate: 7}
"""


def records(out: Path) -> dict[str, dict]:
    return {path.parent.name: json.loads(path.read_text()) for path in out.glob("*/record.json")}


def test_cells_of_a_sweep_run_as_tasks(nodes, folder):
    (folder / "sweep.yaml").write_text(SWEEP)
    out = folder / "runs/bench"
    bench = ("bench", "sweep.yaml", "--out=runs/bench", "--on=ray")
    interrupted = nodes.start(folder, *bench)
    wait_for(lambda: any(out.glob("*/round-1/.lock")), "a run of a cell")
    pid = json.loads(next(out.glob("*/round-1/.lock")).read_text() or "{}").get("pid")
    interrupted.send_signal(signal.SIGTERM)
    printed, _ = interrupted.communicate(timeout=120)
    assert interrupted.returncode == 128 + signal.SIGTERM, printed
    assert "the same command resumes it" in printed
    if pid is not None:  # the lock was just being written
        wait_for(lambda: not Path(f"/proc/{pid}").exists(), "the end of that run", 30)

    finished = nodes.start(folder, *bench)
    printed, _ = finished.communicate(timeout=400)
    assert finished.returncode == 0, printed
    ended = records(out)
    assert {name: record["status"] for name, record in ended.items()} == {
        "single": "ok",
        "control-single": "ok",
        "ddp": "ok",
        "none": "unsupported",
    }
    assert len(ended["ddp"]["rounds"]) == len(ended["single"]["rounds"]) == 2
    assert ended["ddp"]["losses"] == pytest.approx(ended["single"]["losses"], rel=1e-5)
    assert ended["ddp"]["environment"]["OMP_NUM_THREADS"] == "1"
    assert cli.main(["report", str(out)]) == 0
