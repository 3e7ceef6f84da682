"""Compute what a training step sends under each layout, for results/communication.json and .md.

    python -m tools.communication

The numbers are those of shardwise.lab.planner.communication: no process is started.
tests/parallel/test_communication.py counts the collectives of real steps, and finds the same calls
and bytes. docs/concepts/communication.md explains the numbers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from tools.between_nodes import bytes_between_nodes

from shardwise.assembly.describe import Description, describe
from shardwise.base.layouts import AXES, num_microbatches, parallel_of
from shardwise.config import Data, Lora, Model, RunConfig, Training
from shardwise.config.rules import offered_layouts
from shardwise.lab.planner.communication import bytes_leaving, messages_of_step
from shardwise.lab.planner.messages import Share, sizes_of
from shardwise.lab.planner.share import boundaries_of, share_of

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results" / "communication.json"
PAGE = ROOT / "results" / "communication.md"
MODEL, EXPERT_MODEL = "configs/models/tiny-llama", "configs/models/tiny-qwen3_moe"
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
AXES_OF = {name: set(name.split("-")) - {"sp"} for name in offered_layouts()}
CONTEXT = [
    name for name, axes in AXES_OF.items() if "cp" in axes and "ep" not in axes and len(axes) <= 2
]
EXPERTS = [name for name, axes in AXES_OF.items() if "ep" in axes and len(axes) <= 3]
TOGETHER = [
    name
    for name, axes in AXES_OF.items()
    if name not in (*ALONE, "single") and not {"cp", "ep"} & axes
]
"""All compositions without `cp` and `ep`. With these, those of two axes, beside `ep`, at most."""
KINDS = ("all-reduce", "reduce-scatter", "all-gather", "send", "all-to-all")
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
the formulas of `shardwise.lab.planner.communication`. `tests/parallel/test_communication.py` counts
the calls and bytes of real steps, on gloo, of every strategy and of compositions. They are equal.

## One strategy

{model}, {num_ranks} processes, {rows} rows of {sequence} tokens, {micro_rows} rows per micro-batch.
Φ = {full:,} bytes; with LoRA Φ = {with_lora:,} and Φt = {lora:,}.

| layout | bytes | calls, full | full: bytes | calls | LoRA: bytes | calls |
|---|---|---|---:|---:|---:|---:|
{alone}

## Compositions

1 row per micro-batch. Calls: all-reduces + reduce-scatters + all-gathers + sends. Of 8 processes
pp-hsdp-tp makes 2 replicas of one shard.

{together}

## With context parallelism

The same model and rows; the tokens of each row lie on 2 ranks, or under `cp` alone on 4. The last
number of calls are all-to-alls.

{context}

## With expert parallelism

{expert_model}, three of whose layers have 8 experts, of which a token
goes to 2. Every 2 ranks that have tokens of their own share the experts, each of which is given as
many tokens. The last number of calls are all-to-alls.

{experts}

## Between two nodes

What all ranks together send to the other node where each node has half of them, in a ring of the
ranks in their order. `tests/clusters/test_bytes.py` counts it on a cable between two nodes.

{between}

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
    layouts = (*ALONE, *TOGETHER, *CONTEXT, *EXPERTS)
    rows = [row_of(layout, mode) for layout in layouts for mode in ("full", "lora")]
    sizes = {mode: trained_bytes(config("ddp", mode)) for mode in ("full", "lora")}
    return {
        "model": MODEL,
        "expert_model": EXPERT_MODEL,
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
    totals = [messages_of_step(cfg, run, share) for share in shares(cfg, run)]
    sizes = sizes_of(cfg, run)
    most = max(totals, key=lambda total: bytes_leaving(total, sizes))
    crossing = bytes_between_nodes(cfg, run, num_ranks // 2, boundaries_of(cfg, run))
    return {
        "layout": layout,
        "mode": mode,
        "processes": num_ranks,
        "micro_batches": num_microbatches(cfg, num_ranks),
        "bytes": bytes_leaving(most, sizes),
        "bytes_between_two_nodes": None if crossing is None else sum(crossing.values()),
        "whole_bytes": {" ".join(key): num_bytes for key, (_, num_bytes) in sorted(most.items())},
        "calls": {" ".join(key): calls for key, (calls, _) in sorted(most.items())},
    }


def shares(cfg: RunConfig, run: Description) -> list[Share]:
    """Return the shares of ranks with other stages or tokens; all others send as much as these."""
    boundaries = boundaries_of(cfg, run)
    first = dict.fromkeys(AXES, 0)
    places = product(range(run.sizes["pp"]), range(run.sizes["cp"]))
    return [share_of(cfg, run, first | {"pp": pp, "cp": cp}, boundaries) for pp, cp in places]


def config(layout: str, mode: str) -> RunConfig:
    """Return the run file of a layout. A strategy that stands alone has all processes."""
    parallel = parallel_of(layout)
    if layout in ("tp", "tp-sp"):
        parallel = replace(parallel, tp=NUM_RANKS)
    if layout in ("cp", "cp-ep"):
        parallel = replace(parallel, cp=NUM_RANKS)
    if parallel.pp > 1:
        parallel = replace(parallel, pp=NUM_RANKS if layout == "pp" else 2, split="uniform")
    training = Training(
        output_dir="unused",
        global_batch_size=ROWS,
        micro_batch_size=MICRO_ROWS if layout in ALONE else 1,
        device="cpu",
    )
    model = Model(str(ROOT / (EXPERT_MODEL if parallel.ep > 1 else MODEL)), init="random")
    lora = Lora(r=4, alpha=8) if mode == "lora" else None
    return RunConfig(model, Data("unused", sequence_length=SEQUENCE), training, lora, parallel)


def processes(layout: str) -> int:
    """Return the processes of a layout: in a composition 2 along each axis, 8 at most."""
    parts = set(layout.split("-")) - {"sp", "ep"}
    return 8 if len(parts) == 3 or ("hsdp" in parts and layout not in ALONE) else NUM_RANKS


def trained_bytes(cfg: RunConfig) -> int:
    """Return the bytes of what a run trains."""
    (share,) = shares(cfg, describe(cfg, NUM_RANKS))
    return sum(weight.itemsize * weight.numel for weight in share.trained)


def page(result: Mapping[str, Any]) -> str:
    """Return the page of these results."""
    rows = {(row["layout"], row["mode"]): row for row in result["rows"]}
    alone = []
    for layout, formulas in ALONE.items():
        cells = [
            f"{rows[layout, mode]['bytes']:,} | {sum(rows[layout, mode]['calls'].values())}"
            for mode in ("full", "lora")
        ]
        alone.append(f"| {' | '.join((layout, *formulas, *cells))} |")
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
        together=_table(TOGETHER, rows, KINDS[:-1]),
        context=_table(CONTEXT, rows, KINDS),
        experts=_table(EXPERTS, rows, KINDS),
        expert_model=result["expert_model"],
        between=_between((*ALONE, *TOGETHER), rows),
        names=" | ".join(PAPER),
        rule="---:|" * len(PAPER),
        published=" | ".join(map(str, PAPER.values())),
        here=" | ".join(f"{rows[layout, 'full']['bytes'] / unit:.2f}" for layout in PAPER),
    )


def _table(
    layouts: Sequence[str], rows: Mapping[tuple[str, str], Any], kinds: Sequence[str]
) -> str:
    """Return the table of compositions, with the calls of each kind over all axes."""
    lines = [
        "| layout | processes | full: bytes | calls | LoRA: bytes | calls |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for layout in layouts:
        cells = [layout, str(rows[layout, "full"]["processes"])]
        for row in (rows[layout, mode] for mode in ("full", "lora")):
            calls = row["calls"].items()
            numbers = [sum(n for key, n in calls if key.startswith(kind)) for kind in kinds]
            cells += [f"{row['bytes']:,}", " + ".join(map(str, numbers))]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _between(layouts: Sequence[str], rows: Mapping[tuple[str, str], Any]) -> str:
    """Return the table of what crosses between two nodes."""
    lines = ["| layout | processes | full: bytes | LoRA: bytes |", "|---|---:|---:|---:|"]
    for layout in layouts:
        cells = [f"{rows[layout, mode]['bytes_between_two_nodes']:,}" for mode in ("full", "lora")]
        lines.append(f"| {layout} | {rows[layout, 'full']['processes']} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    content = compute()
    RESULTS.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(page(content), encoding="utf-8")
