"""`make parity`: the whole matrix, resumable; writes results/parity.json.

Each row says on which code it was run: a hash of src/ and of this folder, and the commit. A cell
that was run on this code is not run again; one that was run on other code keeps its row until its
turn has come.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import logging
import multiprocessing
import os
import sys
import tempfile
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from shardwise.metrics.hardware import environment
from tests.parity import references
from tests.parity.cells import ALL
from tests.parity.harness import TOLERANCE, Cell, Outcome, compare, control, tolerance, verdict
from tests.parity.references import fingerprint
from tests.parity.together import groups, run_together

ROOT = Path(__file__).parents[2]
TOGETHER = 8
"""Cells that the same processes run."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.parity", description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "parity.json")
    parser.add_argument(
        "--only", nargs="+", default=[""], help="run the cells whose id contains one of these texts"
    )
    parser.add_argument("--jobs", type=int, default=2, help="groups of cells that run at a time")
    options = parser.parse_args()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    code = fingerprint()
    environs = environment()
    done = previous(options.out)
    wanted = [cell for cell in ALL if any(text in cell.id for text in options.only)]
    left = [cell for cell in wanted if done.get(cell.id, {}).get("code") != code]
    number = len(wanted) - len(left)
    stamp = {"code": code, "commit": environs["commit"]}
    with (
        tempfile.TemporaryDirectory() as folder,
        ProcessPoolExecutor(options.jobs, multiprocessing.get_context("fork")) as pool,
    ):
        needed = {one for cell in left for one in (cell.reference(), control(cell)) if one}
        list(pool.map(partial(keep, Path(folder)), groups(sorted(needed, key=repr), TOGETHER)))
        for rows in pool.map(partial(rows_of, Path(folder)), groups(left, TOGETHER)):
            for row in rows:
                number += 1
                done[row["id"]] = {**row, **stamp}
                print(f"{number}/{len(wanted)} {row['status']:6} {row['id']}", flush=True)
            write(options.out, environs, done)
    counts = Counter(row["status"] for row in done.values())
    print(
        f"{options.out}: {dict(counts)}, "
        f"{sum(row['code'] != code for row in done.values())} on other code"
    )
    return 0 if set(counts) == {"ok"} else 1


def keep(folder: Path, group: tuple[Cell, ...]) -> None:
    """Keep what cells of one process compute; none of a group in which one fails."""
    # The rows then run the one that they need again, and say why it fails.
    with contextlib.suppress(RuntimeError):
        for cell, (outcome,) in run_together(group).items():
            references.write(place(folder, cell), outcome)


def place(folder: Path, cell: Cell) -> Path:
    """Return the file that keeps the outcome of a cell of one process."""
    return folder / hashlib.sha256(repr(cell).encode()).hexdigest()


def kept(folder: Path, cell: Cell) -> Outcome:
    """Return the outcome of a cell of one process, computed here if `keep` could not."""
    outcome = references.read(place(folder, cell))
    if outcome is None:
        ((outcome,),) = run_together((cell,)).values()
    return outcome


def rows_of(folder: Path, group: tuple[Cell, ...]) -> list[dict[str, Any]]:
    """Return a row of the results file for each cell of a group."""
    try:
        outcomes = run_together(group)
    except Exception:  # each alone shows which of them fails, and why
        outcomes = {}
    return [row_of(folder, cell, outcomes.get(cell)) for cell in group]


def row_of(folder: Path, cell: Cell, outcomes: tuple[Outcome, ...] | None) -> dict[str, Any]:
    """Return the row of a cell; without outcomes it is run here."""
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
        outcomes = outcomes or run_together((cell,))[cell]
        expected, float32 = kept(folder, cell.reference()), control(cell)
        errors = compare(outcomes, expected)
        most = tolerance(expected, kept(folder, float32)) if float32 else TOLERANCE
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
        "errors": {kind: float(f"{error:.3g}") for kind, error in errors.items()},
    }


def previous(path: Path) -> dict[str, dict[str, Any]]:
    """The rows that `path` holds, of cells that there still are, in the matrix's order."""
    rows = (
        {row["id"]: row for row in json.loads(path.read_text())["cells"]} if path.exists() else {}
    )
    return {cell.id: rows[cell.id] for cell in ALL if cell.id in rows}


def as_text(content: dict[str, Any]) -> str:
    """Return the record as JSON with a cell a line, which is a quarter less than a key a line."""
    cells = ",\n".join(map(json.dumps, content["cells"]))
    others = {key: value for key, value in content.items() if key != "cells"}
    return f'{json.dumps(others, indent=1)[:-2]},\n "cells": [\n{cells}\n]\n}}\n'


def write(path: Path, environs: dict[str, Any], done: dict[str, dict[str, Any]]) -> None:
    """Write atomically: an interrupted run goes on where it stopped."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"environment": environs, "tolerance": TOLERANCE, "cells": list(done.values())}
    temporary = path.with_suffix(".tmp")
    temporary.write_text(as_text(content))
    temporary.replace(path)


if __name__ == "__main__":
    sys.exit(main())
