"""Simulate steps of published models on 64 ranks, beside the planned peaks.

    python -m tools.simulated_steps [--out results/plan]

Each is a command that a reader can give, and takes up to some minutes on one core. `simulated.json`
has what came out, and docs/concepts/simulation.md its table.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from tools.paired import command_line, write_json
from tools.plan_pages import with_table

from shardwise.metrics.hardware import environment
from shardwise.words import size

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "concepts" / "simulation.md"
START = "<!-- tools/simulated_steps.py -->"
DEVICES = "--devices 8xH100-80GB --nodes 8 --simulate"
STEPS = (
    "llama-3.1-8b --full --explain fsdp2 --tokens-per-step 4M",
    "llama-3.1-8b --explain fsdp2-tp:8-sp --tokens-per-step 4M",
    "llama-3.1-70b --explain fsdp2 --parallel.offload=none --tokens-per-step 4M",
    "olmo-hybrid-7b --explain fsdp2 --sequence 1K --tokens-per-step 64K",
    "olmo-hybrid-7b --full --explain pp:8-fsdp2 --sequence 1K --tokens-per-step 128K --rank 63",
)
"""Models and options."""


def main() -> None:
    options = command_line(__doc__, ROOT / "results" / "plan").parse_args()
    rows = [simulated(step) for step in STEPS]
    facts = environment(torch.device("cpu"))
    write_json(options.out / "simulated.json", {"environment": facts, "rows": rows})
    text = with_table(PAGE.read_text(encoding="utf-8"), table(rows), START)
    PAGE.write_text(text, encoding="utf-8")


def simulated(step: str) -> dict[str, Any]:
    """Return what a command says of its simulated step, and the memory that the command took."""
    arguments = [*step.split(), *DEVICES.split(), "--json"]
    command = [sys.executable, "-m", "shardwise", "plan", *arguments]
    print(step, flush=True)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        answer = json.load(process.stdout)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, step
    return {"step": step, "process_bytes": 1024 * usage.ru_maxrss} | answer["simulated"]


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Return the lines of the page's table."""
    lines = [
        "| model and options | took | memory | simulated peak | by formulas |",
        "|---|---:|---:|---:|---:|",
    ]
    for row in rows:
        difference = row["planned_bytes"] / row["simulated_bytes"] - 1
        lines.append(
            f"| `{row['step']}` | {row['seconds']:.0f} s | {row['process_bytes'] / 1e6:.0f} MB | "
            f"{size(row['simulated_bytes'])} | {difference:+.1%} |"
        )
    return lines


if __name__ == "__main__":
    main()
