"""Bytes per rank of GPT-2 Large under single, DDP, ZeRO-3 and ZeRO-3 x TP, beside published peaks.

    python -m tools.gpt2_large [--out results/gpt2-large]

States and peaks are those of `shardwise.lab.planner` for rank 0 of each of
configs/gpt2-large/*.yaml, on a GPU. The peak was not measured at this size. What CUDA's context
and NCCL take is not in it, nor what an allocator rounds up or holds in reserve.
tests/integration/test_gpt2_large.py compares both, on a small model, with what real ranks hold.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from tools.paired import command_line, table, write_json

from shardwise.assembly.describe import describe
from shardwise.base.layouts import AXES
from shardwise.base.words import NOTHING
from shardwise.config import RunConfig
from shardwise.config.run_file import load_config
from shardwise.lab.planner.communication import unknown
from shardwise.lab.planner.memory import PeakBytes, state_bytes
from shardwise.lab.planner.peak import memory_of_run
from shardwise.lab.planner.share import share_of
from shardwise.metrics.hardware import environment

ROOT = Path(__file__).parents[1]
PUBLISHED_GIB = {
    ("ddp", 8): 21.37,
    ("zero3", 8): 8.33,
    ("fsdp2-tp", 8): 6.36,
    ("fsdp2-tp", 32): 17.81,
}
"""torch.cuda.max_memory_allocated by layout and rows per GPU: README of
github.com/makramab/hybrid-parallelism, commit 7daabf26."""
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
    options = command_line(__doc__, ROOT / "results" / "gpt2-large").parse_args()
    rows = [row_of(layout, rows) for layout in NUM_GPUS for rows in ROWS]
    result = {"environment": environment(), "unit": "bytes on rank 0", "rows": rows}
    write_json(options.out / "memory.json", result)
    page = page_of(rows)
    (options.out / "memory.md").write_text(page, encoding="utf-8")
    print(page)


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
        "published_peak_gib": PUBLISHED_GIB.get((layout, rows)),
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
