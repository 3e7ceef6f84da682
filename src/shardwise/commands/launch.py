"""The command `shardwise launch`."""

import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from importlib import import_module
from pathlib import PurePosixPath

from shardwise.base import layouts
from shardwise.checkpoint.folder import BY_AGE, CHECKPOINTS
from shardwise.commands.command import Command, add_resume, add_run_file, overrides_of
from shardwise.commands.library import LOOP
from shardwise.config import Launch, RunConfig, UserError, require
from shardwise.config.keys import input_paths
from shardwise.config.rules import check
from shardwise.config.run_file import load_config
from shardwise.data.files import SUFFIXES, expanded, parts_of

LAUNCHERS = {
    "local": "this machine (the default)",
    "slurm": "a Slurm cluster, by a batch script",
    "torchrun": "torchrun's agents: start the same command on every node",
    "ray": "a Ray cluster, as workers of Ray Train",
    "skypilot": "clouds, by a task file for SkyPilot",
    "kubernetes": "Kubernetes, by a manifest for Kubeflow Trainer",
}
"""Where a run may go, by the name of its module in `shardwise.launch`.

The module has `script`, what `--dry-run` prints, and `run`, which starts the run or prints how to,
and returns the exit code. Both take the run, the name of its file, and the overrides.
"""
IN_THIS_PROCESS = ("local", "ray")
"""Launchers whose `run` starts ranks itself, and takes the run and what ranks run."""
_OF_SLURM = ("time", "ahead_seconds")
_OF_GPUS = ("gres", "tres-per-task", "accelerators", "any_of", "ordered")
"""Options that ask for GPUs, beside those that have `gpu` in their names."""
UNUSED = {
    "local": (*_OF_SLURM, "before", "container", "mounts", "resources"),
    "slurm": ("resources",),
    "torchrun": (*_OF_SLURM, "before", "container", "mounts", "resources"),
    "ray": (*_OF_SLURM, "before", "container", "mounts", "resources"),
    "skypilot": _OF_SLURM,
    "kubernetes": (*_OF_SLURM, "restarts"),
}
"""The keys of the section `launch` that a launcher does not use, without the options of others."""


