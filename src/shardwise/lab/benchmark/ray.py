"""Runs the cells of a bench as Ray tasks, each on one node of a cluster.

All nodes see the folder of the bench, the working directory and the files that runs read.
"""

import contextlib
import os
import signal
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

from shardwise.base.records.cell import LOG
from shardwise.config import UserError, require
from shardwise.lab.benchmark.process import TRAIN, ProcessOutcome, now, run_command, timed
from shardwise.lab.benchmark.runner import CellRun, Engine
from shardwise.launch.ray_request import address_of, check_installed, connected, cpus_of


@contextlib.contextmanager
def on_ray() -> Generator[Engine]:
    """Give the engine that runs as many cells at a time as the cluster has room for."""
    check_installed()
    with connected(address_of({})):
        yield _run_all


def _run_all(
    todo: Sequence[CellRun], announce: Callable[[CellRun], None]
) -> Iterator[tuple[CellRun, ProcessOutcome]]:
    import ray
    from ray.exceptions import RayError, RayTaskError

    task = ray.remote(run_here)
    running: dict[Any, CellRun] = {}
    for run, resources in [(run, resources_of(run, ray.nodes())) for run in todo]:
        arguments = (run.arguments, str(run.folder.absolute()), run.limit)
        threads = str(_threads(run))
        reference = task.options(**resources).remote(*arguments, threads, os.getcwd())
        running[reference] = run
    while running:
        try:
            (reference,), _ = ray.wait(list(running), num_returns=1)
        except SystemError as error:  # so Ray wraps what the handler of a signal raises in it
            raise error.__cause__ or error from None
        run = running.pop(reference)
        try:
            outcome = ray.get(reference)
        except RayTaskError as error:
            raise error.cause from None
        except RayError:  # Ray has tried several times, on other nodes too
            run.folder.mkdir(exist_ok=True)
            (run.folder / LOG).touch()
            outcome = ProcessOutcome(-signal.SIGKILL, 0.0, now(), str(_threads(run)))
        announce(run)
        yield run, outcome


def resources_of(run: CellRun, nodes: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return what a cell takes of a node, in Ray's words; UserError where no node has that.

    `nodes` are those that Ray lists. Each rank has its CPUs, and a GPU where there are any. A cell
    that is timed takes all CPUs of the largest node that fits, so that it is alone there, and so
    that every timed cell runs on the same kind of node.
    """
    plan, device = run.state.cell.plan, run.state.cell.run["training"].get("device", "auto")
    sizes = [node["Resources"] for node in nodes if node["Alive"]]
    on_gpu = device != "cpu" and any(size.get("GPU") for size in sizes)
    num_gpus = plan.nproc if on_gpu else 0
    num_cpus = plan.nproc * _threads(run)
    fitting = [
        size["CPU"]
        for size in sizes
        if size.get("CPU", 0) >= num_cpus and size.get("GPU", 0) >= num_gpus
    ]
    require(
        bool(fitting),
        f"cell {plan.id} needs {num_cpus} CPUs and {num_gpus} GPUs on one node, which no node of "
        "the Ray cluster has; leave it out by --only, or add such a node",
    )
    return {"num_cpus": max(fitting) if plan.timed else num_cpus, "num_gpus": num_gpus}


def _threads(run: CellRun) -> int:
    """Return the CPUs of each rank, and so its threads: `cpus` of `launch.ray`."""
    return cpus_of(run.state.cell.run.get("launch", {}).get("ray", {}))


def run_here(
    arguments: Sequence[str], folder: str, limit: float, threads: str, directory: str
) -> ProcessOutcome:
    """Run a cell on this node, from a directory that it shares with the others."""
    if not (Path(directory).is_dir() and Path(folder).parent.is_dir()):
        raise UserError(
            f"node {os.uname().nodename} does not see {directory} and {Path(folder).parent}; start "
            "the bench in a folder that every node sees"
        )
    os.chdir(directory)
    os.environ["OMP_NUM_THREADS"] = threads

    def run(arguments: Sequence[str], log: Path, limit: float) -> int | None:
        return run_command([*TRAIN, *arguments], log, limit)

    return timed(run, arguments, Path(folder), limit)
