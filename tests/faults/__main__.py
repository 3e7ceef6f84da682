"""Inject every fault of `cases` and write what came of each: results/faults.json and faults.md.

`make faults`, or `python -m tests.faults --only fsdp2`. It can be interrupted: a case that was
right before is not run again, unless `--again` asks for it.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import shutil
import sys
import time
from typing import Any

from shardwise.lab.preloaded import MODULES
from tests.faults.cases import cases
from tests.faults.table import is_right, read_table, write_table


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--only", default="", help="cases whose key has this part")
    parser.add_argument("--jobs", type=int, default=2, help="cases at a time")
    parser.add_argument("--again", action="store_true", help="also those that were right before")
    parser.add_argument("--minutes", type=float, default=1e6, help="start no case after them")
    options = parser.parse_args()
    # What forks then need not import.
    for module in MODULES:
        importlib.import_module(module)
    import torch

    from shardwise.metrics.hardware import environment
    from tests.faults.run import run_case, shared_folder

    torch.set_num_threads(1)
    here, end = environment(), time.monotonic() + 60 * options.minutes
    known = {case.key: case for case in cases()}
    table = {key: row for key, row in read_table().items() if key in known}
    todo = [
        case
        for key, case in known.items()
        if options.only in key and (options.again or not is_right(table.get(key, {})))
    ]
    running: dict[int, str] = {}
    with shared_folder() as shared:
        while True:
            while todo and len(running) < options.jobs and time.monotonic() < end:
                case = todo.pop(0)
                pid = os.fork()
                if pid == 0:
                    folder = shared / f"case-{os.getpid()}"
                    try:
                        row = run_case(case, shared, folder)
                        (shared / f"{os.getpid()}.json").write_text(json.dumps(row))
                        shutil.rmtree(folder, ignore_errors=True)
                    finally:
                        os._exit(0)
                running[pid] = case.key
            if not running:
                break
            pid, _ = os.wait()
            key = running.pop(pid)
            row: dict[str, Any] = json.loads((shared / f"{pid}.json").read_text())
            print(f"{len(todo):4} {row['outcome']:18} {key} {row['seconds']} s", flush=True)
            if not is_right(row):
                print(row.get("told", ""), flush=True)
            table[key] = row | {"commit": here["commit"][:8]}
            write_table(table, here)
    wrong = [key for key, row in table.items() if not is_right(row)]
    print(f"{len(table)} of {len(known)} cases, {len(wrong)} not right", *wrong, sep="\n")
    return 1 if wrong or len(table) < len(known) else 0


if __name__ == "__main__":
    sys.exit(main())
