"""One rank of a run: its process group comes up, it trains, its process group goes down."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.base.process import watchdog
from shardwise.base.process.ending import (
    FAILED,
    PATIENCE_SECONDS,
    Ending,
    RunError,
    explain,
    nothing_to_save,
    report_ending,
)
from shardwise.base.process.world import (
    LOOPBACK,
    STORE,
    World,
    listener,
    on_loopback,
    pick_device,
    threads_each,
)
from shardwise.checkpoint.output_dir import record_failure
from shardwise.checkpoint.output_lock import Lock
from shardwise.config import RunConfig
from shardwise.launch.group import leave_ending, take_signals
from shardwise.training import way_on

# torch is imported inside functions: a user's mistake is reported before that takes its seconds.
if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

    from shardwise.base.interfaces import Mesh
    from shardwise.training.instruments import Instruments

Function = Callable[[RunConfig, "Mesh"], object]


@dataclass(frozen=True)
class Loop:
    """The training loop, in a process that has still to import it."""

    instruments: Callable[[], Instruments]
    """Imports what the loop is given."""

    def imported(self) -> Function:
        """Import the loop and what it is given."""
        from shardwise.training.loop import train

        return partial(train, instruments=self.instruments())


Train = Function | Loop
"""Function that each rank runs while its process group is up."""
Report = Callable[[Ending], object]
"""Function that a rank calls with its ending."""


def run_rank(
    cfg: RunConfig, world: World, train: Train, report: Report = report_ending
) -> Ending | None:
    """Run `train` as one rank; return its ending, None for success.

    The ending is recorded in the output folder and reported. Requests to exit (KeyboardInterrupt,
    SystemExit) are raised again. A rank that hangs cannot return: its process ends with exit
    code 1.
    """
    in_main = threading.current_thread() is threading.main_thread()
    if world.size == 1 and in_main and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
        # So the run is recorded. With peers, Python may never come to run a handler: it may wait
        # in a collective.
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    if in_main and signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL:
        signal.signal(signal.SIGUSR1, _nothing_to_save)  # until the run takes signals itself
    function = import_all(train)
    import torch.distributed as dist
    from torch.multiprocessing import _prctl_pr_set_pdeathsig  # ty: ignore[import-not-found]

    if STORE in os.environ:  # the only agent has started it: nobody else would end it
        _prctl_pr_set_pdeathsig(signal.SIGTERM)
    stacks = Path(cfg.training.output_dir, f"stacks-rank-{world.rank}.txt")
    at_timeout = partial(_report_hang, cfg, world, stacks, report)
    try:
        with (
            watchdog.watch(cfg.launch.timeout_seconds, stacks, at_timeout),
            on_loopback(world),
            _without_denormals(),
        ):
            device = pick_device(cfg, world)
            _init_process_group(cfg, device, world)
            watchdog.beat()
            from shardwise.parallel.mesh import build_mesh

            function(cfg, build_mesh(cfg, device))
    except (KeyboardInterrupt, SystemExit) as error:
        record(cfg, explain(error))
        raise
    except BaseException as error:  # torch has errors that are no Exception
        ending = way_on.after_document(cfg, explain(error, world.where), error)
        if world.size > 1 and ending.exit_code == FAILED:
            # A rank that loses a peer fails too. Each one waits with its connections open, so that
            # the launcher sees the cause first and ends the others before they fail.
            time.sleep(PATIENCE_SECONDS)
        record(cfg, ending)
        # A rank that has failed would wait here for its peers; after a stop all of them come.
        if dist.is_initialized() and (world.size == 1 or ending.status == "stopped"):
            dist.destroy_process_group()
        report(ending)
        return ending
    dist.destroy_process_group()
    return None


def _nothing_to_save(number: int, frame: object) -> None:
    raise nothing_to_save(number)


@contextlib.contextmanager
def _without_denormals() -> Generator[None]:
    """Let this thread's CPU take numbers between 0 and 1e-38 for 0, and then as it did before.

    It takes a hundred cycles for one of them, and strong decays make many.
    """
    import torch

    did_before = bool(torch.tensor(1e-39) * 1.0 == 0)
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(did_before)


def rank_process(
    cfg: RunConfig, nproc: int, train: Train, lock: Lock | None, rank: int, folder: str
) -> None:
    """Be the process of one of `nproc` ranks of this machine; see `Group.run` for `folder`.

    While this process lives it holds `lock`, which it has inherited or received.
    """
    take_signals()
    import torch

    from shardwise.metrics.live_tensors import freeze_imports

    freeze_imports()  # this process's garbage collections need not look through what it inherited
    torch.set_num_threads(threads_each(nproc))
    world = World(rank, nproc, rank, init_method=None, store=str(Path(folder, "store")))
    ending = run_rank(cfg, world, train, partial(leave_ending, folder, rank))
    if ending is not None and ending.status != "stopped":
        sys.stdout.flush()
        sys.stderr.flush()
        # An orderly exit could wait on the device for a collective that no peer joins.
        os._exit(ending.exit_code)


def import_all(train: Train) -> Function:
    """Import what a rank needs and return what it runs.

    The garbage collector is off meanwhile, and later ignores what was imported: it would look
    through all modules again and again, which takes a quarter of the time.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        importlib.import_module("shardwise.parallel.mesh")
        function = train.imported() if isinstance(train, Loop) else train
    finally:
        if was_enabled:
            gc.enable()
    gc.freeze()
    return function


