"""Runs a sweep: rounds of `shardwise train` in processes of their own, each with a time limit, each leaving a row."""

from __future__ import annotations

import contextlib
import fcntl
import fnmatch
import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Generator, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Any

import yaml

from shardwise.benchmark.cells import CellState, cell_record
from shardwise.benchmark.process import Run, runs
from shardwise.benchmark.progress import Display
from shardwise.benchmark.sweep import Cell, Sweep, left_out, read_sweep, uncontrolled
from shardwise.config import UserError
from shardwise.records.cell import LOG, RECORD, RUN_FILE, SWEEP, CellRecord, Round, SweepRecord
from shardwise.records.record import RunRecord, Status, dumps

WEIGHTS = ("model", "checkpoints")
"""What a round leaves that may be large and tells nothing of speed or memory."""


class Interrupted(BaseException):
    """The bench was asked to end by signal `number`; like KeyboardInterrupt no Exception."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.number = number


def bench(
    path: str | Path,
    out: str | Path,
    only: Sequence[str] = (),
    rerun: Sequence[str] = (),
    train: Sequence[str] | None = None,
) -> list[CellRecord]:
    """Run the cells of a sweep file, `only` those whose id matches a pattern, into the folder `out`; return their rows.

    What `out` has of the same sweep is kept and gone on with, but for cells that match `rerun`. `train` is the command
    of a run, to which the run file and options are added (default: `shardwise train`, see `process.runs`). Raises
    UserError, and Interrupted on SIGTERM or SIGINT, which ends the run in hand and leaves no row of it.
    """
    out = Path(out)
    command = ["shardwise", "bench", str(path), "--out", str(out)]
    sweep = read_sweep(path, out, command)
    selected = _matching(sweep.cells, only, "--only") if only else sweep.cells
    again = _matching(selected, rerun, "--rerun")
    with _signals(), _locked(out):
        _prepare(out, sweep, again)
        _tell_unchecked(out, sweep, selected)
        cells = [_known(cell, out / cell.plan.id) for cell in selected]
        rounds = sweep.record.rounds
        with runs(train) as run, Display(sweep.record.title, cells, rounds) as display:
            for number in range(1, rounds + 1):
                for state in _references_first(cells):
                    if number in state.remaining(rounds)[:1]:
                        display.start(state)
                        _run_round(state, number, sweep.record, run)
                        display.end(state)
    return [state.record for state in cells if state.record is not None]


def _references_first(cells: Sequence[CellState]) -> list[CellState]:
    """Return the order of a round: each reference of losses and its control, then the other cells.

    So a report that is drawn while the bench runs has a verdict on every cell that has ended.
    """
    references = {state.cell.plan.reference for state in cells}
    by_id = {state.cell.plan.id: place for place, state in enumerate(cells)}

    def place(state: CellState) -> tuple[bool, int, bool]:
        plan = state.cell.plan
        if plan.control:  # beside its reference, also where --only leaves that out
            return False, by_id.get(plan.reference or "", by_id[plan.id]), True
        return plan.id not in references, by_id[plan.id], False

    return sorted(cells, key=place)


def _matching(cells: Sequence[Cell], patterns: Sequence[str], option: str) -> list[Cell]:
    for pattern in patterns:
        if not any(fnmatch.fnmatchcase(cell.plan.id, pattern) for cell in cells):
            raise UserError(f"{option} {pattern} matches no cell of {', '.join(cell.plan.id for cell in cells)}")
    return [c for c in cells if any(fnmatch.fnmatchcase(c.plan.id, pattern) for pattern in patterns)]


def _tell_unchecked(out: Path, sweep: Sweep, selected: Sequence[Cell]) -> None:
    """Say before the start what will lack a verdict on its losses, or what it is set against."""
    if names := uncontrolled(sweep.cells, selected):
        _tell(f"unchecked for want of a control: {_listed(names)}; a reference has one if it is a valid run")
    if names := [name for name in left_out(sweep.cells, selected) if not (out / name / RECORD).exists()]:
        _tell(f"--only leaves out what losses and speeds are set against: {_listed(names)}; run them too, now or later")


def _listed(names: Sequence[str], most: int = 8) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _tell(line: str) -> None:
    print(line, flush=True)


# ----------------------------------------------------------------------------------------------------------- the folder


@contextlib.contextmanager
def _locked(out: Path) -> Generator[None]:
    """Make the folder and keep other benches out of it."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        handle = os.open(out, os.O_RDONLY)
    except OSError as error:
        raise UserError(f"--out {out}: cannot make or open the folder ({error.strerror})") from None
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"--out {out}: another bench is running in it; wait, or choose another folder") from None
        yield
    finally:
        os.close(handle)


