"""A Slurm of two nodes on this machine: a controller, and two slurmd with ports of their own.

The nodes are network namespaces, joined by a cable, where this machine lets us make some. The
controller is on the first one. Elsewhere both are on loopback, under two names.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.clusters import nodes
from tests.clusters.nodes import ADDRESSES, HOSTS, INTERFACE, Nodes
from tests.clusters.runs import wait_for

NODES = HOSTS
LOOPBACK = "127.0.0.1"
PROGRAMS = ("slurmctld", "slurmd", "sbatch", "srun")


def why_not() -> str | None:
    """Return why no cluster can be started here; None if one can."""
    reason = None if os.geteuid() == 0 else "only root can start slurmd"
    if missing := [name for name in PROGRAMS if _path_of(name) is None]:
        reason = f"no {', '.join(missing)}: apt-get install slurmctld slurmd slurm-client"
    is_needed = os.environ.get("SHARDWISE_NEEDS_SLURM") == "1"
    assert reason is None or not is_needed, f"SHARDWISE_NEEDS_SLURM is 1: {reason}"
    return reason


def _path_of(program: str) -> str | None:
    return shutil.which(program, path=f"{os.environ['PATH']}:/usr/sbin")


@contextlib.contextmanager
def started(folder: Path) -> Iterator[Slurm]:
    """Have a cluster while a block runs."""
    with contextlib.ExitStack() as stack:
        namespaces = None
        if nodes.why_not() is None:
            namespaces = stack.enter_context(Nodes(folder, is_counting=False))
        yield stack.enter_context(Slurm(folder, namespaces))


class Slurm:
    """The cluster, while it runs."""

    def __init__(self, folder: Path, namespaces: Nodes | None) -> None:
        self.folder, self.namespaces = folder, namespaces
        self.environ = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
        self.environ["OMP_NUM_THREADS"] = "1"
        if namespaces is None:  # no name of a node is known here
            self.environ["MASTER_ADDR"] = LOOPBACK
            self._write_conf([LOOPBACK] * len(NODES))
        else:  # both nodes have the host name of this machine
            self.environ["GLOO_SOCKET_IFNAME"] = INTERFACE
            self._write_conf(ADDRESSES)
        self.daemons: dict[str, subprocess.Popen] = {}

    def _inside(self, name: str) -> list[str]:
        """Return what comes before a command of a node or of the controller."""
        if self.namespaces is None:
            return []
        return self.namespaces.inside(NODES.index(name) if name in NODES else 0)

    def _write_conf(self, addresses: Sequence[str]) -> None:
        host, ports = socket.gethostname(), free_ports(1 + len(NODES))
        (self.folder / "state").mkdir()
        lines = [
            "ClusterName=test",
            f"SlurmctldHost={host}({addresses[0]})",
            f"SlurmctldPort={ports[0]}",
            "SlurmUser=root",
            "SlurmdUser=root",
            "AuthType=auth/none",
            "CredType=cred/none",
            "MpiDefault=none",
            "ProctrackType=proctrack/linuxproc",
            "TaskPlugin=task/none",
            "SelectType=select/cons_tres",
            "SelectTypeParameters=CR_Core",
            "ReturnToService=2",
            "SlurmdParameters=config_overrides",
            "SlurmdTimeout=10",
            "KillWait=5",
            "SlurmctldDebug=debug",
            f"StateSaveLocation={self.folder}/state",
            f"SlurmdSpoolDir={self.folder}/spool-%n",
            f"SlurmctldPidFile={self.folder}/slurmctld.pid",
            f"SlurmdPidFile={self.folder}/%n.pid",
            *(
                f"NodeName={node} NodeHostname={host} NodeAddr={address} Port={port} CPUs=2"
                for node, address, port in zip(NODES, addresses, ports[1:], strict=True)
            ),
            "PreemptType=preempt/partition_prio",
            "PreemptMode=REQUEUE",
            "PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1",
            "PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=2",
        ]
        (self.folder / "slurm.conf").write_text("\n".join(lines) + "\n")

    def start(self, name: str) -> None:
        """Start the controller or the slurmd of a node."""
        program = "slurmctld" if name == "slurmctld" else "slurmd"
        path = _path_of(program)
        assert path is not None
        node = [] if name == "slurmctld" else ["-N", name]
        with (self.folder / f"{name}.log").open("a") as log:
            self.daemons[name] = subprocess.Popen(
                [*self._inside(name), path, "-D", *node],
                **{"env": self.environ, "stdout": log, "stderr": log},
            )

    def kill_node(self, name: str) -> None:
        """Kill a node's slurmd, the tasks there and what watches over them, as a power cut does."""
        daemon = self.daemons.pop(name)
        daemon.kill()
        daemon.wait()
        tasks = [pid for pid in _processes() if f"SLURMD_NODENAME={name}" in _words(pid, "environ")]
        watchers = {_parent(pid) for pid in tasks}
        watchers = {pid for pid in watchers if _words(pid, "cmdline")[0].startswith("slurmstepd")}
        assert tasks
        assert watchers
        for pid in (*watchers, *tasks):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def ranks(self, job: str) -> list[int]:
        """Return the processes of a job that train."""
        return [
            pid
            for pid in _processes()
            if f"SLURM_JOB_ID={job}" in (words := _words(pid, "environ"))
            and any(word.startswith("SLURM_STEP_ID=") for word in words)
            and {"shardwise", "train"} <= set(_words(pid, "cmdline"))
            and Path(_words(pid, "cmdline")[0]).name.startswith("python")
        ]

    def __enter__(self) -> Slurm:
        for name in ("slurmctld", *NODES):
            self.start(name)
        wait_for(lambda: self.call("sinfo", "-h", "-o", "%D %t").strip() == "2 idle", "two nodes")
        return self

    def __exit__(self, *_: object) -> None:
        for daemon in self.daemons.values():
            daemon.terminate()
        for daemon in self.daemons.values():
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()

    def call(self, *command: str, cwd: Path | None = None) -> str:
        """Run a command on the first node and return what it prints."""
        done = subprocess.run(
            [*self._inside("slurmctld"), *command],
            **{"env": self.environ, "cwd": cwd},
            **{"capture_output": True, "text": True, "check": False},
        )
        assert done.returncode == 0, (command, done.stdout, done.stderr)
        return done.stdout

    def state(self, job: str) -> dict[str, str]:
        """Return what Slurm says of a job, such as JobState."""
        words = self.call("scontrol", "show", "job", job).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def begin_now(self, job: str) -> None:
        """Let a job that was queued again begin, if it is waiting; Slurm makes it wait two minutes.

        At once is too early: a node still revokes it.
        """
        state = self.state(job)
        if state["JobState"] == "PENDING" and state["Reason"] == "BeginTime":
            time.sleep(5)
            self.call("scontrol", "update", f"JobId={job}", "StartTime=now")

    def log(self, name: str) -> str:
        """Return what a daemon has printed."""
        return (self.folder / f"{name}.log").read_text()


def free_ports(number: int) -> list[int]:
    sockets = [socket.socket() for _ in range(number)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def _processes() -> list[int]:
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]


def _words(pid: int, file: str) -> list[str]:
    """Return the arguments or variables of a process; one empty word if it has ended."""
    try:
        return Path(f"/proc/{pid}/{file}").read_text(errors="replace").split("\0")
    except OSError:
        return [""]


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
