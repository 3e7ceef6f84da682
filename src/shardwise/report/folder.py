"""Read what `shardwise bench` left in a folder; what is broken in one cell is that cell's problem, not the bench's."""

from __future__ import annotations

import dataclasses
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import pydantic

from shardwise.config import UserError
from shardwise.records.cell import RECORD, RUN_FILE, SWEEP, CellRecord, Round, SweepRecord
from shardwise.records.record import PipelineRecord
from shardwise.schedule.timeline import unpack

T = TypeVar("T")
FOLDER = re.compile(r"(?!\.)[A-Za-z0-9._+-]{1,200}")
"""What a cell may be called, since its folder is called so."""


@dataclass(frozen=True)
class Bench:
    """A bench's folder as it is now, finished or not."""

    sweep: SweepRecord
    records: dict[str, CellRecord] = field(default_factory=dict)  # cell -> its record, of those that have one
    problems: dict[str, str] = field(default_factory=dict)  # cell -> why its record cannot be read
    begun: dict[str, int] = field(default_factory=dict)  # cell -> rounds that have a folder
    run_files: dict[str, str] = field(default_factory=dict)  # cell -> its run file's text


def read_bench(folder: str | Path) -> Bench:
    """Everything there is; UserError where the folder holds no readable `sweep.json`, so that nothing can be shown."""
    folder = Path(folder)
    bench = Bench(_read_sweep(folder / SWEEP))
    for plan in bench.sweep.cells:
        home = folder / plan.id
        if (home / RUN_FILE).is_file():
            bench.run_files[plan.id] = (home / RUN_FILE).read_text(encoding="utf-8", errors="replace")
        bench.begun[plan.id] = len(list(home.glob("round-*")))
        if (home / RECORD).exists():
            try:
                bench.records[plan.id] = _read_record(home / RECORD)
            except UserError as error:
                bench.problems[plan.id] = str(error)
    return bench


def _read_record(path: Path) -> CellRecord:
    """A cell's record, whose fields hold what their types say; UserError where they do not."""
    try:
        record = CellRecord.read(path)
        content = json.dumps(dataclasses.asdict(record))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not a record ({error}); run the cell again") from None
    checked = _typed(CellRecord, content, path)
    _typed(list[Round], json.dumps(checked.rounds), path, "rounds.")
    if checked.pipeline is not None:
        pipeline = _typed(PipelineRecord, json.dumps(checked.pipeline), path, "pipeline.")
        try:
            unpack(pipeline.events or [])
        except ValueError as error:
            raise UserError(f"{path}: pipeline.events: {error}; run shardwise bench again") from None
    _typed(dict[str, tuple[float, float]], json.dumps(checked.spread), path, "spread.")
    return checked


def _read_sweep(path: Path) -> SweepRecord:
    try:
        text = path.read_text(encoding="utf-8")
        content = json.loads(text)
    except OSError as error:
        raise UserError(
            f"{path}: cannot read it ({error.strerror}); give a folder that shardwise bench wrote"
        ) from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not whole, since not JSON ({error}); run shardwise bench again") from None
    version = content.get("schema_version") if isinstance(content, dict) else None
    if version != SweepRecord.schema_version:
        raise UserError(
            f"{path}: schema version {version}, but this program reads {SweepRecord.schema_version}; "
            "run shardwise bench again, or read it with the version of shardwise that wrote it"
        )
    sweep = _typed(SweepRecord, text, path)
    ids = [plan.id for plan in sweep.cells]
    for name in ids:
        if not FOLDER.fullmatch(name) or ids.count(name) > 1:
            raise UserError(f"{path}: the cell {name[:80]!r} has no folder of its own; run shardwise bench again")
    return sweep


def _typed(kind: type[T], content: str, path: Path, within: str = "") -> T:
    """JSON as the dataclass that it should be; UserError names the first field of another type."""
    try:
        return pydantic.TypeAdapter(kind).validate_json(content, strict=True)
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = within + ".".join(map(str, first["loc"]))
        raise UserError(f"{path}: {where}: {first['msg'].lower()}; run shardwise bench again") from None