def _prepare(out: Path, sweep: Sweep, again: Sequence[Cell]) -> None:
    """Write the sweep and the run files, or check that they are those of the sweep that is there."""
    if (out / SWEEP).exists():
        _check_same(out, sweep)
    elif any(path.name != _temporary(out / SWEEP).name for path in out.iterdir()):
        raise UserError(f"--out {out} holds something else than a bench; choose another folder")
    try:
        _write(out / SWEEP, dumps(asdict(sweep.record), indent=1) + "\n")
        for cell in sweep.cells:
            folder = out / cell.plan.id
            folder.mkdir(exist_ok=True)
            _write(folder / RUN_FILE, _as_yaml(cell.run))
            if cell in again:
                (folder / RECORD).unlink(missing_ok=True)
                for round_folder in folder.glob("round-*"):
                    shutil.rmtree(round_folder)
    except PermissionError as error:
        raise UserError(f"--out {out}: cannot write {error.filename} ({error.strerror})") from None


def _check_same(out: Path, sweep: Sweep) -> None:
    """Raise UserError where the folder holds another sweep.

    That is: other axes, values or runs. What follows from them may differ, as between versions of this program, and so
    may the number of rounds and the time limit.
    """
    run_files = {cell.plan.id: _as_yaml(cell.run) for cell in sweep.cells}
    now = _comparable(json.loads(dumps(asdict(sweep.record))), run_files)
    try:
        found = json.loads((out / SWEEP).read_text(encoding="utf-8"))
        files = {plan["id"]: out / plan["id"] / RUN_FILE for plan in found["cells"]}
        before = _comparable(found, {name: file.read_text(encoding="utf-8") for name, file in files.items()})
    except (OSError, ValueError, TypeError, KeyError, yaml.YAMLError) as error:
        raise UserError(f"{out} holds a bench that is damaged ({error}); choose another --out") from None
    if difference := _difference(before, now):
        raise UserError(f"--out {out} holds another sweep: {difference}; choose another --out")


def _comparable(record: dict[str, Any], run_files: dict[str, str]) -> dict[str, Any]:
    runs = {name: yaml.safe_load(text) for name, text in run_files.items()}
    for run in runs.values():
        run["training"].pop("output_dir", None)  # as the folder was called then
    axes = {axis["name"]: axis["values"] for axis in record["axes"]}
    asked = ("values", "nproc", "reference", "control")
    cells = {plan["id"]: {key: plan[key] for key in asked} | {"run": runs[plan["id"]]} for plan in record["cells"]}
    return {"axes": axes, "cells": cells}


def _difference(before: Any, now: Any, *where: str) -> str:
    """The first difference in words; nothing where there is none."""
    if isinstance(before, dict) and isinstance(now, dict):
        for key in before | now:
            if key not in before or key not in now:
                return f"{'.'.join((*where, key))} is only {'there' if key in before else 'in the sweep file'}"
            if difference := _difference(before[key], now[key], *where, key):
                return difference
        return ""
    return f"{'.'.join(where)} is {before!r} there and {now!r} in the sweep file" if before != now else ""


def _as_yaml(run: dict[str, Any]) -> str:
    return yaml.safe_dump(run, sort_keys=False)


