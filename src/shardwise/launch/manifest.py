"""Parts that the files for SkyPilot and Kubernetes share: how a node starts, and where it saves.

These launchers write a file and print the command that submits it. The output folder is one of the
cluster's, so the file lies beside the run file.
"""

import hashlib
import os
import re
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from shardwise.base.safety import write_output
from shardwise.config import Launch, RunConfig, UserError, require
from shardwise.config.ranges import shown

HEADER = "# Written by shardwise launch, which replaces it."
_CLAIM = re.compile(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?")
"""A name in Kubernetes."""
_NATIVE = ("cpu", "memory", "ephemeral-storage")
"""Kubernetes' own resources. Those of devices have the domain of who offers them in their names."""
Script = Callable[[RunConfig, str, Sequence[str]], str]
"""Returns the file of a run, given the run, the name of its file, and the overrides."""


def name_of(cfg: RunConfig) -> str:
    """Return a name for a run as the label of a host: a-z, 0-9 and dashes, at most 40.

    It is the output folder's and a hash of its whole path, as other runs may have folders of that
    name.
    """
    folder = cfg.training.output_dir
    name = re.sub(r"[^a-z0-9]+", "-", PurePosixPath(folder).name.lower()).strip("-")
    name = name if name[:1].isalpha() else f"run-{name}"
    digest = hashlib.sha256(folder.encode()).hexdigest()[:6]
    return f"{name[:33].strip('-')}-{digest}"


def start(cfg: RunConfig, run_file: str, overrides: Sequence[str], place: Sequence[str]) -> str:
    """Return the bash that each node runs; `place` are the options of torchrun for its place.

    One node needs no torchrun: its processes meet in a file, and nothing listens on a port.
    """
    launch = cfg.launch
    words = shlex.join(["-m", "shardwise", "train", run_file, *overrides, "--resume", "auto"])
    command = f"python {words} --nproc {launch.processes}"
    if launch.nodes > 1:
        command = " ".join(
            ["torchrun", f"--shutdown-timeout {seconds_to_save(cfg)}", *place, words]
        )
    variables = [f"export {key}={shlex.quote(value)}" for key, value in launch.environment.items()]
    # exec: SIGTERM, by which a node is taken away, is for the run, which then saves.
    return "\n".join(["set -e", *variables, *launch.before, f"exec {command}"]) + "\n"


def seconds_to_save(cfg: RunConfig) -> int:
    """Return how long a step and a checkpoint may take after a signal."""
    return max(1, round(cfg.launch.timeout_seconds))


def check_claims(launch: Launch, taken: set[str]) -> None:
    """Raise UserError for what Kubernetes would refuse, or mount in place of something else."""
    require(
        launch.container is not None,
        "launch.container is missing; give an image that has shardwise (see the Dockerfile)",
    )
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
        taken = {*taken, folder}
    for resource, amount in launch.resources.items():
        require(
            "/" in resource or resource in _NATIVE or resource.startswith("hugepages-"),
            f"launch.resources has {shown(resource)}, which no node of Kubernetes has; give a name "
            f"with its domain, such as nvidia.com/gpu, or one of {', '.join(_NATIVE)}, hugepages-*",
        )
        require(
            not isinstance(amount, bool),
            f"launch.resources has {resource}: {str(amount).lower()}; on Kubernetes give an amount",
        )


def check_saves(cfg: RunConfig, outlives: Sequence[str], kind: str) -> None:
    """Raise UserError unless the output folder lies in one of these folders that outlive nodes."""
    folder = PurePosixPath(os.path.normpath(cfg.training.output_dir))  # without `..`
    require(
        any(folder.is_relative_to(path) for path in outlives),
        f"training.output_dir {folder} would be lost with its node; put it into a folder of "
        f"launch.mounts that is {kind}, such as launch.mounts={{/data: NAME}}",
    )


def in_yaml(*documents: dict[str, Any]) -> str:
    """Return documents as a file that says who wrote it."""

    class Dumper(yaml.SafeDumper):
        """Writes texts of several lines as such, and what stands twice as it is."""

        def ignore_aliases(self, data: Any) -> bool:
            return True

    def text(dumper: yaml.SafeDumper, value: str) -> yaml.Node:
        style = "|" if "\n" in value else None
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)

    Dumper.add_representer(str, text)
    return f"{HEADER}\n" + yaml.dump_all(documents, Dumper=Dumper, sort_keys=False, width=1000)


def writer_of(script: Script, launcher: str, command: str) -> Callable[..., int]:
    """Return what writes a run's file beside the run file and prints how to submit it.

    UserError where a file of this name is somebody else's, or cannot be written.
    """

    def run(cfg: RunConfig, run_file: str, overrides: Sequence[str]) -> int:
        text, file = script(cfg, run_file, overrides), Path(run_file)
        file = file.with_suffix(f".{launcher}.yaml")
        try:
            is_ours = not file.exists() or (
                file.is_file() and file.read_text(encoding="utf-8").startswith(HEADER)
            )
            require(is_ours, f"{file} was not written by shardwise; move it, or use --dry-run")
            write_output(file, text)
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{file}: cannot write it ({error}); --dry-run prints it") from None
        print(f"wrote {file}; to submit it: {command} {shlex.quote(str(file))}")
        return 0

    return run
