"""A run as workers of Ray Train, which starts them again until the run is finished."""

import shlex
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import yaml

from shardwise.base.process.ending import report_ending
from shardwise.config import RunConfig
from shardwise.launch.rank import Train, record
from shardwise.launch.ray_request import check_installed, is_final, request


def script(cfg: RunConfig, run_file: str, overrides: Sequence[str]) -> str:
    """Return what would be given to Ray Train, as text; Ray is not asked."""
    wanted = request(cfg)
    command = shlex.join(["shardwise", "train", run_file, *overrides, "--resume", "auto"])
    # A line break in a name would end the comment that it is written in.
    command = "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode()
        for letter in command
    )
    gpu = "" if cfg.training.device == "cpu" else ", and a GPU where the cluster has GPUs"
    return (
        f"# Each worker of Ray Train has {wanted.cpus} CPUs{gpu}, and is a rank of:\n"
        f"# {command}\n{yaml.safe_dump(wanted.__dict__, sort_keys=False)}"
    )


def run(cfg: RunConfig, train: Train) -> int:
    """Run `cfg` on a Ray cluster from start to end; return the exit code, as `launch` does."""
    wanted = request(cfg)
    check_installed()
    from shardwise.checkpoint import output_dir
    from shardwise.launch import ray_train

    cfg = replace(cfg, training=replace(cfg.training, resume="auto"))
    output_dir.claim(cfg, clear=False)
    folder = Path(cfg.training.output_dir).absolute()
    with tempfile.TemporaryDirectory(prefix=".ray-", dir=folder) as storage:
        ending = ray_train.run(cfg, wanted, train, storage)
    if ending is None:
        return 0
    record(cfg, ending)
    if not is_final(ending):  # its rank has printed where it failed
        ending = replace(ending, text=f"error: {ending.reason}")
    return report_ending(ending)
