"""Memory and MFU of GPT-2 Large under single, DDP, ZeRO-3 and ZeRO-3 x TP, beside published ones.

    python -m tools.gpt2_large [--out results/gpt2-large] [--bench runs/gpt2-large-small]

It writes the tables of docs/guides/gpt2-large.md too. `--bench` takes a run of
configs/gpt2-large/small/sweep.yaml, from which small.json is written.

States and peaks are those of `shardwise.lab.planner` for rank 0 of each of
configs/gpt2-large/*.yaml, on a GPU. The peak was not measured at this size. What CUDA's context
and NCCL take is not in it, nor what an allocator rounds up or holds in reserve.
tests/integration/test_gpt2_large.py compares both, on a small model, with what real ranks hold.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from tools.paired import command_line, table, write_json
from tools.plan_pages import with_table

from shardwise.assembly.describe import describe
from shardwise.base.layouts import AXES
from shardwise.base.records.cell import CellRecord
from shardwise.base.words import NOTHING, number, scientific, size
from shardwise.config import RunConfig
from shardwise.config.run_file import load_config
from shardwise.lab.planner.candidates import Question
from shardwise.lab.planner.cluster import cluster_of
from shardwise.lab.planner.communication import unknown
from shardwise.lab.planner.exact import explain
from shardwise.lab.planner.memory import PeakBytes, state_bytes
from shardwise.lab.planner.peak import memory_of_run
from shardwise.lab.planner.plan_page import time_parts
from shardwise.lab.planner.share import share_of
from shardwise.metrics.hardware import environment

ROOT = Path(__file__).parents[1]
GUIDE = ROOT / "docs" / "guides" / "gpt2-large.md"
PUBLISHED_GIB = {
    ("ddp", 8): 21.37,
    ("zero3", 8): 8.33,
    ("fsdp2-tp", 8): 6.36,
    ("fsdp2-tp", 32): 17.81,
}
"""torch.cuda.max_memory_allocated by layout and rows per GPU: README of
github.com/makramab/hybrid-parallelism, commit 7daabf26."""
PUBLISHED_MFU = {
    ("single", 8): (None, 0.45),
    ("ddp", 8): (0.332, 0.43),
    ("zero3", 8): (0.198, 0.26),
    ("fsdp2-tp", 8): (0.19, 0.19),
    ("fsdp2-tp", 32): (0.526, 0.52),
}
"""The same project's README, commits 7daabf26 and 4c0379c."""
NAMES = {"single": "single", "ddp": "DDP", "zero3": "ZeRO-3", "fsdp2-tp": "ZeRO-3 x TP"}
NUM_GPUS = {"single": 1, "ddp": 4, "zero3": 4, "fsdp2-tp": 4}
ROWS = (8, 32)
LOSSES = ("chunked", "plain")
COLUMNS = (
    *("layout", "rows", "weights", "gradients", "AdamW", "states", "peak", "moment"),
    *("plain loss", "moment", "published"),
)
HEAD = """\
# GPT-2 Large, 1,024 tokens, bfloat16 products, AdamW, checkpoints: GB (10^9 bytes) on rank 0

States are exact, peaks planned, neither measured on GPUs. Published are peaks of another program,
in float16 and with dropout (makramab/hybrid-parallelism, commit 7daabf26). Nothing is planned of a
loss that gathers all logits over tensor-parallel ranks.

"""


def main() -> None:
    parser = command_line(__doc__, ROOT / "results" / "gpt2-large")
    parser.add_argument("--bench", type=Path, help="the folder of a run of small/sweep.yaml")
    options = parser.parse_args()
    if options.bench is not None:
        write_json(options.out / "small.json", small_of(options.bench))
    rows = [row_of(layout, rows) for layout in NUM_GPUS for rows in ROWS]
    result = {"environment": environment(), "unit": "bytes on rank 0", "rows": rows}
    write_json(options.out / "memory.json", result)
    page = page_of(rows)
    (options.out / "memory.md").write_text(page, encoding="utf-8")
    print(page)
    small = json.loads((options.out / "small.json").read_text(encoding="utf-8"))
    text = GUIDE.read_text(encoding="utf-8")
    for name, lines in tables_of(rows, small).items():
        text = with_table(text, lines, f"<!-- tools/gpt2_large.py {name} -->")
    GUIDE.write_text(text, encoding="utf-8")


def tables_of(rows: list[dict[str, Any]], small: dict[str, Any]) -> dict[str, list[str]]:
    """Return the tables of the guide by name."""
    memory = table(
        ("layout", "rows", "states", "peak", "with all logits", "published"),
        map(memory_cells, rows),
    )
    shares = "layers", "recomputed", "messages", "elementwise", "MFU", "without elementwise"
    columns = "layout", "rows", "step", *shares, "published", "earlier"
    speed = table(columns, map(speed_cells, rows))
    columns = ("layout", "processes", "states", "peak", "loss, off by", "tokens/s", "samples/s")
    return {
        "memory": [memory],
        "speed": [speed],
        "small": [table(columns, map(small_cells, small["cells"]))],
    }


def memory_cells(row: dict[str, Any]) -> list[str]:
    """Return the cells of a row of the guide's table on memory, in GB of 10^9 bytes."""
    cells = cells_of(row)
    states = sum(row["state_bytes"].values()) / 1e9
    return [NAMES[row["layout"]], cells[1], f"{states:.1f}", cells[6], cells[8], cells[10]]


