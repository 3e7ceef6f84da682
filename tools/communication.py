"""Compute what a training step sends under each layout, for results/communication.json and .md.

    python tools/communication.py

The numbers are those of shardwise.planner.communication: no process is started.
tests/parallel/test_communication.py counts the collectives of real steps, and finds the same calls
and bytes. docs/concepts/communication.md explains the numbers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from shardwise.assembly.costs import choose_split, costs_of
from shardwise.assembly.describe import describe
from shardwise.config import Data, Lora, Model, RunConfig, Training
from shardwise.layouts import AXES, num_microbatches, parallel_of
from shardwise.planner.communication import bytes_leaving, messages_of_step
from shardwise.planner.share import Share, share_of
from shardwise.rules import offered_layouts

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results" / "communication.json"
PAGE = ROOT / "results" / "communication.md"
MODEL = "configs/models/tiny-llama"
NUM_RANKS, ROWS, MICRO_ROWS, SEQUENCE = 4, 8, 2, 24
ALONE = {
    "ddp": ("2 r Φt", "1 + 2"),
    "zero1": ("r Φt + r Φt", "2 + 3"),
    "zero2": ("m r Φt + r Φt", "m + 1 + 3"),
    "fsdp1": ("m (2 r Φ - r Φlast + r Φt)", "m (3 u - 1) + 3"),
    "fsdp2": ("m (2 r Φ - r Φlast + r Φt)", "m (3 u - 1) + 3"),
    "hsdp": ("the same within shards, and 2 r Φt / shards", "m (3 u - 1) + u + 5"),
    "tp": ("m r (4 blocks + 4) BTD", "m (2 blocks + 4) + 1"),
    "tp-sp": ("m r (4 blocks + 5) BTD", "m (4 blocks + 6) + 2"),
    "pp": ("2 m BTD", "2 m + 2"),
}
"""What leaves a rank, and by how many calls, as the page has it."""
TOGETHER = tuple(
    name
    for name in offered_layouts()
    if name not in (*ALONE, "single") and not {"cp", "ep"} & set(name.split("-"))
)
KINDS = ("all-reduce", "reduce-scatter", "all-gather", "send")
PAPER = {"ddp": 2, "zero1": 2, "zero2": 2, "fsdp2": 3}
"""Multiples of the model's size per step, of one micro-batch: Rajbhandari et al., arXiv 1910.02054,
section 7."""
PAGE_TEMPLATE = """\
# What each strategy sends in a training step

[Communication](../docs/concepts/communication.md) explains the symbols and the formulas. `u` is the
number of units that are gathered together: embedding, layers, norm with head. The `+ 2` to `+ 5` of
the calls are a few numbers per step: the targets, the loss, the squares of the gradient norm, and
with `sp` the gradients of what every rank holds whole. Gradients of more than a bucket (25 MiB; the
first bucket of ddp: 1 MiB) take one call per bucket. Each number is that of the rank that sends
most, with a target at every position.

`tools/communication.py` has written this page and [`communication.json`](communication.json) with
the formulas of `shardwise.planner.communication`. `tests/parallel/test_communication.py` counts the
calls and bytes of real steps, on gloo, under every layout, and they are equal.

## One strategy

{model}, {num_ranks} processes, {rows} rows of {sequence} tokens, {micro_rows} rows per micro-batch.
Φ = {full:,} bytes; with LoRA Φ = {with_lora:,} and Φt = {lora:,}.

| layout | bytes | calls, full | full: bytes | calls | LoRA: bytes | calls |
|---|---|---|---:|---:|---:|---:|
{alone}

## Compositions

1 row per micro-batch. Calls: all-reduces + reduce-scatters + all-gathers + sends. Of 8 processes
pp-hsdp-tp makes 2 replicas of one shard.

| layout | processes | full: bytes | calls | LoRA: bytes | calls |
|---|---:|---:|---:|---:|---:|
{together}

## Beside the table of ZeRO's authors

One micro-batch per step, in units of r Φ.

| | {names} |
|---|{rule}
| Rajbhandari et al., section 7 | {published} |
| full training here | {here} |

