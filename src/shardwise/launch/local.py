"""Start the ranks of a run on this machine, or join those that torchrun or Slurm started.

A run ends in one way, whatever happens in which of its processes.
"""

import contextlib
import gc
import os
import shlex
import sys
import threading
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from shardwise.base.process.ending import Ending, explain, report_ending
from shardwise.base.process.stop import on_signals
from shardwise.base.process.world import ALONE, World, device_type, find_world
from shardwise.checkpoint import memory_folder, output_dir
from shardwise.checkpoint.folder import BY_AGE, complete
from shardwise.checkpoint.output_lock import Lock
from shardwise.config import RunConfig, UserError, require
from shardwise.config.ranges import shown
from shardwise.launch import elastic
from shardwise.launch.group import Group, can_fork
from shardwise.launch.rank import Loop, Report, Train, import_all, rank_process, record, run_rank
from shardwise.training import way_on
from shardwise.training.trackers import check_installed

_RUNNING = threading.Lock()
# torch is imported inside functions: a user's mistake is reported before that takes its seconds.


def script(cfg: RunConfig, run_file: str, overrides: Sequence[str]) -> str:
    """Return the command that `run` stands for; UserError for more nodes than this machine."""
    _check_one_node(cfg)
    variables = [f"{key}={shlex.quote(v)}" for key, v in cfg.launch.environment.items()]
    nproc = str(cfg.launch.processes)
    words = ["shardwise", "train", run_file, "--nproc", nproc, *overrides]
    again = _until_finished(cfg)
    if again.launch != cfg.launch:
        words.append(f"--launch.restarts={again.launch.restarts}")
    if again.training != cfg.training:
        words += ["--resume", "auto"]
    return " ".join([*variables, shlex.join(words)]) + "\n"


def run(cfg: RunConfig, train: Train) -> int:
    """Run on as many processes as the section `launch` says; see `launch`."""
    _check_one_node(cfg)
    os.environ.update(cfg.launch.environment)
    return launch(_until_finished(cfg), cfg.launch.processes, train)


def _until_finished(cfg: RunConfig) -> RunConfig:
    """Return a run that restarts and resumes as on a cluster, where it does not say otherwise."""
    training = cfg.training
    if training.resume is None and not training.overwrite:
        training = replace(training, resume="auto")
    restarts = cfg.launch.restarts_of_launch
    return replace(cfg, training=training, launch=replace(cfg.launch, restarts=restarts))


def _check_one_node(cfg: RunConfig) -> None:
    require(
        cfg.launch.nodes == 1,
        f"launch.nodes is {cfg.launch.nodes}, and --on local is this machine; give --on slurm "
        "or torchrun, or set it to 1",
    )


def launch(cfg: RunConfig, nproc: int | None, train: Train, report: Report = report_ending) -> int:
    """Run `cfg` on `nproc` (None: 1) processes of this machine, or as one rank of a launcher's.

    Returns the exit code: 0 success, 2 the user's mistake, 3 out of memory, 128 + the number of a
    signal that asked the run to stop (Ctrl-C: 130), 1 anything else. `report` gets every ending
    that is no success, at last the one of that code; by default it prints the reason on stderr.
    `train` has to be importable, since new processes may have to look it up.
    """
    try:
        world = find_world(os.environ)
        _check_nproc(nproc, world)
        if world is not None:
            cfg, world = elastic.fit(cfg, world)
            if world.is_spare:
                return elastic.wait(cfg, world)
        elif nproc is None and "SLURM_STEP_ID" in os.environ and "SLURM_PROCID" in os.environ:
            cfg, _ = elastic.fit(cfg, ALONE)  # perhaps the one task that is left of an elastic run
        check_installed(cfg.measure.trackers)
        with _alone(), output_dir.locked(cfg, world) as lock:
            output_dir.claim(cfg, clear=world is None or world.rank == 0)
            before = _published(cfg)
            # A restart needs processes that may die alone.
            if nproc is not None and (nproc > 1 or cfg.launch.restarts):
                return start_processes(cfg, nproc, train, lock, report)

            def report_rank(ending: Ending) -> None:
                is_first = world is None or world.rank == 0
                has_saved = bool(_published(cfg) - before)
                report(way_on.after_save(cfg, ending, has_saved) if is_first else ending)

            ending = run_rank(cfg, world or ALONE, train, report_rank)
            return 0 if ending is None else ending.exit_code
    except SystemExit:
        raise
    except BaseException as error:  # torch has errors that are no Exception
        ending = explain(error)
        report(ending)
        return ending.exit_code
    finally:
        gc.unfreeze()  # what `import_all` has frozen


