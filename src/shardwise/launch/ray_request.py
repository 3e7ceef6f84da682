"""The request of a run to Ray Train, what a cluster is short of for it, and how workers end.

Nothing here imports Ray but `connected`, so that a dry run and a refusal need no Ray.
"""

import contextlib
import importlib.util
import os
import signal
import socket
import threading
from collections.abc import Generator, Mapping
from dataclasses import dataclass

from shardwise.base.process.ending import FAILED, Ending
from shardwise.config import RunConfig, UserError


@dataclass(frozen=True)
class Request:
    """Request to Ray Train."""

    address: str
    """Address of the cluster."""
    workers: int
    restarts: int
    placement: str
    """Ray's word for how the workers are spread over nodes."""
    cpus: int
    """CPUs of each worker, and its number of threads."""
    accelerator: str | None
    """The type of GPU that a worker needs."""
    environment: dict[str, str]


def request(cfg: RunConfig) -> Request:
    """Return what the section `launch` asks of Ray."""
    launch = cfg.launch
    options = launch.ray
    placement = "STRICT_SPREAD" if launch.processes == 1 else "PACK"
    accelerator = options.get("accelerator")
    return Request(
        address=address_of(options),
        workers=launch.nodes * launch.processes,
        restarts=launch.restarts_of_launch,
        placement="STRICT_PACK" if launch.nodes == 1 else placement,
        cpus=cpus_of(options),
        accelerator=None if accelerator is None else str(accelerator),
        environment=dict(launch.environment),
    )


def address_of(options: Mapping[str, object]) -> str:
    """Return the address of the cluster: an option, RAY_ADDRESS, or that of this machine's."""
    return str(options.get("address") or os.environ.get("RAY_ADDRESS") or "auto")


def cpus_of(options: Mapping[str, object]) -> int:
    """Return the CPUs of each process, which are its threads, too."""
    cpus = options.get("cpus", 1)
    assert isinstance(cpus, int)
    return cpus


def resources_of(cfg: RunConfig, wanted: Request, cluster: Mapping[str, float]) -> dict[str, int]:
    """Return the resources of each worker, where a cluster has these in all."""
    device = cfg.training.device
    can_have_gpu = wanted.accelerator is not None or cluster.get("GPU", 0) > 0
    on_gpu = device == "cuda" or (device == "auto" and can_have_gpu)
    return {"CPU": wanted.cpus} | ({"GPU": 1} if on_gpu else {})


def shortage(workers: int, resources: Mapping[str, int], cluster: Mapping[str, float]) -> str:
    """Return what a cluster is short of for workers with these resources; nothing if it is not."""
    return ", ".join(
        f"{workers * number} {name}s of which the cluster has {cluster.get(name, 0):g}"
        for name, number in resources.items()
        if workers * number > cluster.get(name, 0)
    )


class RankError(Exception):
    """The error of a worker whose rank has reported how it ends."""

    def __init__(self, ending: Ending) -> None:
        super().__init__(ending)
        self.ending = ending

    def __str__(self) -> str:
        return self.ending.reason


def first_cause(failures: Mapping[int, Exception], size: int) -> Ending:
    """Return the ending of a run of `size` ranks from the errors of those that have failed.

    What would happen again comes first. A rank that was killed has left no ending, and is the cause
    of what others report.
    """
    endings = [error.ending for error in failures.values() if isinstance(error, RankError)]
    killed = [rank for rank, error in failures.items() if not isinstance(error, RankError)]
    for ending in endings:
        if is_final(ending):
            return ending
    if not killed:
        return endings[0]
    rank = min(killed)
    return Ending(FAILED, f"rank {rank} of {size} died; see Ray's log of its worker", "")


def is_final(ending: Ending) -> bool:
    """Return whether a run that ended so would end so again, or was asked to stop."""
    return ending.status not in ("failed", "timeout")


def check_installed() -> None:
    """Raise UserError where Ray Train is not installed."""
    if importlib.util.find_spec("ray") is None:
        raise UserError("--on ray needs Ray, which is not installed; pip install 'ray[train]'")


@contextlib.contextmanager
def connected(address: str) -> Generator[None]:
    """Be connected to a Ray cluster in the block; UserError where there is none."""
    import ray

    handler = signal.getsignal(signal.SIGTERM)
    try:
        host, _, port = address.rpartition(":")
        if port.isdigit() and "/" not in host:  # Ray itself tries for minutes
            socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
        ray.init(address=address, logging_level="ERROR")
    except (OSError, RuntimeError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise UserError(
            f"no Ray cluster at {address} ({reason}); start one with `ray start --head`, or name "
            "its address in launch.ray.address or RAY_ADDRESS"
        ) from None
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)  # Ray has put its own in its place
    try:
        yield
    finally:
        ray.shutdown()
