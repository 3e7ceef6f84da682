"""A Ray cluster of two nodes on this machine, which listens on loopback alone.

`python -m tests.clusters.ray_nodes` is the process that holds it: it prints the cluster's address,
then obeys lines that name a method of `Nodes`, and prints each when it is done.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

SETTINGS = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # else Ray takes the host's address for 127.0.0.1
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "20",
    "OMP_NUM_THREADS": "1",
}
NODE = {"num_cpus": 2, "object_store_memory": 80_000_000, "node_ip_address": "127.0.0.1"}


def why_not() -> str | None:
    """Return why no cluster can be started here; None if one can."""
    is_here = importlib.util.find_spec("ray") is not None
    return None if is_here else "no ray: pip install -c constraints.txt '.[ray]'"


class RayNodes:
    """The cluster, while it runs: a node on which commands run, and another one."""

    def __init__(self) -> None:
        self.folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # short: Ray has sockets in it
        Path(self.folder, "ray").mkdir()
        self.environ = {**os.environ, **SETTINGS, "RAY_TMPDIR": self.folder}
        self.commands: list[subprocess.Popen[str]] = []

    def __enter__(self) -> RayNodes:
        self.process = subprocess.Popen(
            (sys.executable, "-m", __name__),
            env=self.environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.environ["RAY_ADDRESS"] = self._answer()
        return self

    def __exit__(self, *_: object) -> None:
        for command in self.commands:
            if command.poll() is None:
                command.kill()
            command.communicate()
        self.process.communicate(timeout=60)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _answer(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the cluster has ended"
        return line.strip()

    def order(self, name: str) -> None:
        """Let the process that holds the cluster kill, or add, the other node."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{name}\n")
        self.process.stdin.flush()
        assert self._answer() == name

    def start(self, folder: Path, *arguments: str) -> subprocess.Popen[str]:
        """Start a command of shardwise in a folder; both its outputs go to one pipe."""
        command = subprocess.Popen(
            (sys.executable, "-m", "shardwise", *arguments),
            cwd=folder,
            env=self.environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.commands.append(command)
        return command


def _hold() -> None:
    from ray.cluster_utils import Cluster

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the end of the input ends the cluster
    cluster: Any = Cluster(initialize_head=True, head_node_args=NODE | {"include_dashboard": False})
    try:
        other = cluster.add_node(**NODE)
        print(cluster.address, flush=True)
        for line in sys.stdin:
            if line == "kill\n":
                cluster.remove_node(other, allow_graceful=False)
            else:
                other = cluster.add_node(**NODE)
            print(line, end="", flush=True)
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    _hold()
