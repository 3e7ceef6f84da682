"""Two nodes on this machine: two network namespaces, joined by a cable, and torchrun in each."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path

from tests.clusters.cable import MTU, Cable, Traffic, open_end

ADDRESSES = ("10.77.0.1", "10.77.0.2")
HOSTS = ("n1", "n2")
"""The names that these addresses have in each node."""
INTERFACE = "cable"
"""The name of the network interface of each node."""
RANKS_PER_NODE = 2
STORE_PORT = 29400


def why_not() -> str | None:
    """Return why no two nodes can be made here; None if they can."""
    if os.geteuid() != 0:
        return "only root can make network namespaces"
    if shutil.which("ip") is None:
        return "no ip: apt-get install iproute2"
    name = f"shardwise-{os.getpid()}-probe"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if made.returncode != 0:
        return f"no network namespaces here: {made.stderr.strip()}"
    _ip("netns", "del", name)
    return None if os.access("/dev/net/tun", os.W_OK) else "no /dev/net/tun"


def _ip(*arguments: str) -> str:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, (arguments, done.stderr)
    return done.stdout


class Nodes:
    """The nodes, while they exist."""

    def __init__(self, folder: Path, is_counting: bool = True) -> None:
        self.folder, self.is_counting = folder, is_counting
        self.names = tuple(f"shardwise-{os.getpid()}-{i}" for i in range(len(ADDRESSES)))
        self.agents: list[subprocess.Popen] = []

    def __enter__(self) -> Nodes:
        lines = ["127.0.0.1 localhost", *map(" ".join, zip(ADDRESSES, HOSTS, strict=True))]
        self.hosts = self.folder / "hosts"
        self.hosts.write_text("".join(f"{line}\n" for line in lines))
        with ExitStack() as stack:  # removes what is there where something fails
            ends = []
            for i, (name, address) in enumerate(zip(self.names, ADDRESSES, strict=True)):
                device = f"sw{os.getpid()}-{i}"
                _ip("netns", "add", name)
                stack.callback(_ip, "netns", "del", name)
                ends.append(open_end(device))
                _ip("link", "set", device, "netns", name, "name", INTERFACE)
                # Without IPv6 nothing crosses but what processes send.
                off = ("sysctl", "-qw", "net.ipv6.conf.all.disable_ipv6=1")
                _ip("netns", "exec", name, *off)
                _ip("-n", name, "addr", "add", f"{address}/24", "dev", INTERFACE)
                up = ("mtu", str(MTU), "txqueuelen", "10000", "up")
                _ip("-n", name, "link", "set", INTERFACE, *up)
                _ip("-n", name, "link", "set", "lo", "up")
            self.cable = Cable((ends[0], ends[1]), self.is_counting)
            stack.callback(self.cable.close)
            stack.callback(self.end)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def end(self) -> None:
        """Kill all processes of the nodes."""
        for name in self.names:
            for pid in map(int, _ip("netns", "pids", name).split()):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        for agent in self.agents:
            agent.wait()

    def start(
        self, *overrides: str, by_launch: bool = False, environ: Mapping[str, str] | None = None
    ) -> None:
        """Start torchrun, or `shardwise launch --on torchrun`, in each node, to train `run.yaml` of
        the folder.
        """
        command_of = self._launch if by_launch else self._torchrun
        env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": INTERFACE}
        self.agents = []
        for i in range(len(self.names)):
            with (self.folder / f"node-{i}.log").open("w") as log:
                self.agents.append(
                    subprocess.Popen(
                        [*self.inside(i), *command_of(i), *overrides],
                        **{"cwd": self.folder, "stdout": log, "stderr": log},
                        env=env | dict(environ or {}),
                    )
                )

    def inside(self, node: int) -> list[str]:
        """Return what comes before a command that is to run in a node, where hosts have names."""
        bind = 'mount --bind "$0" /etc/hosts && exec "$@"'
        network = f"--net=/run/netns/{self.names[node]}"
        return ["nsenter", network, "unshare", "--mount", "sh", "-c", bind, str(self.hosts)]

    def _torchrun(self, node: int) -> list[str]:
        return [
            *(sys.executable, "-m", "torch.distributed.run"),
            *(f"--nnodes={len(ADDRESSES)}", f"--nproc-per-node={RANKS_PER_NODE}"),
            *(f"--master-addr={ADDRESSES[0]}", f"--master-port={STORE_PORT}"),
            *(f"--node-rank={node}", "-m", "shardwise", "train", "run.yaml"),
        ]

    def _launch(self, node: int) -> list[str]:
        options = {"rdzv-endpoint": f"{ADDRESSES[0]}:{STORE_PORT}", "local-addr": ADDRESSES[node]}
        return [
            *(sys.executable, "-m", "shardwise", "launch", "run.yaml", "--on=torchrun"),
            *(f"--launch.nodes={len(ADDRESSES)}", f"--launch.processes={RANKS_PER_NODE}"),
            *("--launch.restarts=0", f"--launch.torchrun={json.dumps(options)}"),
        ]

    def wait(self, seconds: float) -> list[int | None]:
        """Return the exit codes of the nodes, None of one that has not ended in so many seconds."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and any(agent.poll() is None for agent in self.agents):
            time.sleep(0.1)
            self.cable.check()
        return [agent.poll() for agent in self.agents]

    def log(self, node: int) -> str:
        """Return what a node's agent and ranks have printed."""
        return (self.folder / f"node-{node}.log").read_text()

    def train(self, *overrides: str) -> Traffic:
        """Train to a good end and return what crossed the cable."""
        before, kernels = dict(vars(self.cable.traffic)), self._sent()
        self.start(*overrides)
        codes = self.wait(600)
        assert codes == [0, 0], self.log(0) + self.log(1)
        counted = {key: value - before[key] for key, value in vars(self.cable.traffic).items()}
        traffic = Traffic(**counted)
        assert traffic.all == self._sent() - kernels, "the system has counted other bytes"
        return traffic

    def _sent(self) -> int:
        """Return the bytes that both nodes' interfaces have sent, as the system counts them."""
        shown = [_ip("-n", name, "-s", "-j", "link", "show", INTERFACE) for name in self.names]
        return sum(json.loads(text)[0]["stats64"]["tx"]["bytes"] for text in shown)
