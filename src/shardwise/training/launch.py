"""Start the processes of a run, or join those that torchrun or Slurm started, and end in one way whatever happens."""

from __future__ import annotations

import contextlib
import json
import logging
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import asdict, replace
from datetime import timedelta
from multiprocessing import resource_tracker
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.config import RunConfig, UserError
from shardwise.training import output_dir, watchdog
from shardwise.training.checkpoint_folder import complete
from shardwise.training.ending import FAILED, PATIENCE_SECONDS, SIGNALS, Ending, explain, guarded
from shardwise.training.loggers import check_installed
from shardwise.training.world import ALONE, World, device_type, find_world, pick_device, threads_each

# torch, and what needs it, is imported inside functions: the user's mistakes are told before that takes its seconds.
if TYPE_CHECKING:
    import torch

    from shardwise.interfaces import Mesh

Train = Callable[[RunConfig, "Mesh"], object]
"""What each rank runs, with the process group up."""
INTERRUPTED = Ending(FAILED, "interrupted by a signal", "", "stopped")
"""Ctrl-C or a request to end, from the terminal or a scheduler, while there was no step to finish."""


def launch(cfg: RunConfig, nproc: int | None = None, train: Train | None = None) -> int:
    """Run `cfg` on `nproc` (default 1) processes of this machine, or as one of those that a launcher started.

    Returns the exit code: 0 ok, 2 the user's mistake, 3 out of memory, 128 + the number of a signal that asked the run
    to stop (Ctrl-C: 130), 1 anything else; stderr has been told. `train` (default: `shardwise.training.loop.train`) has
    to be importable, since new processes look it up.
    """
    return guarded(lambda: _launch(cfg, nproc, train))


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
    output_dir.claim(cfg, clear=world is None or world.rank == 0)
    if nproc is not None and nproc > 1:
        return start_processes(cfg, nproc, train)
    run_rank(cfg, world or ALONE, train)
    return 0


def _to_stderr(ending: Ending) -> None:
    print(ending.text, file=sys.stderr, flush=True)


def run_rank(
    cfg: RunConfig, world: World, train: Train | None = None, tell: Callable[[Ending], None] = _to_stderr
) -> None:
    """Be one rank: process group up, mesh, train, group down. An error is recorded in the output folder and raised.

    A rank that hangs cannot raise: it records that, calls `tell`, and its process ends with exit code 1.
    """
    import torch.distributed as dist

    if world.size == 1 and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # with peers it may wait in C
    stacks = Path(cfg.training.output_dir, f"stacks-rank-{world.rank}.txt")

    def hanging() -> None:
        # Every rank's stack goes to the log: the one that hangs stands elsewhere than those that wait for it.
        print(f"stacks{world.where}:\n{stacks.read_text(encoding='utf-8')}", file=sys.stderr, flush=True)
        reason = f"nothing was finished for {cfg.training.timeout_seconds:g} seconds (training.timeout_seconds)"
        ending = Ending(FAILED, reason, f"error: {reason}; see the stacks of every rank in {stacks.parent}", "timeout")
        _record(cfg, ending)
        tell(ending)
        time.sleep(PATIENCE_SECONDS)  # the others are as late as this one, and have their say too

    try:
        with watchdog.watch(cfg.training.timeout_seconds, stacks, hanging):
            device = pick_device(cfg, world)
            _init_process_group(cfg, device, world)
            watchdog.beat()
            from shardwise.parallel.mesh import build_mesh

            if train is None:
                from shardwise.training.loop import train
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


def _init_process_group(cfg: RunConfig, device: torch.device, world: World) -> None:
    import torch
    import torch.distributed as dist

    options: dict[str, Any] = {"init_method": world.init_method} if world.init_method else {"store": dist.HashStore()}
    if device.type == "cuda":
        torch.cuda.set_device(device)
        options["device_id"] = device
    backend = "nccl" if device.type == "cuda" else "gloo"
    # Longer than the watchdog waits: its end comes with stacks, a collective's own does not.
    timeout = timedelta(seconds=2 * cfg.training.timeout_seconds)
    dist.init_process_group(backend, rank=world.rank, world_size=world.size, timeout=timeout, **options)
    dist.barrier()  # nobody writes into the output folder before everybody has claimed it


def _record(cfg: RunConfig, ending: Ending) -> None:
    output_dir.record_failure(cfg, ending.status, ending.reason)


def start_processes(cfg: RunConfig, nproc: int, train: Train | None = None) -> int:
    """Run `cfg` on `nproc` new processes, and again after one of them died (`training.max_restarts`).

    Returns the exit code of the one that ended the run, once it is told.
    """
    import torch

    if device_type(cfg) == "cuda" and nproc > torch.cuda.device_count():
        raise UserError(
            f"--nproc is {nproc} but there are {torch.cuda.device_count()} GPUs here; "
            "lower it, or set training.device=cpu"
        )
    environment = {"OMP_NUM_THREADS": str(threads_each(nproc))}
    restarts = cfg.training.max_restarts
    before = _published(cfg)
    with _launcher(environment) as asked:
        for attempt in range(restarts + 1):
            ending = _run_group(cfg, nproc, train, asked)
            if ending is None:
                return 0
            new = {path.name for path, _ in _published(cfg) - before}
            again, tail = False, ""
            if ending.status in ("failed", "timeout") and attempt < restarts and not asked:
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
    _record(cfg, ending)
    return ending.exit_code


