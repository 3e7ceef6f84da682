"""The manifest that runs a run file on Kubernetes: a TrainJob of Kubeflow Trainer (v2).

Trainer's runtime `torch-distributed` starts a pod on each node and tells torchrun its place by
variables PET_*. A pod that fails is started again, and resumes from the last whole checkpoint.
"""

from collections.abc import Sequence
from pathlib import Path

from shardwise.config import RunConfig
from shardwise.launch import manifest

FILES, MEMORY = "/etc/shardwise", "/dev/shm"
"""Folders of a pod: of the run file with its script, and in memory, where its processes talk."""
WORK, USER = "/work", 10001
"""The folder in which runs begin, and the number of the user: those of the Dockerfile."""


def script(cfg: RunConfig, run_file: str, overrides: Sequence[str]) -> str:
    """Return the manifest: a ConfigMap with the run file, and the TrainJob."""
    launch, metadata = cfg.launch, {"name": manifest.name_of(cfg)}
    manifest.check_claims(launch, {FILES, MEMORY})
    manifest.check_saves(cfg, list(launch.mounts), "a persistent volume claim")
    begin = manifest.start(cfg, f"{FILES}/run.yaml", overrides, [])
    text = Path(run_file).read_text(encoding="utf-8")
    files = {"run.yaml": text, "start.sh": f"cd {WORK}\n{begin}"}
    # In memory, since NCCL needs more than the 64 MiB that a container has there.
    sources = {FILES: {"configMap": metadata}, MEMORY: {"emptyDir": {"medium": "Memory"}}}
    for path, claim in launch.mounts.items():
        sources[path] = {"persistentVolumeClaim": {"claimName": claim}}
    volumes = [(f"volume-{number}", *volume) for number, volume in enumerate(sources.items())]
    mounts = [{"name": name, "mountPath": path} for name, path, _ in volumes]
    pod = {
        "containers": [{"name": "node", "volumeMounts": mounts}],
        "volumes": [{"name": name, **source} for name, _, source in volumes],
        "terminationGracePeriodSeconds": manifest.seconds_to_save(cfg),
        # The image's user, to whom a new volume does not belong.
        "securityContext": {"fsGroup": USER, "fsGroupChangePolicy": "OnRootMismatch"},
    }
    node = {"name": "node", "template": {"spec": {"template": {"spec": pod}}}}
    patch = {"template": {"spec": {"replicatedJobs": [node]}}}
    limits = {"resourcesPerNode": {"limits": launch.resources}} if launch.resources else {}
    number = {"numNodes": launch.nodes, "numProcPerNode": launch.processes}
    command = {"image": launch.container, "command": ["bash", f"{FILES}/start.sh"]}
    spec = {
        "runtimeRef": {"name": "torch-distributed"},
        "trainer": {**command, **number, **limits},
        "runtimePatches": [{"manager": "shardwise", "trainingRuntimeSpec": patch}],
    }
    config = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": files}
    job = {"apiVersion": "trainer.kubeflow.org/v1alpha1", "kind": "TrainJob"}
    return manifest.in_yaml(config, {**job, "metadata": metadata, "spec": spec})


run = manifest.writer_of(script, "kubernetes", "kubectl apply -f")
