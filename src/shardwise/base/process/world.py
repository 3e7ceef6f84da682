"""The place of this process among those of a run, its device, its share of the cores."""

from __future__ import annotations

import contextlib
import os
import re
import socket
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardwise.config import RunConfig, UserError

# torch is imported inside functions: a user's mistake is reported before that takes its seconds.
if TYPE_CHECKING:
    import torch


LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class World:
    """The place of this process among the processes of a run."""

    rank: int
    size: int
    local_rank: int  # index of its GPU among those that it sees
    init_method: str | None  # where the processes meet; None: all are on this machine
    store: str | None = None  # the file in which those of one machine meet; None: there is only one

    @property
    def is_spare(self) -> bool:
        """Whether the run goes on without this process: see `launch/elastic.py`."""
        return self.rank >= self.size

    @property
    def meets_at(self) -> tuple[str, int] | None:
        """The host and port of rank 0 where the ranks meet; None: they meet elsewhere."""
        at = re.fullmatch(r"tcp://(.+):(\d+)", self.init_method or "")
        return (at[1].strip("[]"), int(at[2])) if at else None

    @property
    def where(self) -> str:
        """The rank as messages name it; nothing where there is one process."""
        return f" on rank {self.rank} of {self.size}" if self.size > 1 else ""


ALONE = World(rank=0, size=1, local_rank=0, init_method=None)

STORE = "SHARDWISE_STORE"
"""The environment variable with the file, in a private folder, in which the ranks meet that
torchrun's agent starts on one node; each start has a file of its own."""
AT_RANK_0 = "SHARDWISE_AT_RANK_0"
"""The environment variable that says that MASTER_ADDR is of rank 0's own node."""
SOCKET_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""The environment variables that name the network interface on which gloo and NCCL listen."""


def loopback() -> str:
    """Return the network interface that only this machine's processes reach.

    Raises UserError where it is down.
    """
    import psutil

    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address == LOOPBACK for address in addresses):
            return name
    raise UserError(
        "no network interface has the address 127.0.0.1; bring the loopback interface up, or name "
        f"another one in {' and '.join(SOCKET_INTERFACES)}"
    )


def listener(host: str, port: int) -> socket.socket | None:
    """Return a socket that listens on a host's own address alone; torch's own stores listen on
    every interface.

    A name stands for its IPv4 address; an IPv6 address has to be given as such. None where a name
    has no such address or several, or one that other nodes do not reach: Debian's /etc/hosts gives
    a machine's own name an address of loopback. OSError where it is no address of this machine, or
    the port is taken.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        found = socket.getaddrinfo(host, port, family, socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError):
        return None
    address, *others = {str(place[4][0]) for place in found}
    is_local = address.startswith("127.") and not host.startswith(("localhost", "127."))
    if others or is_local:
        return None
    return socket.create_server((address, port), family=family)


@contextlib.contextmanager
def on_loopback(world: World) -> Generator[None]:
    """Let gloo and NCCL listen on loopback alone, if all processes are on this machine.

    Otherwise they listen on an address of the host, and accept anyone who connects as a peer. An
    interface that the user has named is kept.
    """
    names: list[str] = []
    host, _ = world.meets_at or (os.environ.get("MASTER_ADDR", ""), 0)
    if world.init_method is None or host.startswith("127."):
        names = [name for name in SOCKET_INTERFACES if name not in os.environ]
    with variables(dict.fromkeys(names, loopback()) if names else {}):
        yield


@contextlib.contextmanager
def variables(values: Mapping[str, str]) -> Generator[None]:
    """Set these environment variables in the block."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def find_world(env: Mapping[str, str]) -> World | None:
    """Return the place that the environment variables of torchrun or srun give this process.

    None where there are none. Raises UserError where torchrun's are incomplete or impossible.
    """
    if "RANK" in env and "WORLD_SIZE" in env:
        missing = [name for name in ("LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") if name not in env]
        if missing:
            raise UserError(
                f"RANK is set but not {' nor '.join(missing)}; start with torchrun, or unset RANK"
            )
        place = int(env["RANK"]), int(env["WORLD_SIZE"]), int(env["LOCAL_RANK"])
        if place[0] >= place[1]:
            raise UserError(f"RANK is {place[0]} of WORLD_SIZE {place[1]}; ranks count from 0")
        if STORE in env:
            return World(*place, None, f"{env[STORE]}-{env.get('TORCHELASTIC_RESTART_COUNT', 0)}")
        at = f"tcp://{env['MASTER_ADDR']}:{env['MASTER_PORT']}" if AT_RANK_0 in env else "env://"
        return World(*place, at)
    # Only srun sets a step. A batch script has SLURM_PROCID and SLURM_NTASKS too, and would wait
    # for tasks that never come. Slurm counts its own steps (batch script, shell) down from 2^32.
    size = int(env.get("SLURM_STEP_NUM_TASKS") or env.get("SLURM_NTASKS") or 1)
    step = int(env.get("SLURM_STEP_ID") or -1)
    if "SLURM_PROCID" not in env or size == 1 or not 0 <= step < 2**31:
        return None
    host = env.get("MASTER_ADDR")
    if not host and env.get("SLURM_STEP_NUM_NODES") == "1":
        host = LOOPBACK
    host = host or first_host(env.get("SLURM_STEP_NODELIST") or env["SLURM_JOB_NODELIST"])
    port = env.get("MASTER_PORT") or 15000 + (16 * int(env["SLURM_JOB_ID"]) + step) % 15000
    # With --gpus-per-task each task sees its own GPU only.
    sees_one_gpu = "," not in env.get("CUDA_VISIBLE_DEVICES", ",")
    local_rank = 0 if sees_one_gpu else int(env["SLURM_LOCALID"])
    return World(int(env["SLURM_PROCID"]), size, local_rank, f"tcp://{host}:{port}")


def first_host(node_list: str) -> str:
    """Return the first host of a Slurm node list: `node01` of `node[01-03,07],gpu5`."""
    first = re.split(r",(?![^\[]*\])", node_list)[0]
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first)


def pick_device(cfg: RunConfig, world: World) -> torch.device:
    """Return the device of this rank; raise UserError where there is no such GPU."""
    import torch

    if device_type(cfg) == "cpu":
        return torch.device("cpu")
    if world.local_rank >= torch.cuda.device_count():
        raise UserError(
            f"rank {world.rank} would take GPU {world.local_rank} of {torch.cuda.device_count()}; "
            "start fewer processes, or set training.device=cpu"
        )
    return torch.device("cuda", world.local_rank)


def device_type(cfg: RunConfig) -> str:
    """Return the type of the ranks' devices, cpu or cuda; UserError where there is no GPU."""
    import torch

    if cfg.training.device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if cfg.training.device == "cuda" and not torch.cuda.is_available():
        raise UserError("training.device is cuda but torch finds no GPU; set it to cpu or auto")
    return cfg.training.device


def threads_each(nproc: int) -> int:
    """Return how many threads each of `nproc` processes of this machine may have.

    This is OMP_NUM_THREADS, or each process's share of the cores. More threads than cores spin
    against each other: on 2 cores, 2 ranks of 2 threads are 5 times slower than 2 ranks of 1.
    """
    return int(os.environ.get("OMP_NUM_THREADS") or max(1, num_cores() // nproc))


def num_cores() -> int:
    """Return the number of cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
