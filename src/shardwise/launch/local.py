"""Start the processes of a run, or join those that torchrun or Slurm started, and end in one way whatever happens."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.checkpoint import output_dir
from shardwise.checkpoint.folder import complete
from shardwise.checkpoint.output_lock import Lock
from shardwise.config import RunConfig, UserError
from shardwise.launch.group import (
    INTERRUPTED,
    Requests,
    can_fork,
    report,
    run_group,
    start_in_group,
)
from shardwise.process import watchdog
from shardwise.process.ending import FAILED, PATIENCE_SECONDS, Ending, explain, guarded
from shardwise.process.world import (
    ALONE,
    World,
    device_type,
    find_world,
    on_loopback,
    pick_device,
    threads_each,
)
from shardwise.training.loggers import check_installed

# torch, and what needs it, is imported inside functions: the user's mistakes are told before that takes its seconds.
if TYPE_CHECKING:
    import torch

    from shardwise.interfaces import Mesh

Train = Callable[[RunConfig, "Mesh"], object]
"""What each rank runs, with the process group up."""


def launch(cfg: RunConfig, nproc: int | None = None, train: Train | None = None) -> int:
    """Run `cfg` on `nproc` (default 1) processes of this machine, or as one of those that a launcher started.

    Returns the exit code: 0 ok, 2 the user's mistake, 3 out of memory, 128 + the number of a signal that asked the run
    to stop (Ctrl-C: 130), 1 anything else; stderr has been told. `train` (default: `shardwise.training.loop.train`) has
    to be importable, since new processes may have to look it up.
    """
    try:
        return guarded(lambda: _launch(cfg, nproc, train))
    finally:
        gc.unfreeze()  # what `import_all` has frozen


def _launch(cfg: RunConfig, nproc: int | None, train: Train | None) -> int:
    world = find_world(os.environ)
    if nproc is not None:
        if world is not None:
            raise UserError(
                f"--nproc {nproc}: a launcher has started {world.size} processes already; leave --nproc out"
            )
        if nproc < 1:
            raise UserError(f"--nproc is {nproc}; give at least 1")
    check_installed(cfg.measure.trackers)
    with output_dir.locked(cfg, world) as lock:
        output_dir.claim(cfg, clear=world is None or world.rank == 0)
        if nproc is not None and nproc > 1:
            return start_processes(cfg, nproc, train, lock)
        run_rank(cfg, world or ALONE, train)
    return 0


def _to_stderr(ending: Ending) -> None:
    print(ending.text, file=sys.stderr, flush=True)


def run_rank(
    cfg: RunConfig,
    world: World,
    train: Train | None = None,
    tell: Callable[[Ending], None] = _to_stderr,
) -> None:
    """Be one rank: process group up, mesh, train, group down. An error is recorded in the output folder and raised.

    A rank that hangs cannot raise: it records that, calls `tell`, and its process ends with exit code 1.
    """
    if world.size == 1 and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
        signal.signal(
            signal.SIGTERM, lambda number, frame: sys.exit(128 + number)
        )  # with peers it may wait in C
    train = import_all(train)
    import torch.distributed as dist

    stacks = Path(cfg.training.output_dir, f"stacks-rank-{world.rank}.txt")

    def hanging() -> None:
        # Every rank's stack goes to the log: the one that hangs stands elsewhere than those that wait for it.
        with contextlib.suppress(OSError):  # the folder is gone
            print(
                f"stacks{world.where}:\n{stacks.read_text(encoding='utf-8')}",
                file=sys.stderr,
                flush=True,
            )
        reason = f"nothing was finished for {cfg.training.timeout_seconds:g} seconds (training.timeout_seconds)"
        ending = Ending(
            FAILED,
            reason,
            f"error: {reason}; see the stacks of every rank in {stacks.parent}",
            "timeout",
        )
        _record(cfg, ending)
        tell(ending)
        time.sleep(PATIENCE_SECONDS)  # the others are as late as this one, and have their say too

    try:
        with watchdog.watch(cfg.training.timeout_seconds, stacks, hanging), on_loopback(world):
            device = pick_device(cfg, world)
            _init_process_group(cfg, device, world)
            watchdog.beat()
            from shardwise.parallel.mesh import build_mesh

            train(cfg, build_mesh(cfg, device))
    except (KeyboardInterrupt, SystemExit):
        _record(cfg, INTERRUPTED)
        raise
    except BaseException as error:  # torch has errors that are no Exception
        ending = explain(error, world.where)
        if world.size > 1 and ending.exit_code == FAILED:
            # A rank that loses a peer raises what looks like an error of its own. So each waits before it ends (its
            # connections stay open, nobody fails of it): the launcher sees the cause first, and ends the others.
            time.sleep(PATIENCE_SECONDS)
        _record(cfg, ending)
        # With peers it may wait for one that is lost, but where all have stopped together.
        if dist.is_initialized() and (world.size == 1 or ending.status == "stopped"):
            dist.destroy_process_group()
        raise
    dist.destroy_process_group()


def import_all(train: Train | None) -> Train:
    """Import what a rank needs. Returns `train`, or the loop that is in its place.

    The garbage collector is off meanwhile, and leaves out what is there in the end. It would look
    through all modules again and again, which takes a quarter of the time.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        importlib.import_module("shardwise.parallel.mesh")
        if train is None:
            from shardwise.training.loop import train
    finally:
        if collects:
            gc.enable()
    gc.freeze()
    return train


