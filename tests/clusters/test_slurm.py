"""Runs on a real Slurm end as an undisturbed run on this machine does, whatever happens to them."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import pytest

import shardwise
from shardwise.checkpoint.folder import MANIFEST
from tests.clusters.runs import losses, prepare, wait_for, wait_for_step
from tests.clusters.slurm import NODES, Slurm, started, why_not

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(why_not() is not None, reason=why_not() or ""),
]
STEPS = 120
# With this rate, rounding does not grow over the steps, on whatever number of ranks.
RUN = (
    *("--training.micro_batch_size=4", "--parallel.data=fsdp2", f"--training.steps={STEPS}"),
    "--optimizer.lr=0.0005",
)
SAVES = "--training.save_every=20"
SOURCE = Path(shardwise.__file__).parents[1]
APPTAINER = """# Stands in for apptainer: takes the same words, and runs without a container.
[ "$1" = exec ] || exit 99
while [ "$1" != image.sif ]; do shift; done
echo "in $1"; shift
exec "$@"
"""


@pytest.fixture(scope="module")
def slurm(tmp_path_factory) -> Iterator[Slurm]:
    with started(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A run file and the outcome of its undisturbed run on two processes of this machine."""
    return prepare(tmp_path_factory.mktemp("run"), *RUN)


def submit(slurm: Slurm, folder: Path, name: str, *overrides: str) -> str:
    """Submit the run under a name; return the job's number."""
    printed = slurm.call(
        *(sys.executable, "-m", "shardwise", "launch", "run.yaml", "--on=slurm", *RUN, SAVES),
        *("--launch.nodes=2", f"--training.output_dir=runs/{name}", *overrides),
        cwd=folder,
    )
    return printed.split()[2].rstrip(":")


def resumed_at(folder: Path, name: str, job: str) -> list[int]:
    """Return the steps of the checkpoints from which the job has resumed."""
    log = (folder / "runs" / name / f"slurm-{job}.log").read_text()
    return [int(step) for step in re.findall(r"resuming after step (\d+)", log)]


