"""Runs a sweep in rounds.

Each run is a `shardwise train` with processes and a time limit, and leaves a record.
"""

import contextlib
import fnmatch
import json
import shutil
import signal
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import FrameType
from typing import Any

from shardwise.base.records.cell import LOG, RECORD, RUN_FILE, CellRecord, Round, SweepRecord
from shardwise.base.records.record import RunRecord, Status
from shardwise.base.words import listed, one_line
from shardwise.config import UserError
from shardwise.lab.benchmark.cells import CellState, cell_record
from shardwise.lab.benchmark.folder import check_is_bench, locked, prepare, read_cell, read_state
from shardwise.lab.benchmark.process import ProcessOutcome, runs, timed
from shardwise.lab.benchmark.progress import print_end, print_start
from shardwise.lab.benchmark.sweep import Cell, Sweep, left_out, read_sweep, uncontrolled

WEIGHTS = ("model", "checkpoints")
"""Folders of a round that may be large. They are removed when it ends."""


WAIT_SECONDS = 10.0
"""How long the job of a cell waits for an earlier one of the same cell."""


class CellRun:
    """The next run of a cell."""

    def __init__(self, state: CellState, number: int, sweep: SweepRecord) -> None:
        """Take a cell and the number of the round, from 1."""
        self.state = state
        self.folder = state.folder / f"round-{number}"
        self.limit = sweep.timeout_seconds
        output_dir = json.dumps(str(self.folder), ensure_ascii=False)
        self.command = [str(state.folder / RUN_FILE), f"--training.output_dir={output_dir}"]
        if state.cell.plan.nproc > 1:
            self.command.append(f"--nproc={state.cell.plan.nproc}")
        self.arguments = list(self.command)
        """The arguments of `shardwise train`."""
        with_memory = [record.peak_memory_bytes is not None for record in state.run_records]
        if sum(with_memory) >= sweep.memory_rounds:  # all rounds allocate the same bytes
            self.arguments.append("--measure.memory=false")


Engine = Callable[
    [Sequence[CellRun], Callable[[CellRun], None]], Iterator[tuple[CellRun, ProcessOutcome]]
]
"""Runs cells, and yields each when it has ended.

It first gives a cell to the function, which begins its line of output; the caller ends that line.
"""


