"""The parts that a run gives Ray Train: its workers, where they meet, when they start again."""

import asyncio
import contextlib
import os
import socket
import sys
import threading
from concurrent.futures import Future
from typing import Any

import ray
from ray.exceptions import RayError
from ray.train import FailureConfig, LoggingConfig, ScalingConfig, UserCallback
from ray.train import RunConfig as RayRunConfig
from ray.train.backend import Backend
from ray.train.torch import TorchConfig, TorchTrainer
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from shardwise.base.process import stop
from shardwise.base.process.ending import INTERRUPTED, Ending, explain, report_ending
from shardwise.base.process.world import AT_RANK_0
from shardwise.config import RunConfig, UserError
from shardwise.launch.local import launch
from shardwise.launch.rank import Train
from shardwise.launch.ray_request import (
    RankError,
    Request,
    connected,
    first_cause,
    is_final,
    resources_of,
    shortage,
)

QUIET = {"TORCH_CPP_LOG_LEVEL": "ERROR", "KINETO_LOG_LEVEL": "99"}
"""Variables that keep torch from warning where the memory of a run is measured, in a thread."""


def run(cfg: RunConfig, wanted: Request, train: Train, storage: str) -> Ending | None:
    """Run `cfg` on the workers that are wanted; return how it ended, None for success.

    `storage` is a folder on a disk that all nodes see, for Ray's own files. The first signal asks
    the ranks to finish their step and save; the second one ends this process and, with it, all
    workers.
    """
    with connected(wanted.address):
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        requests = ray.remote(num_cpus=0)(StopRequest).options(scheduling_strategy=here).remote()
        signals: list[int] = []

        def react(number: int) -> None:
            signals.append(number)
            if len(signals) > 1:
                sys.exit(128 + number)
            requests.ask.remote(number)

        job = {"cfg": cfg, "train": train, "folder": os.getcwd(), "requests": requests}
        with stop.on_signals(react):
            return _ending_of(_trainer(cfg, job, wanted, storage), wanted.workers)


def _trainer(cfg: RunConfig, job: dict[str, Any], wanted: Request, storage: str) -> TorchTrainer:
    cluster = ray.cluster_resources()
    resources = resources_of(cfg, wanted, cluster)
    if missing := shortage(wanted.workers, resources, cluster):
        note = f"note: the run needs {missing}; it begins once nodes have joined"
        print(note, file=sys.stderr, flush=True)
    return TorchTrainer(
        _rank,
        train_loop_config=job,
        torch_config=Meeting(),
        scaling_config=ScalingConfig(
            num_workers=wanted.workers,
            use_gpu="GPU" in resources,
            resources_per_worker=resources,
            placement_strategy=wanted.placement,
            accelerator_type=wanted.accelerator,
        ),
        run_config=RayRunConfig(
            storage_path=storage,
            failure_config=FailureConfig(max_failures=wanted.restarts),
            callbacks=[Restarts(wanted)],
            worker_runtime_env={"env_vars": QUIET | wanted.environment},
            logging_config=LoggingConfig(log_level="CRITICAL"),
        ),
    )


def _ending_of(trainer: TorchTrainer, size: int) -> Ending | None:
    """Run a trainer to its end, in a thread, since Python handles signals in the main thread."""
    future: Future[Ending | None] = Future()

    def fit() -> None:
        try:
            value = trainer.fit().return_value
            future.set_result(None if value is None else Ending(**value))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=fit, daemon=True).start()
    try:
        return future.result()
    except ray.train.WorkerGroupError as error:
        return first_cause(error.worker_failures, size)
    except ray.train.ControllerError as error:
        failure = error.controller_failure
        return failure.ending if isinstance(failure, RankError) else explain(failure)


class StopRequest:
    """An actor that tells the ranks when they are asked to stop."""

    def __init__(self) -> None:
        self._number: asyncio.Future[int] = asyncio.get_event_loop().create_future()

    async def ask(self, number: int) -> None:
        """Ask them to stop, as the signal of this number does."""
        if not self._number.done():
            self._number.set_result(number)

    async def asked(self) -> int:
        """Return the signal's number once there is one."""
        return await asyncio.shield(self._number)


class Restarts(UserCallback):
    """Lets Ray Train start the workers again only where that can help, and prints why."""

    def __init__(self, wanted: Request) -> None:
        self._wanted = wanted
        self._num_failures = 0

    def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
        """Raise the ending of a run that would end so again: Ray Train does not retry that."""
        ending = first_cause(worker_exceptions, self._wanted.workers)
        if is_final(ending):
            raise RankError(ending)
        self._num_failures += 1
        if self._num_failures <= self._wanted.restarts:
            note = f"starting again ({self._num_failures} of {self._wanted.restarts})"
            print(f"{ending.reason}; {note}", file=sys.stderr, flush=True)


class Meeting(TorchConfig):
    """Tells the ranks where they meet; the process group is made by each rank itself."""

    @property
    def backend_cls(self) -> type[Backend]:
        """Return the class whose hooks Ray Train calls before and after the ranks run."""
        return _MeetingPlace

    @property
    def train_func_context(self) -> Any:
        """Return the context in which a rank runs."""
        return contextlib.nullcontext


class _MeetingPlace(Backend):
    share_cuda_visible_devices = True  # so that a rank takes the GPU of its local rank

    def on_start(self, worker_group: Any, backend_config: Any) -> None:
        """Tell all workers an address of the first one."""
        address, port = worker_group.execute_single(0, _free_address)
        worker_group.execute(_meet_at, address, port)


def _free_address() -> tuple[str, int]:
    address = ray.util.get_node_ip_address()
    with socket.create_server((address, 0)) as server:
        return address, server.getsockname()[1]


def _meet_at(address: str, port: int) -> None:
    os.environ.update({"MASTER_ADDR": address, "MASTER_PORT": str(port), AT_RANK_0: "1"})


def _rank(job: dict[str, Any]) -> dict[str, Any] | None:
    """Be a rank of a run; return its ending if it was stopped, raise it if it failed."""
    context = ray.train.get_context()
    os.environ.update(
        RANK=str(context.get_world_rank()),
        WORLD_SIZE=str(context.get_world_size()),
        LOCAL_RANK=str(context.get_local_rank()),
    )
    endings: list[Ending] = []

    def report(ending: Ending) -> None:
        endings.append(ending)
        if not is_final(ending):  # else the command prints it, once
            report_ending(ending)

    threading.Thread(target=_take_requests, args=(job["requests"],), daemon=True).start()
    try:
        os.chdir(job["folder"])
    except OSError as error:
        node = f"node {socket.gethostname()}"
        mistake = UserError(
            f"{node} has no folder {job['folder']} ({error.strerror}); start the run in a folder "
            "that every node sees"
        )
        raise RankError(explain(mistake)) from None
    code = launch(job["cfg"], None, job["train"], report)
    if code == 0:
        return None
    ending = endings[-1] if endings else INTERRUPTED
    if ending.status == "stopped":  # all ranks stop after the same step
        return ending.__dict__
    raise RankError(ending)


def _take_requests(requests: Any) -> None:
    with contextlib.suppress(RayError):  # the cluster goes down
        stop.ask(ray.get(requests.asked.remote()))
