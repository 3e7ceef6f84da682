"""The image of the Dockerfile, built where a builder and the base are there.

SHARDWISE_BASE names another base, such as a local one, where no registry can be reached.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.cluster
ROOT = Path(__file__).parents[2]
IMAGE = "localhost/shardwise:test"
TRAIN = "cd /tmp && shardwise init && shardwise train run.yaml --nproc 2 --training.steps=3"


def builder() -> list[str]:
    """The command that builds images here; skips without one, and where it gets no base."""
    if shutil.which("docker") and not call("docker", "info").returncode:
        return ["docker", "build"]
    if not shutil.which("buildah"):
        pytest.skip("no docker that runs, and no buildah")
    return ["buildah", "bud", "--isolation", "chroot"]


def call(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_it_builds_and_trains_without_a_network():
    command = builder()
    base = os.environ.get("SHARDWISE_BASE")
    options = ["--build-arg", "EXTRAS=data,report"]
    options += ["--build-arg", f"BASE={base}"] if base else []
    built = call(*command, *options, "--tag", IMAGE, str(ROOT))
    if built.returncode and not base and "RUN apt-get" not in built.stdout:
        pytest.skip(f"cannot get the base: {built.stderr.strip().splitlines()[-1]}")
    assert built.returncode == 0, built.stdout + built.stderr
    if command[0] == "docker":
        run = ["docker", "run", "--rm", "--network=none", IMAGE]
    else:
        container = call("buildah", "from", IMAGE).stdout.strip()
        run = ["buildah", "run", "--isolation", "chroot", container, "--"]
    try:
        trained = call(*run, "bash", "-c", f"id -u && {TRAIN} && ls runs/run")
    finally:
        if command[0] != "docker":
            call("buildah", "rm", container)
    assert trained.returncode == 0, trained.stdout + trained.stderr
    lines = trained.stdout.splitlines()
    assert lines[0] == "10001"
    assert "metrics.jsonl" in lines