def _init_process_group(cfg: RunConfig, device: torch.device, world: World) -> None:
    import torch
    import torch.distributed as dist

    # Longer than the watchdog waits: its end comes with stacks, a collective's own does not.
    timeout = timedelta(seconds=2 * cfg.training.timeout_seconds)
    options: dict[str, Any] = {"init_method": world.init_method}
    if world.init_method is None:
        store = dist.HashStore() if world.store is None else dist.FileStore(world.store, world.size)
        store.set_timeout(timeout)
        options = {"store": store}
    if device.type == "cuda":
        torch.cuda.set_device(device)
        options["device_id"] = device
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(
        backend, rank=world.rank, world_size=world.size, timeout=timeout, **options
    )
    dist.barrier()  # nobody writes into the output folder before everybody has claimed it


def _record(cfg: RunConfig, ending: Ending) -> None:
    output_dir.record_failure(cfg, ending.status, ending.reason)


def start_processes(
    cfg: RunConfig, nproc: int, train: Train | None = None, lock: Lock | None = None
) -> int:
    """Run `cfg` on `nproc` new processes, and again after one of them died (`training.max_restarts`).

    Returns the exit code of the one that ended the run, once it is told. A run of the loop that cannot be is refused
    before a process starts; what another `train` needs nobody knows. Each process holds `lock` as this one does.
    """
    with Requests() as requests:
        try:
            method = _prepare(cfg, nproc, train)
        except (KeyboardInterrupt, SystemExit):
            _record(cfg, INTERRUPTED)
            raise
        except BaseException as error:
            _record(cfg, explain(error))
            raise
        ending = _run_groups(
            cfg, partial(_process_main, nproc, train, lock), nproc, method, requests
        )
    if ending is None:
        return 0
    _record(cfg, ending)
    return ending.exit_code


def _prepare(cfg: RunConfig, nproc: int, train: Train | None) -> str:
    """Import and check what can be before there are ranks. Returns how they are to be started."""
    had_torch = "torch" in sys.modules
    import_all(train)
    import torch

    device = device_type(cfg)
    if device == "cuda" and nproc > torch.cuda.device_count():
        raise UserError(
            f"--nproc is {nproc} but there are {torch.cuda.device_count()} GPUs here; "
            "lower it, or set training.device=cpu"
        )
    forked = can_fork(device, had_torch)
    if forked:
        torch.set_num_threads(
            1
        )  # a pool of threads, once started here, would be missing in the forked ranks
    if train is None:
        from shardwise.assembly.describe import describe

        describe(cfg, nproc)
    return "fork" if forked else "spawn"


def _run_groups(
    cfg: RunConfig, main: Callable[..., None], nproc: int, method: str, requests: Requests
) -> Ending | None:
    """Start a group of processes, and again while one dies and restarts are left. None if the last one went well."""
    restarts = cfg.training.max_restarts
    before = _published(cfg)
    for attempt in range(restarts + 1):
        ending = _run_group(cfg, main, nproc, method, requests)
        if ending is None:
            return None
        new = {path.name for path, _ in _published(cfg) - before}
        again, tail = False, ""
        if ending.status in ("failed", "timeout") and attempt < restarts and not requests.numbers:
            again = new.isdisjoint(output_dir.RESULTS)
            why = "the results were saved before, so it does not start again"
            tail = f"; {f'starting again ({attempt + 1} of {restarts})' if again else why}"
        if sys.stdout.isatty():
            print()  # rank 0 may have been ended in the middle of the line of its progress bar
        if ending.text:
            print(f"{ending.text}{tail}", file=sys.stderr, flush=True)
        if not again:
            break
        if new:
            cfg = replace(cfg, training=replace(cfg.training, resume="auto"))
        else:  # it died before its first checkpoint: once more from where it began
            cfg = replace(cfg, training=replace(cfg.training, overwrite=True))
        output_dir.claim(cfg, clear=True)
    return ending


def _published(cfg: RunConfig) -> set[tuple[Path, int]]:
    """Checkpoints and results in the output folder, with the time in nanoseconds: one may take the name of another."""
    folder = cfg.training.output_dir
    return {
        (path, path.stat().st_mtime_ns) for path in [*complete(folder), *output_dir.results(folder)]
    }


def _run_group(
    cfg: RunConfig, main: Callable[..., None], nproc: int, method: str, requests: Requests
) -> Ending | None:
    """One group of processes, from start to end; None if all went well."""
    return run_group(partial(main, cfg), nproc, method, requests)


def _process_main(
    nproc: int, train: Train | None, lock: Lock | None, cfg: RunConfig, rank: int, folder: str
) -> None:
    start_in_group()
    from shardwise.metrics.live_tensors import freeze_imports

    freeze_imports()  # what was inherited is not looked through whenever this process collects its own garbage
    import torch

    torch.set_num_threads(threads_each(nproc))
    world = World(rank, nproc, rank, init_method=None, store=str(Path(folder, "store")))
    try:
        run_rank(cfg, world, train, partial(report, folder, rank))
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        ending = explain(error, world.where)
        report(folder, rank, ending)
        sys.stdout.flush()
        sys.stderr.flush()
        if (
            ending.status != "stopped"
        ):  # that is no failure, for which the launcher would kill the others
            os._exit(
                ending.exit_code
            )  # an orderly exit could wait on the device for a collective that no peer joins
