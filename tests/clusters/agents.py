"""Nodes of this machine on loopback addresses, each with an agent of `launch --on torchrun`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil

STEPS = 80
# With this rate, rounding does not grow over the steps: ddp and fsdp2 differ by 1e-7.
RUN = (f"--training.steps={STEPS}", "--optimizer.lr=0.0005", "--measure.memory=false")
RUN += ("--training.micro_batch_size=4",)
SAVES = "--training.save_every=10"


class Node:
    """A node with an address of its own: its agent, and the processes that this one starts."""

    conf = "last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=4"
    """How soon the agents miss one another: torch's `rdzv-conf`."""

    def __init__(self, folder: Path, name: str, address: str, port: int, *overrides: str) -> None:
        options = {
            "rdzv-endpoint": f"127.0.0.1:{port}",
            "local-addr": address,
            "rdzv-conf": self.conf,
        }
        self.log = folder / f"{name}-{address}.log"
        with self.log.open("a") as log:
            self.agent = subprocess.Popen(
                [
                    *(sys.executable, "-m", "shardwise", "launch", "run.yaml", "--on=torchrun"),
                    *(*RUN, SAVES, "--launch.nodes=2", f"--training.output_dir=runs/{name}"),
                    *(f"--launch.torchrun={json.dumps(options)}", *overrides),
                ],
                cwd=folder,
                env={**os.environ, **self._environ(folder, address)},
                stdout=log,
                stderr=log,
            )

    def _environ(self, folder: Path, address: str) -> dict[str, str]:
        memory = folder / f"memory-{address}"
        memory.mkdir(exist_ok=True)
        return {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "SHARDWISE_MEMORY": str(memory)}

    def ranks(self) -> list[psutil.Process]:
        return psutil.Process(self.agent.pid).children()

    def kill(self) -> None:
        """Kill the agent and its ranks, as a power cut does."""
        for process in [psutil.Process(self.agent.pid), *self.ranks()]:
            process.kill()
        self.agent.wait()

    def says(self, text: str, more_than: int = 0) -> bool:
        return self.log.read_text().count(text) > more_than


def start(stack: ExitStack, *arguments: Any) -> Node:
    node = Node(*arguments)

    def end() -> None:
        if node.agent.poll() is None:
            node.kill()

    stack.callback(end)
    return node


def is_open(port: int) -> bool:
    return any(
        c.laddr.port == port and c.status == psutil.CONN_LISTEN for c in psutil.net_connections()
    )