def run(args: Namespace) -> int:
    """Start a run where it is to run."""
    overrides = overrides_of(args)
    cfg = load_config(args.run, overrides)
    if cfg.launch.min_nodes is not None:
        require(
            args.on in ("slurm", "torchrun"),
            f"launch.min_nodes is for slurm and torchrun, and not for {args.on}; leave it out",
        )
        from shardwise.launch import elastic

        each = cfg.launch.processes
        for problem in elastic.problems(cfg, cfg.launch.min_nodes * each):
            raise UserError(f"launch.min_nodes is {cfg.launch.min_nodes}: {problem}; or raise it")
        some = range(cfg.launch.min_nodes, cfg.launch.nodes)
        used = {nodes: elastic.most_ranks(cfg, nodes * each) // each for nodes in some}
        if fewer := [f"{num} of {nodes}" for nodes, num in used.items() if num < nodes]:
            print(
                f"note: if nodes are lost, the run continues on {', '.join(fewer)} remaining "
                "nodes, because its rows or axes cannot be divided among more",
                file=sys.stderr,
            )
    require(
        args.on == "local" or cfg.training.resume in (None, *BY_AGE),
        f"training.resume is {cfg.training.resume}, but on {args.on} each start resumes from the "
        "last checkpoint in training.output_dir; leave it out, and to begin with another run's "
        f"copy that into {cfg.training.output_dir}/{CHECKPOINTS}",
    )
    launcher = import_module(f"shardwise.launch.{args.on}")
    script = launcher.script(cfg, args.run, overrides)
    # Before a job waits in a queue: what each rank would find when it starts.
    check(cfg, layouts.Facts(cfg.launch.nodes * cfg.launch.processes))
    keys = UNUSED[args.on]
    if args.on == "slurm" and cfg.launch.container is None:
        keys += ("mounts",)
    if unused := [key for key in keys if getattr(cfg.launch, key) != getattr(Launch(), key)]:
        names = ", ".join(f"launch.{key}" for key in unused)
        print(f"note: --on {args.on} does not use {names}", file=sys.stderr)
    if cfg.training.device != "cpu" and (keys := _keys_for_gpus(cfg.launch, args.on)):
        print(f"note: the job asks for no GPU; set {keys}, or training.device=cpu", file=sys.stderr)
    if args.on == "slurm" and not any(key.startswith("cpus-per-") for key in cfg.launch.slurm):
        print(
            "note: Slurm gives each process one CPU unless the partition says otherwise; set "
            "launch.slurm.cpus-per-task",
            file=sys.stderr,
        )
    for note in _unseen(cfg, args.on):
        print(f"note: {note}", file=sys.stderr)
    if args.dry_run:
        print(script, end="")
        return 0
    if args.on in IN_THIS_PROCESS:
        return launcher.run(cfg, LOOP)
    return launcher.run(cfg, args.run, overrides)


def _unseen(cfg: RunConfig, launcher: str) -> Iterator[str]:
    """Yield a note on each input outside of the folders that the processes see."""
    here, mounts = os.getcwd(), cfg.launch.mounts
    if launcher == "kubernetes":
        from shardwise.launch.kubernetes import WORK

        begin, folders = WORK, [*mounts]
        note = "is in no folder of launch.mounts: only what is in the image is read there"
    elif launcher == "skypilot":
        begin, folders = "/copied", ["/copied", *mounts]
        note = "is neither in this folder, which is copied, nor in a folder of launch.mounts"
    elif launcher == "slurm" and cfg.launch.container is not None:
        begin, folders = here, [here, os.path.join(here, cfg.training.output_dir), *mounts]
        note = "is neither in this folder nor in one of launch.mounts, which the container sees"
    else:
        return
    for key, entry in input_paths(cfg):
        is_data = key in ("data.train", "data.validation")
        name = parts_of(entry)[0] if is_data else entry
        place = name if name.startswith("~") else os.path.join(begin, name)  # another's home there
        path = PurePosixPath(os.path.normpath(place))
        if not _is_name(name) and not any(path.is_relative_to(folder) for folder in folders):
            yield f"{key} {entry} {note}"


def _is_name(entry: str) -> bool:
    """Return whether an entry is a name on the hub, and no path."""
    is_owned = entry.count("/") == 1 and not entry.startswith(("/", ".", "~"))
    is_file = expanded(entry).exists() or PurePosixPath(entry).suffix.lower() in SUFFIXES
    return is_owned and not is_file


def _keys_for_gpus(launch: Launch, launcher: str) -> str:
    """Return the key that gives a job GPUs, where it has none of these; "" where it asks for some.

    A machine that is there already, as under torchrun, is not asked for.
    """
    each = launch.processes
    section, example = {
        "slurm": ("slurm", f"gpus-per-node: {each}"),
        "skypilot": ("resources", f"accelerators: H100:{each}"),
        "kubernetes": ("resources", f"nvidia.com/gpu: {each}"),
    }.get(launcher, ("", ""))
    asked = getattr(launch, section, {})
    if not section or any("gpu" in key or key in _OF_GPUS for key in asked):
        return ""
    return f"launch.{section}={{{example}}}"


def _add_arguments(parser: ArgumentParser) -> None:
    add_run_file(parser)
    parser.add_argument(
        "--on",
        choices=tuple(LAUNCHERS),
        default="local",
        help="; ".join(f"{name}: {where}" for name, where in LAUNCHERS.items()),
    )
    add_resume(parser)
    parser.add_argument(
        "--dry-run", action="store_true", help="print what would be started, and start nothing"
    )


COMMAND = Command(
    "launch",
    "Start a run on this machine or on a cluster, as its section launch says. It is "
    "started again, and resumes, until it is finished; for SkyPilot and Kubernetes a file is "
    "written.",
    _add_arguments,
    run,
)
