"""A sweep as an array of jobs on a real Slurm gives the losses that the same sweep gives here."""

from __future__ import annotations

import json
import sys
from contextlib import chdir
from pathlib import Path

import pytest
import yaml

from shardwise.lab.benchmark.runner import bench
from shardwise.lab.report.folder import read_bench
from shardwise.lab.report.summary import caveats
from shardwise.lab.report.tables import make_rows
from tests.clusters.runs import prepare, wait_for
from tests.clusters.slurm import Slurm, started, why_not

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(why_not() is not None, reason=why_not() or ""),
]
SWEEP = {
    "base": "run.yaml",
    "set": {"training.steps": 4, "training.micro_batch_size": 2},
    "nproc": 2,
    "rounds": 2,
    "axes": {
        "strategy": {
            "single": {"nproc": 1, "parallel.data": "single"},
            "fsdp2": {"parallel.data": "fsdp2"},
            "one-row": {"nproc": 7, "parallel.data": "ddp"},  # 7 ranks do not divide the batch
        }
    },
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = prepare(tmp_path_factory.mktemp("bench"))
    with chdir(path):
        Path("sweep.yaml").write_text(yaml.safe_dump(SWEEP, sort_keys=False))
        bench("sweep.yaml", "runs/local")
    return path


def submit(slurm: Slurm, folder: Path, *options: str) -> str:
    return slurm.call(
        *(sys.executable, "-m", "shardwise", "bench", "sweep.yaml", "--on=slurm", *options),
        cwd=folder,
    )


def job_of(printed: str) -> str:
    return printed.split()[2].rstrip(":")


def state_of(slurm: Slurm, job: str) -> list[str]:
    return slurm.call("squeue", "-h", "-j", job, "-t", "all", "-r", "-o", "%T").split()


def wait_for_end(slurm: Slurm, job: str) -> None:
    over = {"COMPLETED", "FAILED", "CANCELLED"}
    wait_for(lambda: set(state_of(slurm, job)) <= over, f"job {job}", 400)


def test_an_array_of_jobs_is_the_bench(folder, tmp_path):
    with started(tmp_path) as slurm:
        printed = submit(slurm, folder, "--out=runs/slurm", "--dry-run")
        assert "#SBATCH --array=0-2\n" in printed  # two cells and a control; the third is refused
        assert not (folder / "runs" / "slurm").exists()

        job = job_of(submit(slurm, folder, "--out=runs/slurm"))
        # A job that is told that its time is up is queued again, and no other one of the array. The
        # last one's number is that of the array.
        out, last = folder / "runs" / "slurm", f"{job}_2"
        wait_for(lambda: (out / "control-single" / "round-1").exists(), "the last cell", 300)
        slurm.call("scancel", "--signal=USR1", last)
        log = out / f"slurm-{last}.log"
        wait_for(lambda: "stopped by SIGUSR1" in log.read_text(), "the signal")
        wait_for(lambda: slurm.state(last)["Reason"] == "BeginTime", "the queue")
        slurm.begin_now(last)
        wait_for_end(slurm, job)
        assert state_of(slurm, job) == ["COMPLETED"] * 3
        assert [slurm.state(f"{job}_{i}")["Restarts"] for i in range(3)] == ["0", "0", "1"]

        local, here = read_bench(out), read_bench(folder / "runs" / "local")
        assert local.records.keys() == here.records.keys()
        for name, record in local.records.items():
            assert record.status == here.records[name].status
            assert record.losses == pytest.approx(here.records[name].losses, rel=1e-6)
            jobs = {entry["job"] for entry in record.rounds}
            assert all(entry.startswith(f"Slurm job {job}_") for entry in jobs)
        lines = " ".join(caveats(make_rows(local)))
        assert "were not interleaved" in lines
        assert "in a job of its own" in lines
        assert "in a job of its own" not in " ".join(caveats(make_rows(here)))

        # The same command has nothing to do; with another round it submits what is left.
        assert "nothing is left to run" in submit(slurm, folder, "--out=runs/slurm")
        again = submit(slurm, folder, "--out=runs/slurm", "--only=single", "--rerun=single")
        wait_for_end(slurm, job_of(again))
        record = json.loads((out / "single" / "record.json").read_text())
        assert [entry["job"].split()[2] for entry in record["rounds"]] == [f"{job_of(again)}_0"] * 2
        slurm.call(sys.executable, "-m", "shardwise", "report", "runs/slurm", cwd=folder)
        assert "in a job of its own" in (out / "report.html").read_text()