def _published(cfg: RunConfig) -> set[tuple[Path, int]]:
    """Checkpoints and results in the output folder, with the time in nanoseconds: one may take the name of another."""
    folder = cfg.training.output_dir
    return {(path, path.stat().st_mtime_ns) for path in [*complete(folder), *output_dir.results(folder)]}


def _run_group(cfg: RunConfig, nproc: int, train: Train | None, asked: list[int]) -> Ending | None:
    """One group of processes, from start to end; None if all went well."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    with tempfile.TemporaryDirectory(prefix="shardwise-") as folder:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=nproc,
            run_id="shardwise",
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",  # a free port
            local_addr="localhost",
            # A restart is a new group with a rendezvous of its own. Elastic's keeps the store of the dead one, in which
            # gloo finds dead addresses (pytorch issue 135712), and also starts again after the user's own mistakes.
            max_restarts=0,
            start_method="spawn",
            logs_specs=DefaultLogsSpecs(log_dir=folder),
            signals_to_handle="SIGHUP,SIGQUIT",  # SIGTERM and Ctrl-C are handed on by `_launcher`
        )
        rank = 0
        try:
            elastic_launch(config, _process_main)(cfg, train, folder)
        except SystemExit:  # asked to end before there was a process to ask
            return replace(INTERRUPTED, exit_code=128 + asked[0])
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            if not _report_path(folder, rank).exists():
                if asked:
                    return replace(INTERRUPTED, exit_code=128 + asked[0])
                reason = f"rank {rank} of {nproc} {_how_it_died(failure.exitcode)}"
                return Ending(FAILED, reason, f"error: {reason}")
        report = _report_path(folder, rank)
        return Ending(**json.loads(report.read_text(encoding="utf-8"))) if report.exists() else None


def _process_main(cfg: RunConfig, train: Train | None, folder: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # ends this process without a word; also sent when the launcher dies
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    world = find_world(os.environ)
    assert world is not None, "torch elastic sets RANK and the rest"

    def report(ending: Ending) -> None:
        _report_path(folder, world.rank).write_text(json.dumps(asdict(ending)), encoding="utf-8")

    try:
        run_rank(cfg, world, train, report)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        ending = explain(error, world.where)
        report(ending)
        sys.stdout.flush()
        sys.stderr.flush()
        if ending.status != "stopped":  # that is no failure, for which the launcher would kill the others
            os._exit(ending.exit_code)  # an orderly exit could wait on the device for a collective that no peer joins
    # Torch elastic keeps a process that is done until the launcher has heard of it: for ever, if that was killed.
    threading.Thread(target=_end_with_launcher, daemon=True).start()


def _end_with_launcher() -> None:
    launcher = multiprocessing.parent_process()
    assert launcher is not None
    launcher.join()
    os._exit(FAILED)


def _report_path(folder: str, rank: int) -> Path:
    return Path(folder, f"rank-{rank}.json")


def _how_it_died(exit_code: int) -> str:
    if exit_code >= 0:
        return f"ended with exit code {exit_code} without a word"
    hint = "; the system does that when memory runs out" if exit_code == -signal.SIGKILL else ""
    return f"was killed by {signal.Signals(-exit_code).name}{hint}"


@contextlib.contextmanager
def _launcher(environment: Mapping[str, str]) -> Generator[list[int]]:
    """What holds while this process only watches others: their environment, no log lines of torch elastic's.

    Yields the signals that have asked this process to end. The first is handed on, and the others finish their step and
    save; the second ends them at once. Ctrl-C goes to every process of a terminal. The new ones inherit it blocked, or
    those still importing would each print a traceback; here it gets through by a thread that does not block it.
    """
    os_environ, logging_disabled = dict(os.environ), logging.root.manager.disable
    handlers = {number: signal.getsignal(number) for number in (*SIGNALS, signal.SIGHUP, signal.SIGQUIT)}
    resource_tracker.ensure_running()  # multiprocessing's helper, which would unblock SIGINT when it is started later
    over = threading.Event()
    threading.Thread(target=over.wait, daemon=True).start()
    asked: list[int] = []

    def hand_on(number: int, frame: object) -> None:
        asked.append(number)
        ranks = multiprocessing.active_children()
        if not ranks:
            sys.exit(128 + number)
        for process in ranks:
            process.terminate() if len(asked) == 1 else process.kill()

    main = threading.current_thread() is threading.main_thread()  # Python sets handlers in no other
    if main:
        for number in SIGNALS:
            signal.signal(number, hand_on)
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    os.environ.update(environment)
    logging.disable(logging.CRITICAL)
    try:
        yield asked
    finally:
        logging.disable(logging_disabled)
        os.environ.clear()
        os.environ.update(os_environ)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        over.set()
        if main:
            for number, handler in handlers.items():
                signal.signal(number, handler)
