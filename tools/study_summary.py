"""One file for a study: all that its bench measured, without what can be made again from that.

    python -m tools.study_summary results/study/cpu.json runs/cpu-again
    shardwise report runs/cpu-again

writes the folder of the bench again, for the page with every cell, curve and picture. The file has
the sweep, the record of each cell (what all of them have in common stands once) and, of the rounds,
the figures of a pipeline that a cell's record has no median of.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shardwise.base.records.cell import RECORD, SWEEP
from shardwise.base.records.record import RunRecord

Json = Mapping[str, Any]


def pack(folder: Path) -> dict[str, Any]:
    """Return the summary of the folder of a bench."""
    sweep = json.loads((folder / SWEEP).read_text(encoding="utf-8"))
    records = {}
    for plan in sweep["cells"]:
        if (path := folder / plan["id"] / RECORD).is_file():
            record = json.loads(path.read_text(encoding="utf-8"))
            assert record.pop("cell") == plan, f"{path} is of another sweep"
            records[plan["id"]] = record
    shared = in_common([*records.values()])
    return {
        "sweep": sweep,
        "shared": shared,
        "cells": {name: without(record, shared) for name, record in records.items()},
        "pipelines": {name: found for name in records if (found := rounds_of(folder / name))},
    }


def unpack(summary: Json, folder: Path) -> None:
    """Write the folder of a bench: its sweep, and the record of each cell."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / SWEEP).write_text(json.dumps(summary["sweep"]), encoding="utf-8")
    plans = {plan["id"]: plan for plan in summary["sweep"]["cells"]}
    for name, left in summary["cells"].items():
        record = {**merged(summary["shared"], left), "cell": plans[name]}
        (folder / name).mkdir(exist_ok=True)
        (folder / name / RECORD).write_text(json.dumps(record), encoding="utf-8")


def write(summary: Json, path: Path) -> None:
    """Write a summary with a line for each cell, so that a change can be read."""
    parts = []
    for key, value in summary.items():
        if key in ("cells", "pipelines"):
            lines = [f"{json.dumps(name)}: {compact(one)}" for name, one in value.items()]
            parts.append(f"{json.dumps(key)}: {{\n" + ",\n".join(lines) + "\n}")
        else:
            parts.append(f"{json.dumps(key)}: {compact(value)}")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("{\n" + ",\n".join(parts) + "\n}\n", encoding="utf-8")


def compact(value: Any) -> str:
    """Return a value as JSON without spaces."""
    return json.dumps(value, separators=(",", ":"))


def rounds_of(folder: Path) -> list[Json]:
    """Return the bubble of each good round of a pipeline, and how far the simulated step is off."""
    records = map(RunRecord.read, sorted(folder.glob(f"round-*/{RECORD}")))
    found = [record.pipeline for record in records if record.status == "ok" and record.pipeline]
    return [
        {
            "bubble": pipeline["measured"]["bubble"],
            "simulator_error_percent": pipeline["simulator_error_percent"],
        }
        for pipeline in found
        if pipeline["measured"]
    ]


def in_common(records: Sequence[Json]) -> dict[str, Any]:
    """Return what stands in all of them, part by part."""
    found: dict[str, Any] = {}
    for key in [key for key in records[0] if all(key in record for record in records)]:
        values = [record[key] for record in records]
        if len({compact(value) for value in values}) == 1:
            found[key] = values[0]
        elif all(isinstance(value, dict) for value in values) and (part := in_common(values)):
            found[key] = part
    return found


def without(record: Json, shared: Json) -> dict[str, Any]:
    """Return what a record has beside what is shared."""
    return {
        key: without(value, shared[key]) if key in shared else value
        for key, value in record.items()
        if key not in shared or compact(value) != compact(shared[key])
    }


def merged(shared: Json, left: Json) -> dict[str, Any]:
    """Return the record of which `without` left so much."""
    return {
        **shared,
        **{
            key: merged(shared[key], value) if key in shared else value
            for key, value in left.items()
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("summary", type=Path)
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    unpack(json.loads(options.summary.read_text(encoding="utf-8")), options.folder)


if __name__ == "__main__":
    main()
