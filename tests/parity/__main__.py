"""`make parity`: the whole matrix, resumable; writes results/parity.json.

Each row says on which code it was run: a hash of src/ and of this folder, and the commit. A cell
that was run on this code is not run again; one that was run on other code keeps its row until its
turn has come.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from shardwise.metrics.hardware import environment
from tests.distributed import run_ranks
from tests.parity.cells import ALL
from tests.parity.harness import (
    TOLERANCE,
    Cell,
    Outcome,
    compare,
    control,
    run_cell,
    tolerance,
    verdict,
)
from tests.parity.references import fingerprint

ROOT = Path(__file__).parents[2]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.parity", description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "parity.json")
    parser.add_argument(
        "--only", nargs="+", default=[""], help="run the cells whose id contains one of these texts"
    )
    options = parser.parse_args()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    code = fingerprint()
    environs = environment()
    done = previous(options.out)
    references: dict[Cell, Outcome] = {}
    wanted = [cell for cell in ALL if any(text in cell.id for text in options.only)]
    for number, cell in enumerate(wanted, 1):
        if done.get(cell.id, {}).get("code") == code:
            continue
        start = time.monotonic()
        done[cell.id] = {**run(cell, references), "code": code, "commit": environs["commit"]}
        seconds = time.monotonic() - start
        print(
            f"{number}/{len(wanted)} {done[cell.id]['status']:6} {cell.id} {seconds:.1f} s",
            flush=True,
        )
        write(options.out, environs, done)
    counts = Counter(row["status"] for row in done.values())
    print(
        f"{options.out}: {dict(counts)}, "
        f"{sum(row['code'] != code for row in done.values())} on other code"
    )
    return 0 if set(counts) == {"ok"} else 1


def run(cell: Cell, references: dict[Cell, Outcome]) -> dict[str, Any]:
    """One row of the results file."""
    row = {
        "id": cell.id,
        "family": cell.family,
        "layout": cell.layout,
        "adapter": cell.mode,
        "processes": cell.nproc,
        "variant": cell.variant,
        "schedule": cell.schedule,
        "split": list(cell.split),
    }
    try:
        reference, float32 = cell.reference(), control(cell)
        for one in (reference, float32):
            if one is not None and one not in references:
                (references[one],) = run_ranks(1, run_cell, one)
        errors = compare(run_ranks(cell.nproc, run_cell, cell), references[reference])
        most = tolerance(references[reference], references[float32]) if float32 else TOLERANCE
    except Exception as error:  # a cell that fails is a row with its reason, never a gap
        return {
            **row,
            "status": "failed",
            "reason": str(error).strip().splitlines()[-1],
            "errors": {},
        }
    wrong = verdict(errors, most)
    return {
        **row,
        "status": "wrong" if wrong else "ok",
        "reason": "; ".join(wrong),
        "errors": errors,
    }


def previous(path: Path) -> dict[str, dict[str, Any]]:
    """The rows that `path` holds, of cells that there still are, in the matrix's order."""
    rows = (
        {row["id"]: row for row in json.loads(path.read_text())["cells"]} if path.exists() else {}
    )
    return {cell.id: rows[cell.id] for cell in ALL if cell.id in rows}


def write(path: Path, environs: dict[str, Any], done: dict[str, dict[str, Any]]) -> None:
    """Write atomically: an interrupted run goes on where it stopped."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"environment": environs, "tolerance": TOLERANCE, "cells": list(done.values())}
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(content, indent=1) + "\n")
    temporary.replace(path)


if __name__ == "__main__":
    sys.exit(main())
