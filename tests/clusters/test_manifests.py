"""What the files for SkyPilot and Kubernetes start trains on two nodes as two processes here do.

The nodes are two torchrun on this machine, with the variables that SkyPilot and Kubeflow Trainer
set. SkyPilot itself checks its file, in an environment of its own (`make test-clusters`).
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from shardwise.commands import cli
from shardwise.launch import kubernetes, skypilot
from tests.clusters.runs import losses, prepare, wait_for

pytestmark = pytest.mark.cluster
SKYPILOT = Path(__file__).parents[2] / ".venv-clusters" / "bin" / "python"
RUN = (
    *("--training.steps=120", "--training.save_every=20"),
    *("--training.micro_batch_size=4", "--parallel.data=fsdp2"),
)
LAUNCH = ("--launch.nodes=2", "--launch.container=image")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A run file and the outcome of its undisturbed run on two processes of this machine."""
    return prepare(tmp_path_factory.mktemp("run"), *RUN)


def written(folder: Path, where: str, monkeypatch, *options: str) -> list[dict[str, Any]]:
    monkeypatch.chdir(folder)
    mounts = f"--launch.mounts={{{folder}/runs: volume}}"
    output = f"--training.output_dir={folder}/runs/{where}"
    assert cli.main(["launch", "run.yaml", f"--on={where}", *RUN, mounts, output, *options]) == 0
    return list(yaml.safe_load_all((folder / f"run.{where}.yaml").read_text()))


def free_port() -> int:
    with socket.socket() as each:
        each.bind(("127.0.0.1", 0))
        return each.getsockname()[1]


def run_nodes(script: str, folder: Path, *environments: dict[str, str], stop: Path | None) -> str:
    """Run what the nodes run until all have ended; return what they print.

    With `stop`, the folder of the run, they get SIGTERM after ten of its steps.
    """
    # An environment on top of another one has that one's packages, and not its commands.
    torchrun = folder / "bin" / "torchrun"
    torchrun.parent.mkdir(exist_ok=True)
    torchrun.write_text(f'#!/bin/bash\nexec {sys.executable} -m torch.distributed.run "$@"\n')
    torchrun.chmod(0o755)
    path = f"{torchrun.parent}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    environ = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"}
    nodes = [
        subprocess.Popen(
            ["bash", "-c", script],
            cwd=folder,
            env={**environ, **each},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for each in environments
    ]
    try:
        if stop is not None:
            metrics = stop / "metrics.jsonl"
            wait_for(
                lambda: metrics.exists() and len(metrics.read_text().splitlines()) > 10,
                "a step",
                300,
            )
            for node in nodes:
                node.terminate()
        outputs = [node.communicate(timeout=300)[0] for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    text = "\n".join(outputs)
    assert all((node.returncode == 0) == (stop is None) for node in nodes), text
    return text


def test_a_skypilot_task_trains_and_resumes(folder, monkeypatch):
    (task,) = written(folder, "skypilot", monkeypatch, *LAUNCH)
    script = task["run"].replace(f"--master-port {skypilot.PORT}", f"--master-port {free_port()}")
    nodes = [
        {
            "SKYPILOT_NUM_NODES": "2",
            "SKYPILOT_NODE_RANK": str(rank),
            "SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.2",
        }
        for rank in range(2)
    ]
    run = folder / "runs" / "skypilot"
    assert "stopped by SIGTERM after step" in run_nodes(script, folder, *nodes, stop=run)
    assert "resuming after step" in run_nodes(script, folder, *nodes, stop=None)
    assert losses(folder, "skypilot") == pytest.approx(losses(folder, "local"), rel=1e-6)


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_trainjob_trains(nodes, folder, monkeypatch):
    files, job = written(
        folder,
        "kubernetes",
        monkeypatch,
        *LAUNCH,
        f"--launch.nodes={nodes}",
        f"--launch.processes={3 - nodes}",
        f"--training.output_dir={folder}/runs/on-{nodes}",
    )
    of_pod = folder / f"pod-{nodes}"
    of_pod.mkdir()
    for name, text in files["data"].items():
        (of_pod / name).write_text(text)
    script = files["data"]["start.sh"].replace(f"cd {kubernetes.WORK}", f"cd {folder}")
    script = script.replace(kubernetes.FILES, str(of_pod))
    trainer, port = job["spec"]["trainer"], str(free_port())
    assert trainer["numNodes"] == nodes
    pods = [
        {
            "PET_NNODES": str(nodes),
            "PET_NPROC_PER_NODE": str(trainer["numProcPerNode"]),
            "PET_NODE_RANK": str(rank),
            "PET_MASTER_ADDR": "127.0.0.1",
            "PET_MASTER_PORT": port,
        }
        for rank in range(nodes)
    ]
    run_nodes(script, folder, *pods, stop=None)
    expected = losses(folder, "local")
    assert losses(folder, f"on-{nodes}") == pytest.approx(expected, rel=1e-6)


@pytest.mark.skipif(not SKYPILOT.exists(), reason="SkyPilot is not there: make test-clusters")
def test_skypilot_takes_the_task(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["init"]) == 0
    resources = "--launch.resources={accelerators: H100:8, use_spot: true}"
    written(tmp_path, "skypilot", monkeypatch, *LAUNCH, resources)
    file = tmp_path / "run.skypilot.yaml"
    code = (
        "import sky, sys; task = sky.Task.from_yaml(sys.argv[1]); (wanted,) = task.resources; "
        "print(task.num_nodes, wanted.accelerators, wanted.use_spot, *task.volumes.values())"
    )
    command = [str(SKYPILOT), "-c", code]
    done = subprocess.run([*command, str(file)], capture_output=True, text=True, check=False)
    assert done.stdout.split("\n")[-2] == "2 {'H100': 8} True volume", done.stderr
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text(file.read_text().replace("num_nodes", "number_of_nodes"))
    done = subprocess.run([*command, str(wrong)], capture_output=True, text=True, check=False)
    assert "Invalid task YAML" in done.stderr