def minutes(slurm: Slurm, job: str) -> int:
    """Return a time limit that is at most a minute from now."""
    started = slurm.call("squeue", "-h", "-j", job, "-o", "%S").strip()
    return int((datetime.now() - datetime.fromisoformat(started)).total_seconds() // 60) + 1


@contextlib.contextmanager
def paused(slurm: Slurm, job: str) -> Iterator[None]:
    ranks = slurm.ranks(job)
    assert len(ranks) == 2
    for pid in ranks:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def check_finished(slurm: Slurm, folder: Path, name: str, job: str) -> None:
    """The job ends well, with every loss of the undisturbed run."""

    def is_finished() -> bool:
        slurm.begin_now(job)
        return slurm.state(job)["JobState"] not in ("PENDING", "RUNNING", "COMPLETING")

    wait_for(is_finished, f"job {job}", 300)
    log = (folder / "runs" / name / f"slurm-{job}.log").read_text()
    assert slurm.state(job)["JobState"] == "COMPLETED", log
    expected = losses(folder, "local")
    assert len(expected) == STEPS
    assert losses(folder, name) == pytest.approx(expected, rel=1e-6)


def test_two_nodes_train_as_two_processes_here(slurm, folder):
    job = submit(slurm, folder, "plain")
    check_finished(slurm, folder, "plain", job)
    assert slurm.state(job)["NumNodes"] == "2"
    assert slurm.state(job)["Restarts"] == "0"


def test_two_nodes_with_two_processes_each(slurm, folder):
    sizes = ("--launch.processes=2", "--training.micro_batch_size=2", "--parallel.dp_replicate=2")
    job = submit(slurm, folder, "four", *sizes)
    check_finished(slurm, folder, "four", job)


def test_ranks_get_the_variables_whatever_a_script_is_kept_from(slurm, folder):
    name, interface = "export", slurm.environ.get("GLOO_SOCKET_IFNAME", "lo")
    variables = f"{{OF_RUN: a, GLOO_SOCKET_IFNAME: {interface}}}"
    options = ("--launch.slurm={export: NONE}", f"--launch.environment={variables}")
    job = submit(slurm, folder, name, *options)
    wait_for_step(folder, name, 3)
    environs = [Path(f"/proc/{pid}/environ").read_text() for pid in slurm.ranks(job)]
    assert ["OF_RUN=a" in environ.split("\0") for environ in environs] == [True, True]
    check_finished(slurm, folder, name, job)


def test_srun_alone_joins_the_tasks(slurm, folder):
    slurm.call(
        *("srun", "-N2", "-n2", sys.executable, "-m", "shardwise", "train", "run.yaml", *RUN),
        "--training.output_dir=runs/srun",
        cwd=folder,
    )
    assert losses(folder, "srun") == pytest.approx(losses(folder, "local"), rel=1e-6)


def test_a_job_that_is_told_that_its_time_is_up_goes_on_later(slurm, folder):
    job = submit(slurm, folder, "usr1")
    wait_for_step(folder, "usr1", 10)
    slurm.call("scancel", "--signal=USR1", job)
    wait_for(lambda: slurm.state(job)["Restarts"] == "1", "the restart")
    log = (folder / "runs" / "usr1" / f"slurm-{job}.log").read_text()
    assert "stopped by SIGUSR1 after step" in log
    check_finished(slurm, folder, "usr1", job)


def test_a_cancelled_job_has_saved_and_stays_cancelled(slurm, folder):
    job = submit(slurm, folder, "cancelled")
    wait_for_step(folder, "cancelled", 10)
    slurm.call("scancel", job)
    wait_for(lambda: slurm.state(job)["JobState"] == "CANCELLED", "the end")
    checkpoints = folder / "runs" / "cancelled" / "checkpoints"
    wait_for(lambda: any(checkpoints.glob(f"step-*/{MANIFEST}")), "the checkpoint")
    assert slurm.state(job)["Restarts"] == "0"
    assert not slurm.call("squeue", "-h").strip()
    job = submit(slurm, folder, "cancelled")
    check_finished(slurm, folder, "cancelled", job)
    assert resumed_at(folder, "cancelled", job)[0] > 10


def check_saved_and_finished(slurm: Slurm, folder: Path, name: str, job: str) -> None:
    """The job, told of its limit, saves, goes on and ends; that is no failure."""
    wait_for(lambda: slurm.state(job)["Restarts"] == "1", "the restart")
    slurm.call("scontrol", "update", f"JobId={job}", "TimeLimit=30")
    check_finished(slurm, folder, name, job)
    (step,) = resumed_at(folder, name, job)
    log = (folder / "runs" / name / f"slurm-{job}.log").read_text()
    assert f"stopped by SIGUSR1 after step {step}" in log
    assert not list((folder / "runs" / name).glob("*.failures"))


def test_a_job_near_its_limit_saves_and_goes_on_later(slurm, folder):
    limit = ("--launch.time=00:30:00", "--launch.ahead_seconds=120")
    job = submit(slurm, folder, "limit", *limit)
    wait_for_step(folder, "limit", 30)
    with paused(slurm, job):  # so that the run is not done before
        slurm.call("scontrol", "update", f"JobId={job}", f"TimeLimit={minutes(slurm, job) + 1}")
        wait_for(lambda: f"warning signal 10 to JobId={job}" in slurm.log("slurmctld"), "USR1")
    check_saved_and_finished(slurm, folder, "limit", job)


def test_a_job_without_a_limit_of_its_own_is_told_of_its_partitions(slurm, folder):
    job = submit(slurm, folder, "partition")
    wait_for_step(folder, "partition", 30)
    slurm.call("scontrol", "update", f"JobId={job}", f"TimeLimit={minutes(slurm, job) + 4}")
    check_saved_and_finished(slurm, folder, "partition", job)


def test_a_preempted_job_goes_on_later_in_its_container(slurm, folder):
    for name, text in (("apptainer", APPTAINER), ("python", f'exec {sys.executable} "$@"\n')):
        (folder / name).write_text(f"#!/bin/bash\n{text}")
        (folder / name).chmod(0o755)
    job = submit(
        *(slurm, folder, "preempted", "--launch.nodes=1", "--launch.processes=2"),
        "--launch.container=image.sif",
        f"--launch.environment={{PATH: '{folder}:/usr/bin:/bin', PYTHONPATH: '{SOURCE}'}}",
    )
    wait_for_step(folder, "preempted", 30)
    urgent = ("sbatch", "--parsable", "-purgent", "-N2", "--exclusive", "--wrap=sleep 5")
    slurm.call(*urgent, "--output=/dev/null")
    wait_for(lambda: slurm.state(job)["Restarts"] == "1", "the restart")
    check_finished(slurm, folder, "preempted", job)
    assert resumed_at(folder, "preempted", job)[0] >= 20
    assert "in image.sif" in (folder / "runs" / "preempted" / f"slurm-{job}.log").read_text()


def test_a_rank_that_hangs_costs_a_restart(slurm, folder):
    job = submit(slurm, folder, "hang", "--launch.timeout_seconds=20")
    wait_for_step(folder, "hang", 30)
    os.kill(slurm.ranks(job)[0], signal.SIGSTOP)
    wait_for(lambda: slurm.state(job)["Restarts"] == "1", "the restart", 200)
    check_finished(slurm, folder, "hang", job)
    (step,) = resumed_at(folder, "hang", job)
    assert step >= 20
    assert step % 20 == 0


def test_a_dead_rank_costs_a_restart(slurm, folder):
    job = submit(slurm, folder, "rank")
    wait_for_step(folder, "rank", 30)
    slurm.call("scancel", "--signal=KILL", f"{job}.0")
    wait_for(lambda: slurm.state(job)["Restarts"] == "1", "the restart")
    check_finished(slurm, folder, "rank", job)
    assert resumed_at(folder, "rank", job)[0] >= 20


def test_a_dead_node_costs_a_restart(slurm, folder):
    job = submit(slurm, folder, "node")
    wait_for_step(folder, "node", 30)
    slurm.kill_node(NODES[1])
    wait_for(lambda: slurm.state(job)["Restarts"] == "1", "the restart", 200)
    slurm.start(NODES[1])
    check_finished(slurm, folder, "node", job)
    assert resumed_at(folder, "node", job)[0] >= 20


def test_a_run_goes_on_on_the_node_that_is_left(slurm, folder):
    job = submit(slurm, folder, "fewer", "--launch.min_nodes=1")
    wait_for_step(folder, "fewer", 30)
    assert slurm.state(job)["NumNodes"] == "2"
    slurm.kill_node(NODES[1])
    try:
        wait_for(lambda: slurm.state(job)["Restarts"] == "1", "the restart", 200)
        check_finished(slurm, folder, "fewer", job)
        assert slurm.state(job)["NumNodes"] == "1"
    finally:
        slurm.start(NODES[1])
    assert resumed_at(folder, "fewer", job)[0] >= 20


def test_a_mistake_is_not_started_again(slurm, folder):
    job = submit(slurm, folder, "mistake", "--data.train=nowhere.jsonl")
    wait_for(lambda: slurm.state(job)["JobState"] == "FAILED", "the end")
    assert slurm.state(job)["Restarts"] == "0"
    log = (folder / "runs" / "mistake" / f"slurm-{job}.log").read_text()
    assert "error: data.train: nowhere.jsonl matches no file" in log
