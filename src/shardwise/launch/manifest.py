"""What the files for SkyPilot and Kubernetes have in common: how a node starts, and where it saves.

These launchers write a file and print the command that submits it. The output folder is one of the
cluster's, so the file lies beside the run file.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from shardwise.config import RunConfig, UserError, require
from shardwise.safety import write_output

HEADER = "# Written by shardwise launch, which replaces it."


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
        # A step and a checkpoint may take so long after a signal.
        seconds = max(1, round(launch.timeout_seconds))
        command = " ".join(["torchrun", f"--shutdown-timeout {seconds}", *place, words])
    variables = [f"export {key}={shlex.quote(value)}" for key, value in launch.environment.items()]
    # exec: SIGTERM, by which a node is taken away, is for the run, which then saves.
    return "\n".join(["set -e", *variables, *launch.before, f"exec {command}"]) + "\n"


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
        """Writes texts of several lines as such."""

    def text(dumper: yaml.SafeDumper, value: str) -> yaml.Node:
        style = "|" if "\n" in value else None
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)

    Dumper.add_representer(str, text)
    return f"{HEADER}\n" + yaml.dump_all(documents, Dumper=Dumper, sort_keys=False, width=1000)


def write(text: str, run_file: str, launcher: str, command: str) -> int:
    """Write a file beside the run file, print how to submit it, and return the exit code.

    UserError where a file of this name is somebody else's, or cannot be written.
    """
    file = Path(run_file).with_suffix(f".{launcher}.yaml")
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