@contextlib.contextmanager
def _alone() -> Generator[None]:
    """Keep other runs out of this process; UserError where one, or a process group, is up."""
    dist = sys.modules.get("torch.distributed")
    is_up = dist is not None and dist.is_available() and dist.is_initialized()
    require(
        not is_up and _RUNNING.acquire(blocking=False),
        "in this process another run goes on, or a process group is up; let that end first",
    )
    try:
        yield
    finally:
        _RUNNING.release()


def _check_nproc(nproc: int | None, world: World | None) -> None:
    if nproc is not None and world is not None:
        raise UserError(
            f"--nproc {nproc}: a launcher has started {world.size} processes already; "
            "leave --nproc out"
        )
    is_number = nproc is None or (type(nproc) is int and nproc >= 1)
    require(is_number, f"--nproc is {shown(nproc)}; give at least 1")


def start_processes(
    cfg: RunConfig,
    nproc: int,
    train: Train,
    lock: Lock | None = None,
    report: Report = report_ending,
) -> int:
    """Run `cfg` on `nproc` new processes, and again after one has died (`launch.restarts`).

    Returns the exit code; `report` gets the ending of every failure, and the record the last one. A
    run of the training loop that a rule refuses ends before a process starts. Each process holds
    `lock` as this one does.
    """
    group = Group()
    with on_signals(group.on_signal):
        try:
            method = _prepare(cfg, nproc, train, group.check_signals)
            group.check_signals()
        except BaseException as error:
            record(cfg, explain(error))
            raise
        before = _published(cfg)
        num_restarts, most_restarts = 0, cfg.launch.restarts or 0
        while True:
            ending = group.run(partial(rank_process, cfg, nproc, train, lock), nproc, method)
            if ending is None:
                return 0
            published = {path.name for path, _ in _published(cfg) - before}
            has_results = not published.isdisjoint(output_dir.RESULTS)
            is_last = (
                num_restarts == most_restarts
                or ending.status not in ("failed", "timeout")
                or bool(group.signals)
            )
            if is_last:
                note, ending = "", way_on.after_save(cfg, ending, bool(published))
            elif has_results:
                note = "; the results were saved before, so it does not start again"
            else:
                num_restarts += 1
                note = f"; starting again ({num_restarts} of {most_restarts})"
            if sys.stdout.isatty():
                print()  # rank 0 may have died in the middle of the line of its progress bar
            report(replace(ending, text=f"{ending.text}{note}"))
            if is_last or has_results:
                record(cfg, ending)
                memory_folder.forget(cfg.training.output_dir)
                return ending.exit_code
            # A named checkpoint is older than any in memory, but no loss of these leaves the run
            # without it.
            has_copy = cfg.training.resume in (None, *BY_AGE) and memory_folder.has_name(
                cfg.training.output_dir
            )
            cfg = _for_restart(cfg, has_checkpoint=bool(published) or has_copy)


def _prepare(cfg: RunConfig, nproc: int, train: Train, check_signals: Callable[[], None]) -> str:
    """Import and check all that needs no ranks, and return how to start them: fork or spawn.

    Signals meanwhile are noted; `check_signals` acts on them where nothing is half imported.
    """
    torch_was_imported = "torch" in sys.modules
    import_all(train)
    import torch

    check_signals()
    device = device_type(cfg)
    if device == "cuda" and nproc > torch.cuda.device_count():
        raise UserError(
            f"--nproc is {nproc} but there are {torch.cuda.device_count()} GPUs here; "
            "lower it, or set training.device=cpu"
        )
    forks = can_fork(device, torch_was_imported)
    if forks:
        torch.set_num_threads(1)  # a pool of threads, once started here, would be missing in forks
    if isinstance(train, Loop):
        from shardwise.assembly.describe import describe
        from shardwise.checkpoint.resume import with_saved_adapter

        describe(with_saved_adapter(cfg), nproc)
    return "fork" if forks else "spawn"


def _published(cfg: RunConfig) -> set[tuple[Path, int]]:
    """Return the checkpoints and results in the output folder, with their times in nanoseconds.

    The time distinguishes a new one from an old one of the same name.
    """
    folder = cfg.training.output_dir
    paths = [*complete(folder), *output_dir.results(folder)]
    return {(path, path.stat().st_mtime_ns) for path in paths}


def _for_restart(cfg: RunConfig, has_checkpoint: bool) -> RunConfig:
    """Return the run that continues after a failure, with the output folder claimed for it."""
    if has_checkpoint:
        cfg = replace(cfg, training=replace(cfg.training, resume="auto"))
    else:  # it begins where it began before
        cfg = replace(cfg, training=replace(cfg.training, overwrite=True))
    output_dir.claim(cfg, clear=True)
    return cfg
