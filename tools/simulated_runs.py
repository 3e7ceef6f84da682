"""Peaks of models of seven and eight billion parameters on 64 ranks: simulated, and by formulas.

    python tools/simulated_runs.py [--out results/plan/simulated]

Each run is the arguments of `shardwise plan`, in a process of its own. Its step is simulated for
one rank of the layout; `seconds` are those of the simulation, `process_bytes` the most memory that
the process took for everything.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from shardwise.benchmark.paired import command_line, table, write_json
from shardwise.metrics.hardware import environment

ROOT = Path(__file__).parents[1]
DEVICES = "--devices 8xH100-80GB --nodes 8 --sequence 4096 --tokens-per-step 1M"
RUNS = """
olmo-hybrid-7b --full --explain fsdp2
olmo-hybrid-7b --full --explain fsdp2-tp:8-sp
olmo-hybrid-7b --full --explain fsdp2-cp:4
olmo-hybrid-7b --full --explain pp:4-fsdp2 --rank 63
olmo-hybrid-7b --explain ddp
olmo2-7b --full --explain fsdp2
llama-3.1-8b --full --explain pp:4-fsdp2-tp:2-sp
"""
COLUMNS = ("run", "layout", "rank", "simulated GiB", "by formulas", "seconds", "process GiB")
HEAD = f"""\
# A rank of 64, simulated on a CPU

`shardwise plan` with `{DEVICES} --simulate`. Both peaks are of a CPU's kernels.

"""


def main() -> None:
    options = command_line(__doc__, ROOT / "results" / "plan" / "simulated").parse_args()
    rows = [simulated(line) for line in RUNS.strip().splitlines()]
    write_json(options.out.with_suffix(".json"), {"environment": environment(), "rows": rows})
    page = HEAD + table(COLUMNS, map(cells, rows)) + "\n"
    options.out.with_suffix(".md").write_text(page, encoding="utf-8")
    print(page)


def simulated(line: str) -> dict[str, Any]:
    """Return both peaks of a run, and what the simulation took."""
    arguments = [*shlex.split(line), *shlex.split(DEVICES), "--simulate", "--json"]
    with tempfile.TemporaryFile("w+", encoding="utf-8") as output:
        command = [sys.executable, "-m", "shardwise", "plan", *arguments]
        process = subprocess.Popen(command, stdout=output)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        assert process.returncode == 0, f"{line}: exit code {process.returncode}"
        output.seek(0)
        answer = json.load(output)
    best = answer["choices"][0]
    layout = f"{best['title']}, {best['details']}"
    return {
        "run": line,
        "layout": layout,
        **answer["simulated"],
        "process_bytes": 1024 * usage.ru_maxrss,
    }


def cells(row: dict[str, Any]) -> tuple[object, ...]:
    """Return a row of the table."""
    peak = row["simulated_bytes"]
    return (
        f"`{row['run']}`",
        row["layout"],
        row["rank"],
        f"{peak / 2**30:.2f}",
        f"{row['planned_bytes'] / peak - 1:+.2%}",
        f"{row['seconds']:.0f}",
        f"{row['process_bytes'] / 2**30:.1f}",
    )


if __name__ == "__main__":
    main()