def speed_cells(row: dict[str, Any]) -> list[str]:
    """Return the cells of a row of the guide's table on MFU: parts as shares of the step."""
    plan, published = row["plan"], row["published_mfu"]
    parts, seconds = plan["parts"], plan["step_seconds"]
    share = plan["elementwise"] / seconds
    shares = [
        *((parts["layers"] + parts["head"]) / seconds, parts["recomputation"] / seconds),
        *(parts["communication"] / seconds, share, plan["mfu"], plan["mfu"] / (1 - share)),
    ]
    return [
        *(NAMES[row["layout"]], str(row["rows_per_device"]), f"{seconds:.2f} s"),
        *(f"{100 * share:.0f}" for share in shares),
        *(NOTHING if number is None else f"{100 * number:.3g}" for number in published),
    ]


def small_of(bench: Path) -> dict[str, Any]:
    """Return what the cells of a bench of small/sweep.yaml have measured, beside one process."""
    records = [CellRecord.read(path) for path in sorted(bench.glob("*/record.json"))]
    records.sort(key=lambda record: record.cell["nproc"])
    cells = {r.cell["id"]: r for r in records if not r.cell["control"]}
    one = cells["single"].losses
    return {
        "environment": cells["single"].environment,
        "cells": [
            {
                "layout": name,
                "processes": record.cell["nproc"],
                "state_bytes": [sum(rank.values()) for rank in record.state_bytes or ()],
                "peak_memory_bytes": record.peak_memory_bytes,
                "largest_loss_difference": max(abs(a / b - 1) for a, b in zip(record.losses, one)),
                "tokens_per_second": record.tokens_per_second,
                "samples_per_second": record.samples_per_second,
                "range": record.spread.get("tokens_per_second"),
                "others_share": [entry["others_share"] for entry in record.rounds],
            }
            for name, record in cells.items()
        ],
    }


def small_cells(cell: dict[str, Any]) -> list[str]:
    """Return the cells of a row of the guide's table on small runs."""
    low, high = cell["range"] or (None, None)
    speed = f"{number(cell['tokens_per_second'])} ({number(low)} to {number(high)})"
    return [
        cell["layout"].rpartition("-")[0].replace("-", " x ") or cell["layout"],
        str(cell["processes"]),
        size(max(cell["state_bytes"])),
        size(max(cell["peak_memory_bytes"])),
        scientific(cell["largest_loss_difference"]),
        speed if cell["tokens_per_second"] else NOTHING,
        number(cell["samples_per_second"]) if cell["tokens_per_second"] else NOTHING,
    ]


def page_of(rows: list[dict[str, Any]]) -> str:
    """Return the page of some rows."""
    return HEAD + table(COLUMNS, map(cells_of, rows)) + "\n"


def row_of(layout: str, rows: int) -> dict[str, Any]:
    """Return states and planned peaks of one run file."""
    cfg = load_config(ROOT / "configs" / "gpt2-large" / f"{layout}-{rows}.yaml")
    # Nothing is read with the tokenizer, and the corpus that it comes from need not be there.
    model = replace(cfg.model, path=str(ROOT / cfg.model.path), tokenizer=None)
    cfg = replace(cfg, model=model)
    peaks = {loss: peak_of(cfg, NUM_GPUS[layout], loss, "cuda") for loss in LOSSES}
    return {
        "layout": layout,
        "rows_per_device": rows,
        "state_bytes": states_of(cfg, NUM_GPUS[layout]),
        "peaks": {
            loss: peak and {"bytes": peak.total - peak.overhead, "moment": peak.moment}
            for loss, peak in peaks.items()
        },
        "plan": plan_of(cfg, NUM_GPUS[layout]),
        "published_mfu": PUBLISHED_MFU.get((layout, rows), (None, None)),
        "published_peak_gib": PUBLISHED_GIB.get((layout, rows)),
    }


def plan_of(cfg: RunConfig, num_gpus: int) -> dict[str, Any]:
    """Return the planned step on A100s, its parts in seconds, and the MFU."""
    choice, _ = explain(Question(cfg, cluster_of(f"{num_gpus}xA100-40GB", 1, None)))
    time = choice.time
    return {
        "step_seconds": time.total,
        "parts": time_parts(time),
        "elementwise": time.elementwise,
        "mfu": choice.mfu,
    }


def states_of(cfg: RunConfig, world_size: int) -> dict[str, int]:
    """Return the bytes of weights, gradients and optimizer that rank 0 of a run holds."""
    run, first = describe(cfg, world_size), dict.fromkeys(AXES, 0)
    return state_bytes(cfg, share_of(cfg, run, first), run.sizes, first)


def peak_of(cfg: RunConfig, world_size: int, loss: Any, device: Any) -> PeakBytes | None:
    """Return the planned memory of a rank on a device at its peak; None where none is planned."""
    cfg = replace(cfg, training=replace(cfg.training, loss=loss, device="cpu"))
    if unknown(cfg) is not None:
        return None
    run = describe(cfg, world_size)
    return memory_of_run(replace(cfg, training=replace(cfg.training, device=device)), run)


def cells_of(row: dict[str, Any]) -> list[str]:
    """Return the cells of a row of the page, in GB of 10^9 bytes."""
    states = list(row["state_bytes"].values())
    sizes = [f"{size / 1e9:.2f}" for size in (*states, sum(states))]
    cells = [row["layout"], str(row["rows_per_device"]), *sizes]
    for peak in row["peaks"].values():
        cells += [f"{peak['bytes'] / 1e9:.1f}", peak["moment"]] if peak else [NOTHING, NOTHING]
    published = row["published_peak_gib"]
    return [*cells, NOTHING if published is None else f"{published * 2**30 / 1e9:.1f}"]


if __name__ == "__main__":
    main()
