"""Read what `shardwise bench` left in a folder; what is broken in one cell is that cell's problem, not the bench's."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

from shardwise.config import UserError
from shardwise.metrics.cell import RECORD, RUN_FILE, SWEEP, Axis, CellPlan, CellRecord, SweepRecord


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
    bench = Bench(_read_sweep(folder))
    for plan in bench.sweep.cells:
        home = folder / plan.id
        if (home / RUN_FILE).is_file():
            bench.run_files[plan.id] = (home / RUN_FILE).read_text(encoding="utf-8", errors="replace")
        bench.begun[plan.id] = len(list(home.glob("round-*")))
        if not (home / RECORD).exists():
            continue
        try:
            record = CellRecord.read(home / RECORD)
        except UserError as error:
            bench.problems[plan.id] = str(error)
        else:
            assert isinstance(record, CellRecord)
            bench.records[plan.id] = record
    return bench


def _read_sweep(folder: Path) -> SweepRecord:
    path = folder / SWEEP
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(
            f"{path}: cannot read it ({error.strerror}); give a folder that shardwise bench wrote"
        ) from None
    except ValueError as error:
        raise UserError(f"{path}: not whole, since not JSON ({error}); run shardwise bench again") from None
    version = content.get("schema_version") if isinstance(content, dict) else None
    if version != SweepRecord.schema_version:
        raise UserError(
            f"{path}: schema version {version}, but this program reads {SweepRecord.schema_version}; "
            "run shardwise bench again, or read it with the version of shardwise that wrote it"
        )
    try:
        content["axes"] = tuple(
            Axis(axis["name"], tuple(axis["values"]), tuple(axis["keys"]), axis["compared"]) for axis in content["axes"]
        )
        content["cells"] = tuple(CellPlan(**cell) for cell in content["cells"])
        return SweepRecord(**content)
    except (KeyError, TypeError) as error:
        raise UserError(f"{path}: not a sweep ({error}); run shardwise bench again") from None
