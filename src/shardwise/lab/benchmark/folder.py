"""The folder of a bench: its lock, sweep and run files, and the cells of earlier calls."""

import contextlib
import errno
import fcntl
import json
import os
import shutil
import time
from collections.abc import Generator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml
from pydantic import TypeAdapter

from shardwise.base.records.cell import (
    CELL_ID,
    LOCK,
    RECORD,
    RUN_FILE,
    SWEEP,
    CellRecord,
    Round,
    SweepRecord,
)
from shardwise.base.records.record import RunRecord, dumps, is_temporary
from shardwise.base.safety import check_no_pipes, write_atomically
from shardwise.base.words import NOTHING
from shardwise.config import UserError
from shardwise.config.keys import flat
from shardwise.config.run_file import read_yaml
from shardwise.lab.benchmark.cells import CellState, cell_record
from shardwise.lab.benchmark.sweep import Cell, Sweep

DEFINING = ("values", "nproc", "reference", "control")
"""The fields of a cell's plan that define it. The others follow from the sweep."""


@contextlib.contextmanager
def locked(out: Path, shared: bool = False, wait_seconds: float = 0) -> Generator[None]:
    """Make the folder and keep other benches out of it, except those that share it too.

    Raises UserError where that is not possible, within `wait_seconds` for a bench that is ending.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        # A file: over NFS nobody can have a folder for himself.
        handle = os.open(out / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise UserError(f"--out {out}: cannot make or open the folder ({error.strerror})") from None
    try:
        check_no_pipes(out)
        _lock(handle, out, fcntl.LOCK_SH if shared else fcntl.LOCK_EX, wait_seconds)
        yield
    finally:
        os.close(handle)


def _lock(handle: int, out: Path, kind: int, wait_seconds: float) -> None:
    deadline = time.monotonic() + wait_seconds
    while True:
        try:
            fcntl.flock(handle, kind | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise UserError(
                    f"--out {out}: another bench is running in it; wait, or choose another folder"
                ) from None
            time.sleep(0.1)
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
                raise
            print(f"note: the file system of {out} has no locks; start one bench in it at a time")
            return


def check_is_bench(out: Path) -> None:
    """Raise UserError where a folder holds something other than a bench."""
    if (out / SWEEP).exists() or not out.is_dir():  # what is no folder cannot be locked either
        return
    if any(path != out / LOCK and not is_temporary(path, out / SWEEP) for path in out.iterdir()):
        raise UserError(f"--out {out} holds something other than a bench; choose another folder")


def prepare(out: Path, sweep: Sweep, rerun: Sequence[Cell]) -> None:
    """Write the sweep and its run files, and remove the rounds of the cells that run again.

    Raises UserError where the folder holds another sweep.
    """
    if (out / SWEEP).exists():
        _check_same_sweep(out, sweep)
    try:
        write_atomically(out / SWEEP, dumps(asdict(sweep.record), indent=1) + "\n")
        for cell in sweep.cells:
            folder = out / cell.plan.id
            folder.mkdir(exist_ok=True)
            if folder.is_symlink():
                raise UserError(f"--out {out}: {folder.name} is a link; choose another folder")
            write_atomically(folder / RUN_FILE, _as_yaml(cell.run))
            if cell in rerun:
                (folder / RECORD).unlink(missing_ok=True)
                for round_folder in folder.glob("round-*"):
                    shutil.rmtree(round_folder)
    except PermissionError as error:
        raise UserError(f"--out {out}: cannot write {error.filename} ({error.strerror})") from None


def _check_same_sweep(out: Path, sweep: Sweep) -> None:
    """Raise UserError where the folder holds a sweep with other axes, values or runs.

    The number of rounds and the time limit may differ, and so may what another version of this
    program derives from the same sweep file.
    """
    runs = {cell.plan.id: yaml.safe_load(_as_yaml(cell.run)) for cell in sweep.cells}
    new = _definition(json.loads(dumps(asdict(sweep.record))), runs)
    try:
        record = json.loads((out / SWEEP).read_text(encoding="utf-8"))
        ids = [plan["id"] for plan in record["cells"]]
        assert all(map(CELL_ID.fullmatch, ids)), "a cell id is no name of a folder"
        for name in ids:
            check_no_pipes(out / name)
        read = {name: read_yaml(out / name / RUN_FILE, "not a run file") for name in ids}
        old = _definition(record, read)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, AssertionError) as error:
        raise UserError(f"{out} holds a damaged bench ({error}); choose another --out") from None
    for key in sorted(old | new, key=lambda key: not key.startswith("axes.")):
        in_folder, in_file = old.get(key, NOTHING), new.get(key, NOTHING)
        if in_folder != in_file:
            raise UserError(
                f"--out {out} holds another sweep: {key} is {in_folder!r} there and {in_file!r} in "
                "the sweep file; choose another --out"
            )


def _definition(record: dict[str, Any], runs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return what defines a sweep, by name: the values of its axes, and each cell's plan and run.

    The output folder of a run is not part of it: the bench may have been moved. Nor is `launch`,
    what a job asks for.
    """
    definition = {f"axes.{axis['name']}": axis["values"] for axis in record["axes"]}
    for plan in record["cells"]:
        cell = f"cells.{plan['id']}"
        definition |= {f"{cell}.{key}": plan[key] for key in DEFINING}
        run = {name: keys for name, keys in runs[plan["id"]].items() if name != "launch"}
        definition |= {f"{cell}.run.{key}": value for key, value in flat(run).items()}
        definition.pop(f"{cell}.run.training.output_dir", None)
    return definition