class Interrupted(BaseException):
    """A signal ended the bench. As KeyboardInterrupt, this is no Exception."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.number = number


def bench(
    path: str | Path,
    out: str | Path,
    only: Sequence[str] = (),
    rerun: Sequence[str] = (),
    train: Sequence[str] | None = None,
    engine: AbstractContextManager[Engine] | None = None,
) -> list[CellRecord]:
    """Run the cells of a sweep file into the folder `out`, and return their records.

    `only` selects the cells whose id matches one of these patterns. Rounds of the same sweep that
    `out` holds are kept, except those of cells that match `rerun`. `train` is the command of a run,
    to which the run file and options are added; by default it is `shardwise train`, see
    `process.runs`. `engine` runs the cells of a round; by default one after another, here.

    Raises UserError for the user's mistakes. Raises Interrupted on a signal: the current
    run ends, and leaves no record.
    """
    out = Path(out)
    sweep, selected, again = select(path, out, only, rerun)
    with _signals(), locked(out):
        cells, rounds = begin(out, sweep, selected, again), sweep.record.rounds

        def announce(run: CellRun) -> None:
            print_start(run.state, cells, rounds)

        with engine or one_by_one(train) as run_all:
            for number in range(1, rounds + 1):
                todo = [
                    CellRun(state, number, sweep.record)
                    for state in _references_first(cells)
                    if number in state.remaining(rounds)[:1]
                ]
                for run, outcome in run_all(todo, announce):
                    _finish(run, outcome)
                    print_end(run.state, cells, rounds)
    return [state.record for state in cells if state.record is not None]


def run_cell(
    out: str | Path, name: str, job: str, train: Sequence[str] | None = None
) -> CellRecord:
    """Run what is left of a cell of a folder that `begin` has prepared, and return its record.

    Cells may run at the same time. `job` names the job and its node, and is kept with each round.
    Raises as `bench` does, and UserError where the folder has no such cell.
    """
    out = Path(out)
    sweep, cell = read_cell(out, name)
    # One that was killed, as with its node, may still be ending.
    with _signals(), locked(out, shared=True), locked(out / name, wait_seconds=WAIT_SECONDS):
        state = read_state(cell, out / name)
        with runs(train) as run:
            while left := state.remaining(sweep.rounds):
                print_start(state, [state], sweep.rounds)
                cell_run = CellRun(state, left[0], sweep)
                outcome = timed(run, cell_run.arguments, cell_run.folder, cell_run.limit)
                _finish(cell_run, outcome, job)
                print_end(state, [state], sweep.rounds)
    assert state.record is not None  # a cell that is refused gets no job
    return state.record


def select(
    path: str | Path, out: Path, only: Sequence[str], rerun: Sequence[str]
) -> tuple[Sweep, Sequence[Cell], Sequence[Cell]]:
    """Return a sweep, its cells that are selected, and those of them that run again."""
    sweep = read_sweep(path, out, ["shardwise", "bench", str(path), "--out", str(out)])
    check_is_bench(out)
    selected = _matching(sweep.cells, only, "--only") if only else sweep.cells
    return sweep, selected, _matching(selected, rerun, "--rerun")


def begin(
    out: Path, sweep: Sweep, selected: Sequence[Cell], again: Sequence[Cell]
) -> list[CellState]:
    """Prepare a folder that is locked, and return the selected cells as far as they have run."""
    prepare(out, sweep, again)
    _warn(out, sweep, selected)
    return [read_state(cell, out / cell.plan.id) for cell in selected]


def _references_first(cells: Sequence[CellState]) -> list[CellState]:
    """Return the cells in the order of a round: references with noise controls, then all others.

    A report that is drawn while the bench runs can then check every cell that has ended.
    """
    references = {state.cell.plan.reference for state in cells}
    places = {state.cell.plan.id: place for place, state in enumerate(cells)}

    def order(state: CellState) -> tuple[bool, int, bool]:
        plan = state.cell.plan
        if plan.control:  # directly after its reference, which --only may have left out
            return False, places.get(plan.reference or "", places[plan.id]), True
        return plan.id not in references, places[plan.id], False

    return sorted(cells, key=order)


def _matching(cells: Sequence[Cell], patterns: Sequence[str], option: str) -> list[Cell]:
    """Return the cells that match a pattern. Raises UserError where a pattern matches no cell."""
    ids = [cell.plan.id for cell in cells]
    matching: set[str] = set()
    for pattern in patterns:
        matched = fnmatch.filter(ids, pattern)
        if not matched:
            raise UserError(f"{option} {pattern} matches no cell of {', '.join(ids)}")
        matching |= set(matched)
    return [cell for cell in cells if cell.plan.id in matching]


def _warn(out: Path, sweep: Sweep, selected: Sequence[Cell]) -> None:
    """Print which cells cannot be checked, and which references `--only` leaves out."""
    if names := uncontrolled(sweep.cells, selected):
        print(f"Unchecked, because their reference cannot run: {listed(names, 8)}.", flush=True)
    needed = left_out(sweep.cells, selected)
    missing = [name for name in needed if not (out / name / RECORD).exists()]
    if missing:
        print(
            "--only leaves out cells that the selected ones are compared with: "
            f"{listed(missing, 8)}. Run them too, now or later.",
            flush=True,
        )


@contextlib.contextmanager
def one_by_one(train: Sequence[str] | None) -> Generator[Engine]:
    """Give the engine that runs cells one after another on this machine; see `runs`."""
    with runs(train) as run:

        def run_all(
            todo: Sequence[CellRun], announce: Callable[[CellRun], None]
        ) -> Iterator[tuple[CellRun, ProcessOutcome]]:
            for each in todo:
                announce(each)
                yield each, timed(run, each.arguments, each.folder, each.limit)

        yield run_all


def _finish(run: CellRun, outcome: ProcessOutcome, job: str | None = None) -> None:
    """Write the record of a cell of which a run has ended, in this job if in any."""
    state, plan = run.state, run.state.cell.plan
    record = _outcome(run.folder, outcome.code, run.limit, state.cell.run)
    for name in WEIGHTS:
        shutil.rmtree(run.folder / name, ignore_errors=True)
    state.run_records.append(record)
    times = (record.tokens_per_second, record.step_seconds) if plan.timed else (None, None)
    at = (outcome.seconds, outcome.started, job, outcome.others_share)
    end = Round(record.status, record.reason, *times, *at)
    state.rounds.append(end)
    threads = {"OMP_NUM_THREADS": outcome.threads}
    command = ["shardwise", "train", *run.command]
    state.record = cell_record(plan, state.rounds, state.run_records, command, threads)
    state.record.write(state.folder / RECORD)


def _outcome(folder: Path, code: int | None, limit: float, run: dict[str, Any]) -> RunRecord:
    """Return the record of a run, or one of how the run ended.

    The latter is written where the run has left no record, or where it left one that says ok and
    then failed.
    """
    with contextlib.suppress(UserError):
        record = RunRecord.read(folder / RECORD)
        if code == 0 or record.status != "ok":
            return record
    status, reason = _ending(code, limit)
    last = _last_line(folder / LOG)
    if last:
        reason = f"{reason}; its last line: {last}"
    record = RunRecord(status, run, reason)
    record.write(folder / RECORD)
    return record


def _ending(code: int | None, limit: float) -> tuple[Status, str]:
    """Return the status and reason of a run that ended with this exit code; None is a timeout."""
    if code is None:
        return "timeout", f"killed after {limit:g} seconds (timeout_seconds of the sweep)"
    if code < 0:
        hint = "; the system does that when memory runs out" if code == -signal.SIGKILL else ""
        return "failed", f"killed by {signal.Signals(-code).name}{hint}"
    statuses: dict[int, Status] = {2: "unsupported", 3: "oom"}
    return statuses.get(code, "failed"), f"ended with exit code {code} without a record"


def _last_line(log: Path, longest: int = 300) -> str:
    """Return the last line of a log that is not blank, or nothing."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 8192))
        lines = file.read().decode("utf-8", "replace").splitlines()
    return one_line(next((line.strip() for line in reversed(lines) if line.strip()), ""), longest)


@contextlib.contextmanager
def _signals() -> Generator[None]:
    """Raise Interrupted on a signal to end. Python handles signals only in the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise Interrupted(number)

    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)  # the last when a job's time is up
    handlers = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
