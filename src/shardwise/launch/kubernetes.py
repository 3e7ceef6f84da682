"""The manifest that runs a run file on Kubernetes: a TrainJob of Kubeflow Trainer (v2).

Trainer's runtime `torch-distributed` starts a pod on each node and tells torchrun its place by
variables PET_*. A pod that fails is started again; each start resumes from the last whole
checkpoint.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from shardwise.config import RunConfig, require
from shardwise.launch import manifest

FILES = "/etc/shardwise"
"""The folder in a pod with the run file and the script that starts it."""
WORK = "/work"
"""The folder in which runs begin: that of the Dockerfile."""
USER = 10001
"""The number of the Dockerfile's user."""
MEMORY = "/dev/shm"
"""The folder in memory through which the processes of a pod talk to one another."""
_CLAIM = re.compile(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?")
"""A name in Kubernetes."""


def script(cfg: RunConfig, run_file: str, overrides: Sequence[str]) -> str:
    """Return the manifest: a ConfigMap with the run file, and the TrainJob."""
    launch, name = cfg.launch, manifest.name_of(cfg)
    require(
        launch.container is not None,
        "launch.container is missing; give an image that has shardwise (see the Dockerfile)",
    )
    taken = {FILES, MEMORY}
    for path, source in launch.mounts.items():
        require(
            PurePosixPath(path).is_absolute() and _CLAIM.fullmatch(source) is not None,
            f"launch.mounts has {path}: {source}; on Kubernetes write an absolute folder and the "
            "name of a persistent volume claim, such as /data: my-claim",
        )
        folder = os.path.normpath(path)
        require(
            folder not in taken,
            f"launch.mounts has {path}, where something else is mounted; give another folder",
        )
        taken.add(folder)
    for resource, amount in launch.resources.items():
        require(
            not isinstance(amount, bool),
            f"launch.resources has {resource}: {str(amount).lower()}; on Kubernetes give an amount",
        )
    manifest.check_saves(cfg, list(launch.mounts), "a persistent volume claim")
    begin = manifest.start(cfg, f"{FILES}/run.yaml", overrides, [])
    files = {
        "run.yaml": Path(run_file).read_text(encoding="utf-8"),
        "start.sh": f"cd {WORK}\n{begin}",
    }
    shared_memory = {"name": "shm", "emptyDir": {"medium": "Memory"}}  # NCCL needs more than 64 MiB
    volumes: list[dict[str, Any]] = [{"name": "files", "configMap": {"name": name}}, shared_memory]
    mounts = [{"name": "files", "mountPath": FILES}, {"name": "shm", "mountPath": MEMORY}]
    for number, (path, claim) in enumerate(launch.mounts.items()):
        volume = f"mount-{number}"
        volumes.append({"name": volume, "persistentVolumeClaim": {"claimName": claim}})
        mounts.append({"name": volume, "mountPath": path})
    pod = {
        "containers": [{"name": "node", "volumeMounts": mounts}],
        "volumes": volumes,
        # After SIGTERM a run finishes its step and saves.
        "terminationGracePeriodSeconds": max(1, round(launch.timeout_seconds)),
        # The image's user, to whom a new volume does not belong.
        "securityContext": {"fsGroup": USER, "fsGroupChangePolicy": "OnRootMismatch"},
    }
    node = {"name": "node", "template": {"spec": {"template": {"spec": pod}}}}
    patch = {"template": {"spec": {"replicatedJobs": [node]}}}
    trainer: dict[str, Any] = {
        "image": launch.container,
        "command": ["bash", f"{FILES}/start.sh"],
        "numNodes": launch.nodes,
        "numProcPerNode": launch.processes,
    }
    if launch.resources:
        trainer["resourcesPerNode"] = {"limits": dict(launch.resources)}
    return manifest.in_yaml(
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": files},
        {
            "apiVersion": "trainer.kubeflow.org/v1alpha1",
            "kind": "TrainJob",
            "metadata": {"name": name},
            "spec": {
                "runtimeRef": {"name": "torch-distributed"},
                "trainer": trainer,
                "runtimePatches": [{"manager": "shardwise", "trainingRuntimeSpec": patch}],
            },
        },
    )


def run(cfg: RunConfig, run_file: str, overrides: Sequence[str]) -> int:
    """Write the manifest beside the run file, and print how to submit it."""
    text = script(cfg, run_file, overrides)
    return manifest.write(text, run_file, "kubernetes", "kubectl apply -f")