def record(cfg: RunConfig, ending: Ending) -> None:
    """Record an ending in the output folder, unless another rank has recorded one before."""
    record_failure(cfg, ending.status, ending.reason)


def _init_process_group(cfg: RunConfig, device: torch.device, world: World) -> None:
    import torch
    import torch.distributed as dist

    # Longer than the watchdog waits: its end comes with stacks, a collective's own does not.
    timeout = timedelta(seconds=2 * cfg.launch.timeout_seconds)
    options: dict[str, Any] = {"init_method": world.init_method}
    if world.init_method is None:
        store = dist.HashStore() if world.store is None else dist.FileStore(world.store, world.size)
        store.set_timeout(timeout)
        options = {"store": store}
    elif world.meets_at is not None:
        options = {"store": _store_at(*world.meets_at, world, timeout)}
    if device.type == "cuda":
        torch.cuda.set_device(device)
        options["device_id"] = device
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(
        backend, rank=world.rank, world_size=world.size, timeout=timeout, **options
    )
    dist.barrier()  # nobody writes into the output folder before everybody has claimed it


def _store_at(host: str, port: int, world: World, timeout: timedelta) -> dist.Store:
    """Return the store that rank 0 holds at a host's address alone, and on every interface only
    where it knows none; a line says so.

    RunError where the address is none of this machine, or the port is taken.
    """
    import torch.distributed as dist

    options: dict[str, Any] = {"timeout": timeout}
    if world.rank == 0:
        try:
            server = listener(host, port)
        except OSError as error:
            raise RunError(
                f"the first rank cannot listen on {host}:{port} ({error.strerror}); under srun set "
                "MASTER_ADDR to an address of its node, and MASTER_PORT to a free port; under "
                "torchrun give local-addr in launch.torchrun"
            ) from None
        _tell_where(host, server)
        if server is not None:
            options["master_listen_fd"] = server.detach()
    return dist.TCPStore(host, port, world.size, world.rank == 0, **options)


def _tell_where(host: str, server: socket.socket | None) -> None:
    """Say at which address the ranks meet, if that is not the one that was given."""
    if server is None:
        where = (
            f"{host} is no name of one address that other nodes reach, so the ranks meet on every "
            "interface of this node; to listen on one alone give its address: MASTER_ADDR under "
            "srun, local-addr in launch.torchrun"
        )
    elif (address := server.getsockname()[0]) in (host, LOOPBACK):
        return
    else:
        where = f"the ranks meet at {host}, whose address on its own node is {address}"
    print(f"note: {where}", file=sys.stderr, flush=True)


def _report_hang(cfg: RunConfig, world: World, stacks: Path, report: Report) -> None:
    """Print the stacks of this rank, which hangs or waits for one that does; record and report."""
    # The stacks of every rank go to the log: the rank that hangs is at another place in the code
    # than those that wait for it.
    with contextlib.suppress(OSError):  # the folder may be gone
        text = f"stacks{world.where}:\n{stacks.read_text(encoding='utf-8')}"
        print(text, file=sys.stderr, flush=True)
    seconds = cfg.launch.timeout_seconds
    reason = f"nothing was finished for {seconds:g} seconds (launch.timeout_seconds)"
    text = f"error: {reason}; see the stacks of every rank in {stacks.parent}"
    ending = Ending(FAILED, reason, text, "timeout")
    record(cfg, ending)
    report(ending)
    time.sleep(PATIENCE_SECONDS)  # the others are as late as this rank, and print their stacks too
