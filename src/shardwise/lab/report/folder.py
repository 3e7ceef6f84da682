"""Reads the folder of a bench. A broken file of one cell becomes a problem of that cell alone."""

import dataclasses
import json
import math
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TypeVar

import pydantic

from shardwise.base.records.cell import (
    CELL_ID,
    RECORD,
    RUN_FILE,
    SWEEP,
    CellRecord,
    Round,
    SweepRecord,
)
from shardwise.base.records.record import PipelineRecord, RoutingRecord
from shardwise.base.safety import check_given, check_no_pipes
from shardwise.base.schedule.timeline import unpack
from shardwise.config import UserError

T = TypeVar("T")
MOST_DIGITS, MOST = 18, 1e60
"""The digits of a whole number, and a number, far above what is measured: figures compute with them
and would overflow."""


@dataclass(frozen=True)
class BenchFolder:
    """The folder of a bench, finished or not. Each mapping is by cell id."""

    sweep: SweepRecord
    records: dict[str, CellRecord] = field(default_factory=dict)  # the cells' that have one
    problems: dict[str, str] = field(default_factory=dict)  # why a record cannot be read
    begun: dict[str, int] = field(default_factory=dict)  # rounds that have a folder
    run_files: dict[str, str] = field(default_factory=dict)  # text of the run file


def read_bench(folder: str | Path) -> BenchFolder:
    """Read the folder of a bench. Raises UserError where it has no readable `sweep.json`."""
    folder = Path(folder)
    check_given(folder, "the folder of a bench")
    check_no_pipes(folder)
    bench = BenchFolder(_read_sweep(folder / SWEEP))
    for plan in bench.sweep.cells:
        cell_folder = folder / plan.id
        check_no_pipes(cell_folder)
        run_file, record_file = cell_folder / RUN_FILE, cell_folder / RECORD
        for path in (run_file, record_file):
            # The page shows its text, and somebody who gets the page may not know of the file.
            if not path.resolve().is_relative_to(folder.resolve()):
                raise UserError(f"{path} is a link out of {folder}; put the file itself there")
        if run_file.is_file():
            bench.run_files[plan.id] = run_file.read_text(encoding="utf-8", errors="replace")
        bench.begun[plan.id] = len(list(cell_folder.glob("round-*")))
        if record_file.exists():
            try:
                bench.records[plan.id] = _read_record(record_file)
            except UserError as error:
                bench.problems[plan.id] = str(error)
    return bench


def _read_record(path: Path) -> CellRecord:
    """Return a cell's record. Raises UserError where a field is not of its type."""
    try:
        record = CellRecord.read(path)
        content = json.dumps(dataclasses.asdict(record))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not a record ({error}); run the cell again") from None
    checked = _typed(CellRecord, content, path)
    _typed(list[Round], json.dumps(checked.rounds), path, "rounds.")
    if not all(math.isfinite(entry.get("step", 0.0)) for entry in checked.eval):
        raise UserError(f"{path}: eval: a step that is no number; run shardwise bench again")
    if checked.pipeline is not None:
        pipeline = _typed(PipelineRecord, json.dumps(checked.pipeline), path, "pipeline.")
        for events in ("events", "simulated_events"):
            try:
                unpack(getattr(pipeline, events) or [])
            except ValueError as error:
                raise UserError(
                    f"{path}: pipeline.{events}: {error}; run shardwise bench again"
                ) from None
    if checked.routing is not None:
        _typed(RoutingRecord, json.dumps(checked.routing), path, "routing.")
    _typed(dict[str, tuple[float, float]], json.dumps(checked.spread), path, "spread.")
    return checked


def _read_sweep(path: Path) -> SweepRecord:
    """Return the sweep of a bench.

    Raises UserError where the file is damaged or of another version.
    """
    try:
        text = path.read_text(encoding="utf-8")
        content = json.loads(text)
    except OSError as error:
        raise UserError(
            f"{path}: cannot read it ({error.strerror}); give a folder that shardwise bench wrote"
        ) from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not valid JSON ({error}); run shardwise bench again") from None
    version = content.get("schema_version") if isinstance(content, dict) else None
    if version != SweepRecord.schema_version:
        raise UserError(
            f"{path}: schema version {version}, but this program reads version "
            f"{SweepRecord.schema_version}; run shardwise bench again, or read it with the "
            "version of shardwise that wrote it"
        )
    sweep = _typed(SweepRecord, text, path)
    ids = [plan.id for plan in sweep.cells]
    for name in ids:
        if not CELL_ID.fullmatch(name) or ids.count(name) > 1:
            problem = f"the cell id {name[:80]!r} is used twice or is no name of a folder"
            raise UserError(f"{path}: {problem}; run shardwise bench again")
    return sweep


@cache
def _adapter(kind: type[T]) -> pydantic.TypeAdapter[T]:
    return pydantic.TypeAdapter(kind)


def _typed(kind: type[T], content: str, path: Path, within: str = "") -> T:
    """Return JSON as an object of this type.

    Raises UserError for a field of another type, and for a number that no run can have measured.
    """
    try:
        json.loads(content, parse_int=_whole_number, parse_float=_number)
        return _adapter(kind).validate_json(content, strict=True)
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = within + ".".join(map(str, first["loc"]))
        raise UserError(
            f"{path}: {where}: {first['msg'].lower()}; run shardwise bench again"
        ) from None
    except ValueError as error:
        raise UserError(f"{path}: {error}; run shardwise bench again") from None


def _whole_number(digits: str) -> int:
    if len(digits) > MOST_DIGITS:
        raise ValueError(f"a number of {len(digits)} digits, which no run has measured")
    return int(digits)


def _number(text: str) -> float:
    if abs(value := float(text)) > MOST:
        raise ValueError(f"{text[:20]} is a number that no run has measured")
    return value
