"""Where this process stands: its place among those of the run, its device, its share of the cores."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardwise.config import RunConfig, UserError

# torch is imported inside functions: the user's mistakes are told before that takes its seconds.
if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class World:
    """The place of this process among the processes of a run."""

    rank: int
    size: int
    local_rank: int  # index of its GPU among those it sees
    init_method: str | None  # where the processes meet; None: all are on this machine
    store: str | None = (
        None  # the file in which those of one machine meet; None: there is only this one
    )

    @property
    def where(self) -> str:
        """For messages; nothing where there is one process."""
        return f" on rank {self.rank} of {self.size}" if self.size > 1 else ""


ALONE = World(rank=0, size=1, local_rank=0, init_method=None)


SOCKET_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""The environment variables that name the network interface on which gloo and NCCL listen."""


def loopback() -> str:
    """The network interface that only processes of this machine reach. Raises UserError where it is down."""
    import psutil

    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address == "127.0.0.1" for address in addresses):
            return name
    raise UserError(
        "no network interface has the address 127.0.0.1; bring the loopback interface up, or name another one in "
        f"{' and '.join(SOCKET_INTERFACES)}"
    )


@contextlib.contextmanager
def on_loopback(world: World) -> Generator[None]:
    """Let gloo and NCCL listen where only this machine reaches them, if all processes are here.

    They listen on any address of the host's otherwise, and take whoever connects for a peer. A user who has named an
    interface is obeyed.
    """
    names = [
        name for name in SOCKET_INTERFACES if name not in os.environ and world.init_method is None
    ]
    if names:
        os.environ.update(dict.fromkeys(names, loopback()))
    try:
        yield
    finally:
        for name in names:
            del os.environ[name]


def find_world(env: Mapping[str, str]) -> World | None:
    """The place that torchrun's or srun's environment variables give this process; None where there are none.

    Raises UserError where torchrun's are incomplete.
    """
    if "RANK" in env and "WORLD_SIZE" in env:
        missing = [name for name in ("LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") if name not in env]
        if missing:
            raise UserError(
                f"RANK is set but not {' nor '.join(missing)}; start with torchrun, or unset RANK"
            )
        return World(int(env["RANK"]), int(env["WORLD_SIZE"]), int(env["LOCAL_RANK"]), "env://")
    # Only srun sets a step. A batch script has SLURM_PROCID and SLURM_NTASKS too, and would wait for tasks that never
    # come. Slurm counts its own steps (batch script, interactive shell) down from 2^32.
    size = int(env.get("SLURM_STEP_NUM_TASKS") or env.get("SLURM_NTASKS") or 1)
    step = int(env.get("SLURM_STEP_ID") or -1)
    if "SLURM_PROCID" not in env or size == 1 or not 0 <= step < 2**31:
        return None
    host = env.get("MASTER_ADDR") or first_host(
        env.get("SLURM_STEP_NODELIST") or env["SLURM_JOB_NODELIST"]
    )
    port = env.get("MASTER_PORT") or 15000 + (16 * int(env["SLURM_JOB_ID"]) + step) % 15000
    sees_one_gpu = (
        env.get("CUDA_VISIBLE_DEVICES", ",").count(",") == 0
    )  # with --gpus-per-task each task its own
    local_rank = 0 if sees_one_gpu else int(env["SLURM_LOCALID"])
    return World(int(env["SLURM_PROCID"]), size, local_rank, f"tcp://{host}:{port}")


def first_host(node_list: str) -> str:
    """The first host of a Slurm node list: `node01` of `node[01-03,07],gpu5`."""
    first = re.split(r",(?![^\[]*\])", node_list)[0]
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first)


def pick_device(cfg: RunConfig, world: World) -> torch.device:
    """The device this rank computes on. Raises UserError where there is no such GPU."""
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
    """Of the device of each rank: cpu or cuda."""
    import torch

    if cfg.training.device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if cfg.training.device == "cuda" and not torch.cuda.is_available():
        raise UserError("training.device is cuda but torch finds no GPU; set it to cpu or auto")
    return cfg.training.device


def threads_each(nproc: int) -> int:
    """Threads of each of `nproc` processes of this machine: OMP_NUM_THREADS, or its share of the cores.

    More threads than cores spin against each other: 2 ranks of 2 threads on 2 cores are 5 times slower than of 1.
    """
    return int(os.environ.get("OMP_NUM_THREADS") or max(1, num_cores() // nproc))


def num_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