def _as_yaml(run: dict[str, Any]) -> str:
    return yaml.safe_dump(run, sort_keys=False)


def read_cell(out: Path, name: str) -> tuple[SweepRecord, Cell]:
    """Return the sweep that a folder was prepared for, and one of its cells.

    Raises UserError where the folder has none of this name.
    """
    try:
        sweep = TypeAdapter(SweepRecord).validate_json((out / SWEEP).read_bytes())
        (plan,) = (plan for plan in sweep.cells if plan.id == name)
        run = yaml.safe_load((out / name / RUN_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        raise UserError(
            f"--cell {name}: {out} was not prepared for it; start shardwise bench --on slurm"
        ) from None
    return sweep, Cell(plan, run)


def read_state(cell: Cell, folder: Path) -> CellState:
    """Return a cell with the rounds in its folder, and bring its record up to date.

    A refused cell gets its record here. A round whose record cannot be read is left out with all
    later ones. Raises UserError where the cell's own record cannot be read.
    """
    state = CellState(cell, folder)
    if cell.refusal:
        state.record = CellRecord("unsupported", cell.run, cell.refusal, cell=asdict(cell.plan))
        state.record.write(folder / RECORD)
    elif (folder / RECORD).exists():
        old, rounds = _read_record(cell, folder)
        _read_rounds(state, rounds)
        if state.rounds:
            state.record = cell_record(
                cell.plan, state.rounds, state.run_records, old.command, old.environment
            )
            if state.record != old:
                state.record.write(folder / RECORD)
    return state


def _read_record(cell: Cell, folder: Path) -> tuple[CellRecord, list[Round]]:
    """Return a cell's record and its rounds.

    Raises UserError where they are damaged or of another version.
    """
    way_out = f"run it again with --rerun {cell.plan.id}"
    try:
        record = CellRecord.read(folder / RECORD)
        assert isinstance(record, CellRecord)
        return record, [Round(**entry) for entry in record.rounds]
    except UserError as error:
        raise UserError(f"{error}: {way_out}") from None
    except TypeError:
        raise UserError(
            f"{folder / RECORD}: another version of shardwise wrote its rounds: {way_out}"
        ) from None


def _read_rounds(state: CellState, rounds: Sequence[Round]) -> None:
    """Add to a cell's state the rounds whose records can be read, up to the first that cannot."""
    for number, entry in enumerate(rounds, start=1):
        path = state.folder / f"round-{number}" / RECORD
        try:
            record = RunRecord.read(path)
        except UserError:
            print(
                f"{path} cannot be read; {state.cell.plan.id} runs again from round {number} on",
                flush=True,
            )
            return
        state.run_records.append(record)
        state.rounds.append(entry)