def _known(cell: Cell, folder: Path) -> CellState:
    """What the folder has of a cell, its row brought up to date; a refused cell gets its row."""
    state = CellState(cell, folder)
    if cell.refusal:
        state.record = CellRecord("unsupported", cell.run, cell.refusal, cell=asdict(cell.plan))
        state.record.write(folder / RECORD)
    elif (folder / RECORD).exists():
        try:
            found = CellRecord.read(folder / RECORD)
            assert isinstance(found, CellRecord)
            rounds = [Round(**entry) for entry in found.rounds]
        except UserError as error:
            raise UserError(f"{error}: --rerun {cell.plan.id}") from None
        except TypeError:
            raise UserError(f"{folder / RECORD}: its rounds are none of this version: --rerun {cell.plan.id}") from None
        for number, entry in enumerate(rounds, 1):
            record = folder / f"round-{number}" / RECORD
            try:
                state.records.append(RunRecord.read(record))
            except UserError:
                _tell(f"{record} cannot be read; {cell.plan.id} is run again from round {number} on")
                break
            state.rounds.append(entry)
        if state.rounds:
            state.record = cell_record(cell.plan, state.rounds, state.records, found.command, found.environment)
            if state.record != found:
                state.record.write(folder / RECORD)
    return state


def _write(path: Path, text: str) -> None:
    _temporary(path).write_text(text, encoding="utf-8")
    os.replace(_temporary(path), path)


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.tmp")


# ---------------------------------------------------------------------------------------------------------------- a run


def _run_round(state: CellState, number: int, sweep: SweepRecord, run: Run) -> None:
    """Run a cell once and write its row."""
    limit = sweep.timeout_seconds
    folder, plan = state.folder / f"round-{number}", state.cell.plan
    if folder.exists():  # of a bench that was ended
        shutil.rmtree(folder)
    folder.mkdir()
    output_dir = json.dumps(str(folder), ensure_ascii=False)
    arguments = [str(state.folder / RUN_FILE), f"--training.output_dir={output_dir}"]
    arguments += [f"--nproc={plan.nproc}"] if plan.nproc > 1 else []
    command = ["shardwise", "train", *arguments]
    if sum(record.peak_memory_bytes is not None for record in state.records) >= sweep.memory_rounds:
        arguments.append("--measure.memory=false")  # bytes are the same in every round
    started = datetime.now(UTC).isoformat(timespec="milliseconds")
    begin = time.monotonic()
    code = run(arguments, folder / LOG, limit)
    seconds = time.monotonic() - begin
    record = _outcome(folder, code, limit, state.cell.run)
    for name in WEIGHTS:
        shutil.rmtree(folder / name, ignore_errors=True)
    state.records.append(record)
    times = (record.tokens_per_second, record.step_seconds) if plan.timed else (None, None)
    state.rounds.append(Round(record.status, record.reason, *times, seconds, started))
    threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS")}
    state.record = cell_record(plan, state.rounds, state.records, command, threads)
    state.record.write(state.folder / RECORD)


def _outcome(folder: Path, code: int | None, limit: float, run: dict[str, Any]) -> RunRecord:
    """What the run has recorded; if it has not got to that, or contradicts it by how it ended, a record of its end."""
    with contextlib.suppress(UserError):
        found = RunRecord.read(folder / RECORD)
        if code == 0 or found.status != "ok":
            return found
    status, reason = _how_it_ended(code, limit)
    last = _last_line(folder / LOG)
    record = RunRecord(status, run, f"{reason}; its last line: {last}" if last else reason)
    record.write(folder / RECORD)
    return record


def _how_it_ended(code: int | None, limit: float) -> tuple[Status, str]:
    if code is None:
        return "timeout", f"killed after {limit:g} seconds (timeout_seconds of the sweep)"
    if code < 0:
        hint = "; the system does that when memory runs out" if code == -signal.SIGKILL else ""
        return "failed", f"was killed by {signal.Signals(-code).name}{hint}"
    statuses: dict[int, Status] = {2: "unsupported", 3: "oom"}
    return statuses.get(code, "failed"), f"ended with exit code {code} and left no record of it"


def _last_line(log: Path, length: int = 300) -> str:
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 8192))
        lines = file.read().decode("utf-8", "replace").splitlines()
    last = next((line.strip()[:length] for line in reversed(lines) if line.strip()), "")
    return "".join(c if c.isprintable() else " " for c in last)


@contextlib.contextmanager
def _signals() -> Generator[None]:
    """SIGTERM and SIGINT raise Interrupted, in the main thread, where alone Python takes signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise Interrupted(number)

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
