"""The task file that runs a run file on machines of a cloud, by SkyPilot.

After a failure or a preemption it is started again, from the last whole checkpoint.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shardwise.config import RunConfig, require
from shardwise.launch import manifest

PORT = 29500
"""Where the processes of several nodes meet, on the first one."""
PLACE = (
    '--nnodes "$SKYPILOT_NUM_NODES" --node-rank "$SKYPILOT_NODE_RANK"',
    f'--master-addr "$(head -n 1 <<< "$SKYPILOT_NODE_IPS")" --master-port {PORT}',
)


def script(cfg: RunConfig, run_file: str, overrides: Sequence[str]) -> str:
    """Return the task file. SkyPilot copies the current folder to each node; runs begin there."""
    launch, file, here = cfg.launch, Path(run_file).resolve(), Path.cwd().resolve()
    require(
        file.is_relative_to(here),
        f"{run_file} is not in the current folder, which SkyPilot copies to the nodes; start from "
        "a folder that has it",
    )
    require(
        launch.container is not None or bool(launch.before),
        "the machines have no shardwise; give an image that has it as launch.container, or say how "
        "to install it, such as launch.before=['pip install ./shardwise'], a clone in this folder",
    )
    volumes: dict[str, str] = {}
    files: dict[str, Any] = {}
    for path, source in launch.mounts.items():
        if "://" in source:  # cached on the node: checkpoints are renamed, and files grow
            files[path] = {"source": source, "mode": "MOUNT_CACHED"}
        else:
            (files if source.startswith(("/", "~", ".")) else volumes)[path] = source
    if launch.nodes > 1:  # each node writes its part of a checkpoint
        manifest.check_saves(cfg, list(volumes), "a volume, which several nodes share")
    else:
        buckets = [path for path, source in files.items() if isinstance(source, dict)]
        manifest.check_saves(cfg, [*volumes, *buckets], "a volume, or a bucket such as s3://NAME")
    recovery = {"job_recovery": {"max_restarts_on_errors": launch.restarts_of_launch}}
    image = {} if launch.container is None else {"image_id": f"docker:{launch.container}"}
    inside, each = file.relative_to(here).as_posix(), f"--nproc-per-node {launch.processes}"
    task = {"name": manifest.name_of(cfg), "workdir": ".", "num_nodes": launch.nodes}
    begin = manifest.start(cfg, inside, overrides, [each, *PLACE])
    resources = {**recovery, **launch.resources, **image}
    mounts = {"file_mounts": files, "volumes": volumes}
    mounts = {key: folders for key, folders in mounts.items() if folders}
    return manifest.in_yaml({**task, "resources": resources, **mounts, "run": begin})


run = manifest.writer_of(script, "skypilot", "sky jobs launch")
