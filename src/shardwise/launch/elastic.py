"""An elastic run (`launch.min_nodes`) on the nodes that are left: its ranks, and the spare ones.

Where the rows of a step or the axes of the layout do not fit all nodes that are left, the run goes
on with as many as they fit. The ranks of the others wait: they are needed when another node is
lost, or one comes back.
"""

import os
import socket
import sys
import time
from dataclasses import replace
from pathlib import Path

from shardwise.base import layouts
from shardwise.base.process.ending import FAILED, RunError
from shardwise.base.process.stop import on_signals
from shardwise.base.process.world import World
from shardwise.base.records.record import RunRecord
from shardwise.checkpoint.output_dir import RECORD
from shardwise.config import RunConfig, UserError
from shardwise.config.rules import refusals

LOOK_SECONDS = 0.5
"""How often a spare rank looks whether the run has ended, or a signal has come."""


def most_ranks(cfg: RunConfig, num_ranks: int) -> int:
    """Return how many of so many ranks an elastic run goes on with: those of the most whole nodes
    that no rule refuses, 0 if there are none.
    """
    for ranks in range(num_ranks, 0, -cfg.launch.processes):
        if not problems(cfg, ranks):
            return ranks
    return 0


def problems(cfg: RunConfig, num_ranks: int) -> list[str]:
    """Return why an elastic run cannot go on with so many ranks."""
    fitted = layouts.fitted(cfg, num_ranks)
    return [problem for _, problem in refusals(fitted, layouts.Facts(num_ranks))]


def fit(cfg: RunConfig, world: World) -> tuple[RunConfig, World]:
    """Return a run and this process's place in it, on the ranks that there are.

    Says so where some are lost. A spare rank keeps its number, which is then no smaller than
    `World.size`. UserError where no number of nodes that are left is enough.
    """
    if layouts.fitted(cfg, world.size) is cfg:
        return cfg, world
    left = f"{world.size} of {cfg.launch.nodes * cfg.launch.processes} processes"
    size = most_ranks(cfg, world.size)
    if not size:
        raise UserError(
            f"{left} are left, and the run cannot go on with them: "
            f"{problems(cfg, world.size)[0]}; or start all nodes again, and it resumes from its "
            "last checkpoint"
        )
    cfg = layouts.fitted(cfg, size)
    if world.rank == 0:
        wait = f", and {world.size - size} wait" if size < world.size else ""
        steps = layouts.num_microbatches(cfg, size)
        layout = layouts.layout_of(cfg.parallel)
        print(
            f"note: {left}{wait}: {layout}, {steps} micro-batches a step",
            file=sys.stderr,
            flush=True,
        )
    return cfg, replace(world, size=size)


def wait(cfg: RunConfig, world: World) -> int:
    """Be a spare rank until the others have ended; return its exit code: 0 if the run is done.

    The end of the connection to the first rank is their end. A signal ends it, under an agent at
    once; under Slurm a task that ended first would take the others, which save, with it.
    """
    numbers: list[int] = []
    has_agent = "TORCHELASTIC_RUN_ID" in os.environ
    with on_signals(numbers.append), _connected(cfg, world, numbers) as connection:
        connection.settimeout(LOOK_SECONDS)
        is_open = True
        while is_open and not (numbers and has_agent):
            try:
                is_open = connection.recv(1) != b""
            except TimeoutError:
                pass
            except OSError:
                is_open = False
    if numbers:
        return 128 + numbers[0]
    record = Path(cfg.training.output_dir, RECORD)
    return 0 if record.exists() and RunRecord.read(record).status == "ok" else FAILED


def _connected(cfg: RunConfig, world: World, numbers: list[int]) -> socket.socket:
    """Return a connection to the first rank, which may not be there yet; an idle one after a
    signal. RunError where it does not come within `launch.timeout_seconds`.
    """
    # Where the ranks meet.
    host, port = world.meets_at or (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    end = time.monotonic() + cfg.launch.timeout_seconds
    while not numbers:
        try:
            return socket.create_connection((host, port), LOOK_SECONDS)
        except OSError as error:
            if time.monotonic() > end:
                raise RunError(f"the first rank does not come to {host}:{port}: {error}") from None
            time.sleep(LOOK_SECONDS)
    return socket.socket()
