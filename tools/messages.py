"""Measure collectives by size and number of processes, and write results/messages.md.

    for n in 2 4 2 4 2 4; do OMP_NUM_THREADS=1 torchrun --nproc-per-node $n -m tools.messages; done
    python -m tools.messages

Each run under torchrun adds its calls to results/messages.json. Calls of all kinds take turns, each
after a barrier; a call takes as long as on its slowest rank.
"""

from __future__ import annotations

import json
import os
import time
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from shardwise.base.words import seconds, size
from shardwise.metrics.hardware import environment
from shardwise.parallel.reduce import all_gather, reduce_scatter

RESULTS = Path(__file__).parents[1] / "results" / "messages.json"
PAGE = RESULTS.with_suffix(".md")
CALIBRATIONS = sorted((RESULTS.parent / "plan" / "calibrations").glob("*.json"))
SIZES = (2**10, 2**14, 2**17, 2**20, 2**23, 2**26)
CALLS = (41, 41, 41, 41, 15, 9)
HEAD = """# Collectives, measured

*Written by `python -m tools.messages` from [messages.json](messages.json) and
[calibrations](plan/calibrations).*

gloo, float32, a thread per process, {cores} cores of {device}, torch {torch}. Sizes are those of
whole tensors, of an all-to-all a rank's. gloo's reduce-scatter is an all-reduce inside.
[What each strategy sends](../docs/concepts/communication.md).
"""
SHARED = """
Calls of all kinds took turns, each after a barrier, in {rounds} rounds of 2, then 4 processes: the
median of {most} calls ({least} of the largest), the fastest in brackets. **The machine did other
work at the same time**, so medians are longer than on an idle one: they say how kinds and sizes
compare. Four processes also share {cores} cores.
"""
IDLE = """
## 2 processes, in a step

Seconds that a collective adds between stretches of computing, by the `shardwise calibrate` of
[planned times](plan/times.svg): the median of {number}, lowest and highest in brackets.

"""


def calls_of(num_bytes: int, number: int) -> dict[str, partial[Any]]:
    """Return the collectives of a tensor of so many bytes in all."""
    whole, into = torch.zeros(num_bytes // 4), torch.zeros(num_bytes // 4)
    part = torch.zeros(len(whole) // number)
    return {
        "all-reduce": partial(dist.all_reduce, whole),
        "all-gather": partial(all_gather, into, part),
        "reduce-scatter": partial(reduce_scatter, part, whole),
        "all-to-all": partial(dist.all_to_all_single, into, whole),
        "broadcast": partial(dist.broadcast, whole, 0),
        "reduce": partial(dist.reduce, whole, 0),
    }


def measure() -> None:
    """Put the times of this number of processes into the record."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    number, rows = dist.get_world_size(), list[list[Any]]()
    for num_bytes, times in zip(SIZES, CALLS, strict=True):
        calls = calls_of(num_bytes, number)
        took = torch.zeros(times + 1, len(calls), dtype=torch.float64)
        for turn in range(times + 1):
            for place, call in enumerate(calls.values()):
                dist.barrier()
                begin = time.perf_counter()
                call()
                took[turn, place] = time.perf_counter() - begin
        dist.all_reduce(took, dist.ReduceOp.MAX)
        columns = took[1:].T.tolist()  # the first turn connects the processes
        rows += [[kind, num_bytes, of] for kind, of in zip(calls, columns, strict=True)]
    if dist.get_rank() == 0:
        record: dict[str, Any] = {"processes": {}}
        if RESULTS.exists():
            record = json.loads(RESULTS.read_text(encoding="utf-8"))
        record["environment"] = environment(torch.device("cpu"))
        before = record["processes"].setdefault(str(number), [])
        for row in rows:
            row[2] = sorted(round(one, 6) for one in row[2])
        for old, new in zip(before, rows, strict=bool(before)):
            new[2] += old[2]
        record["processes"][str(number)] = rows
        RESULTS.write_text(json.dumps(record) + "\n", encoding="utf-8")
    dist.destroy_process_group()


def page() -> str:
    """Return the page."""
    record = json.loads(RESULTS.read_text(encoding="utf-8"))
    facts = record["environment"]
    cores = facts["cpu_count"]
    text = HEAD.format(cores=cores, device=facts["device"], torch=facts["torch"])
    for number, rows in sorted(record["processes"].items()):
        text += f"\n## {number} processes\n"
        if number == "2":
            most, least = len(rows[0][2]), len(rows[-1][2])
            rounds = most // CALLS[0]
            text += SHARED.format(rounds=rounds, most=most, least=least, cores=cores)
        cells = {
            (kind, num_bytes): f"{seconds(median(of))} ({seconds(min(of))})"
            for kind, num_bytes, of in rows
        }
        text += "\n" + _table(cells)
    times: dict[tuple[str, int], list[float]] = {}
    for path in CALIBRATIONS:
        for row in json.loads(path.read_text(encoding="utf-8"))["collectives"]:
            if row["kind"] in {kind for kind, *_ in rows}:
                times.setdefault((row["kind"], row["num_bytes"]), []).append(row["seconds"])
    cells = {
        key: f"{seconds(median(of))} ({seconds(min(of))} to {seconds(max(of))})"
        for key, of in times.items()
    }
    return text + IDLE.format(number=len(CALIBRATIONS)) + _table(cells)


def _table(cells: dict[tuple[str, int], str]) -> str:
    """Return a table with a row for each kind and a column for each size."""
    kinds, sizes = dict.fromkeys(kind for kind, _ in cells), dict.fromkeys(of for _, of in cells)
    lines = [["collective", *map(size, sizes)], ["---", *["---:"] * len(sizes)]]
    lines += [[kind, *(cells[kind, num_bytes] for num_bytes in sizes)] for kind in kinds]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


if __name__ == "__main__":
    if "RANK" in os.environ:
        measure()
    else:
        PAGE.write_text(page(), encoding="utf-8")