The last unit's backward follows its forward at once, so fsdp2 gathers it once: hence 2.94 and not
3.
"""


def compute() -> dict[str, Any]:
    """Return the sizes of the model, and what every layout sends in each mode."""
    rows = [row_of(layout, mode) for layout in (*ALONE, *TOGETHER) for mode in ("full", "lora")]
    sizes = {mode: trained_bytes(config("ddp", mode)) for mode in ("full", "lora")}
    return {
        "model": MODEL,
        "num_ranks": NUM_RANKS,
        "global_batch_size": ROWS,
        "micro_batch_size": MICRO_ROWS,
        "sequence_length": SEQUENCE,
        "all_bytes": sizes["full"],
        "adapter_bytes": sizes["lora"],
        "rows": rows,
    }


def row_of(layout: str, mode: str) -> dict[str, Any]:
    """Return what the rank that sends most sends in a step."""
    cfg, num_ranks = config(layout, mode), processes(layout)
    run = describe(cfg, num_ranks)
    totals = [messages_of_step(cfg, run, share) for share in shares(cfg, num_ranks)]
    most = max(totals, key=lambda total: bytes_leaving(total, run.sizes))
    return {
        "layout": layout,
        "mode": mode,
        "processes": num_ranks,
        "micro_batches": num_microbatches(cfg, num_ranks),
        "bytes": bytes_leaving(most, run.sizes),
        "whole_bytes": {" ".join(key): num_bytes for key, (_, num_bytes) in sorted(most.items())},
        "calls": {" ".join(key): calls for key, (calls, _) in sorted(most.items())},
    }


def shares(cfg: RunConfig, num_ranks: int) -> list[Share]:
    """Return the share of one rank of each stage; the others of a stage send as much."""
    run = describe(cfg, num_ranks)
    boundaries = None
    if run.pipeline is not None:
        units, _ = costs_of(cfg, run.hf, run.spec, None, num_ranks, run.sizes["dp_shard"])
        boundaries = choose_split(cfg, units, run.pipeline.num_microbatches).boundaries
    first = dict.fromkeys(AXES, 0)
    return [share_of(cfg, run, first | {"pp": pp}, boundaries) for pp in range(run.sizes["pp"])]


def config(layout: str, mode: str) -> RunConfig:
    """Return the run file of a layout. A strategy that stands alone has all processes."""
    parallel = parallel_of(layout)
    if layout in ("tp", "tp-sp"):
        parallel = replace(parallel, tp=NUM_RANKS)
    if parallel.pp > 1:
        parallel = replace(parallel, pp=NUM_RANKS if layout == "pp" else 2, split="uniform")
    training = Training(
        output_dir="unused",
        global_batch_size=ROWS,
        micro_batch_size=MICRO_ROWS if layout in ALONE else 1,
        device="cpu",
    )
    model = Model(str(ROOT / MODEL), init="random")
    lora = Lora(r=4, alpha=8) if mode == "lora" else None
    return RunConfig(model, Data("unused", sequence_length=SEQUENCE), training, lora, parallel)


def processes(layout: str) -> int:
    """Return the processes of a layout: in a composition 2 along each axis, 8 at most."""
    parts = layout.removesuffix("-sp").split("-")
    return 8 if len(parts) == 3 or ("hsdp" in parts and layout not in ALONE) else NUM_RANKS


def trained_bytes(cfg: RunConfig) -> int:
    """Return the bytes of what a run trains."""
    (share,) = shares(cfg, NUM_RANKS)
    return sum(weight.itemsize * weight.numel for weight in share.trained)


def page(result: Mapping[str, Any]) -> str:
    """Return the page of these results."""
    rows = {(row["layout"], row["mode"]): row for row in result["rows"]}
    alone, together = [], []
    for layout, formulas in ALONE.items():
        cells = [
            f"{rows[layout, mode]['bytes']:,} | {sum(rows[layout, mode]['calls'].values())}"
            for mode in ("full", "lora")
        ]
        alone.append(f"| {' | '.join((layout, *formulas, *cells))} |")
    for layout in TOGETHER:
        both = [rows[layout, mode] for mode in ("full", "lora")]
        cells = [f"{row['bytes']:,} | {' + '.join(map(str, _by_kind(row)))}" for row in both]
        together.append(f"| {layout} | {both[0]['processes']} | {' | '.join(cells)} |")
    unit = result["all_bytes"] * (result["num_ranks"] - 1) / result["num_ranks"]
    return PAGE_TEMPLATE.format(
        model=result["model"],
        num_ranks=result["num_ranks"],
        rows=result["global_batch_size"],
        sequence=result["sequence_length"],
        micro_rows=result["micro_batch_size"],
        full=result["all_bytes"],
        lora=result["adapter_bytes"],
        with_lora=result["all_bytes"] + result["adapter_bytes"],
        alone="\n".join(alone),
        together="\n".join(together),
        names=" | ".join(PAPER),
        rule="---:|" * len(PAPER),
        published=" | ".join(map(str, PAPER.values())),
        here=" | ".join(f"{rows[layout, 'full']['bytes'] / unit:.2f}" for layout in PAPER),
    )


def _by_kind(row: Mapping[str, Any]) -> list[int]:
    """Return the calls of each of KINDS, over all axes."""
    calls = row["calls"].items()
    return [sum(number for key, number in calls if key.startswith(kind)) for kind in KINDS]


if __name__ == "__main__":
    content = compute()
    RESULTS.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(page(content), encoding="utf-8")
