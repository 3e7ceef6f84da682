"""The command `shardwise launch`."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from pathlib import Path

from shardwise.commands.command import Command, add_run_file
from shardwise.config import RunConfig, UserError, require
from shardwise.run_file import load_config


def run(args: Namespace) -> int:
    """Start a run where it is to run."""
    cfg = load_config(args.run, args.overrides)
    return ON[args.on](cfg, args)


def _local(cfg: RunConfig, args: Namespace) -> int:
    """Run on processes of this machine."""
    from shardwise.launch.local import launch

    nodes, processes = cfg.launch.nodes, cfg.launch.processes
    require(
        nodes == 1,
        f"launch.nodes is {nodes}, and --on local is this machine; give --on slurm, or set it to 1",
    )
    if args.dry_run:
        variables = [f"{key}={shlex.quote(v)}" for key, v in cfg.launch.environment.items()]
        words = ["shardwise", "train", args.run, "--nproc", str(processes), *args.overrides]
        print(" ".join([*variables, shlex.join(words)]))
        return 0
    os.environ.update(cfg.launch.environment)
    return launch(cfg, processes)


def _slurm(cfg: RunConfig, args: Namespace) -> int:
    """Write a batch script, and submit it."""
    from shardwise.launch import slurm

    text = slurm.script(cfg, args.run, args.overrides)
    if args.dry_run:
        print(text, end="")
        return 0
    require(
        shutil.which("sbatch") is not None,
        "no command sbatch here: is this a node of a Slurm cluster? --dry-run prints the script",
    )
    file = Path(cfg.training.output_dir, slurm.SCRIPT).absolute()
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")
    submitted = subprocess.run(
        ["sbatch", "--parsable", str(file)], capture_output=True, text=True, check=False
    )
    if submitted.returncode:
        raise UserError(f"sbatch refused {file}: {submitted.stderr.strip()}; change launch.options")
    job = submitted.stdout.strip().partition(";")[0]
    print(f"submitted job {job}: {file.parent}/slurm-{job}.log; to end it: scancel {job}")
    return 0


def _ray(cfg: RunConfig, args: Namespace) -> int:
    """Run on a Ray cluster, from start to end."""
    from shardwise.launch import ray

    if args.dry_run:
        print(ray.script(cfg, args.run, args.overrides), end="")
        return 0
    return ray.run(cfg, args.run, args.overrides)


ON: dict[str, Callable[[RunConfig, Namespace], int]] = {
    "local": _local,
    "slurm": _slurm,
    "ray": _ray,
}
"""What `--on` may be, and what starts a run there."""


def _add_arguments(parser: ArgumentParser) -> None:
    add_run_file(parser)
    parser.add_argument(
        "--on",
        choices=tuple(ON),
        default="local",
        help="this machine (the default), a Slurm cluster, by a batch script, or a Ray cluster",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print what would be started, and start nothing"
    )


COMMAND = Command(
    "launch",
    "Start a run on this machine or on a cluster, as its section launch says. Under Slurm it is "
    "started again until it is finished.",
    _add_arguments,
    run,
)
