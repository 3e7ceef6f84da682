"""The task file that runs a run file on machines of a cloud, by SkyPilot.

`sky jobs launch` starts the task again after a failure and on other machines after a preemption;
each start resumes from the last whole checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shardwise.config import RunConfig, UserError, require
from shardwise.launch import manifest

PORT = 29500
"""Where the processes of several nodes meet, on the first one."""
PLACE = (
    '--nnodes "$SKYPILOT_NUM_NODES"',
    '--node-rank "$SKYPILOT_NODE_RANK"',
    '--master-addr "$(head -n 1 <<< "$SKYPILOT_NODE_IPS")"',
    f"--master-port {PORT}",
)


def script(cfg: RunConfig, run_file: str, overrides: Sequence[str]) -> str:
    """Return the task file. SkyPilot copies the current folder to each node; runs begin there."""
    launch = cfg.launch
    try:
        inside = Path(run_file).resolve().relative_to(Path.cwd().resolve())
    except ValueError:
        raise UserError(
            f"{run_file} is not in the current folder, which SkyPilot copies to the nodes; start "
            "from a folder that has it"
        ) from None
    require(
        launch.container is not None or bool(launch.before),
        "the machines have no shardwise; give an image that has it as launch.container, or say how "
        "to install it, such as launch.before=['pip install ./shardwise'], a clone in this folder",
    )
    mounts = {path: _source(source) for path, source in launch.mounts.items()}
    volumes = {path: source for path, (kind, source) in mounts.items() if kind == "volumes"}
    files = {path: source for path, (kind, source) in mounts.items() if kind == "file_mounts"}
    buckets = [path for path, source in files.items() if isinstance(source, dict)]
    if launch.nodes > 1:  # each node writes its part of a checkpoint
        manifest.check_saves(cfg, list(volumes), "a volume, which several nodes share")
    else:
        manifest.check_saves(cfg, [*volumes, *buckets], "a volume, or a bucket such as s3://NAME")
    resources: dict[str, Any] = {
        "job_recovery": {"max_restarts_on_errors": launch.restarts_on_cluster},
        **launch.resources,
    }
    if launch.container is not None:
        resources["image_id"] = f"docker:{launch.container}"
    place = [f"--nproc-per-node {launch.processes}", *PLACE]
    task = {
        "name": manifest.name_of(cfg),
        "workdir": ".",
        "num_nodes": launch.nodes,
        "resources": resources,
        "file_mounts": files,
        "volumes": volumes,
        "run": manifest.start(cfg, inside.as_posix(), overrides, place),
    }
    return manifest.in_yaml({key: value for key, value in task.items() if value})


def run(cfg: RunConfig, run_file: str, overrides: Sequence[str]) -> int:
    """Write the task file beside the run file, and print how to submit it."""
    text = script(cfg, run_file, overrides)
    return manifest.write(text, run_file, "skypilot", "sky jobs launch")


def _source(source: str) -> tuple[str, Any]:
    """Return the key of a task that mounts a source, and its value.

    A bucket is cached on the node: a checkpoint is renamed, and lines are added to files.
    """
    if "://" in source:
        return "file_mounts", {"source": source, "mode": "MOUNT_CACHED"}
    return ("file_mounts", source) if source.startswith(("/", "~", ".")) else ("volumes", source)
