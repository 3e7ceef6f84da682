"""Count what a training step sends under each layout, and write results/communication.json and .md from it.

    PYTHONPATH=. python tools/communication.py [--page-only]

The tool counts collectives and the bytes that each is given, beside those of the closed formulas in
tests/communication_formulas.py. `--page-only` writes the page from what results/communication.json
holds already. docs/concepts/communication.md explains the numbers.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from tests.communication import count
from tests.communication_formulas import expected, sent_bytes
from tests.distributed import run_ranks
from tests.parity.harness import SEQUENCE, Cell
from tests.parity.layouts import PROVEN

from shardwise.metrics.hardware import environment

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results" / "communication.json"
PAGE = ROOT / "results" / "communication.md"
NUM_RANKS, ROWS, MICRO_ROWS = 4, 8, 2
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
"""What leaves a rank, and by how many calls, as the page says it."""
TOGETHER = tuple(layout for layout in PROVEN if layout not in (*ALONE, "single"))
KINDS = ("all-reduce", "reduce-scatter", "all-gather", "send")
PAPER = {"ddp": 2, "zero1": 2, "zero2": 2, "fsdp2": 3}
"""Multiples of the model's size per step, of one micro-batch: Rajbhandari et al., arXiv 1910.02054, section 7."""
HEAD = """\
# What each strategy sends in a training step

[Communication](../docs/concepts/communication.md) explains the symbols and the formulas. `u` is the
number of units that are gathered together: embedding, layers, norm with head. The `+ 2` to `+ 5` of
the calls are a few numbers per step: the targets, the loss, the squares of the gradient norm, and
with `sp` the gradients of what every rank holds whole. Gradients of more than a bucket (25 MiB; the
first bucket of ddp: 1 MiB) take one call per bucket. Each number is that of the rank that sends most.

"""
FOOT = """
The last unit's backward follows its forward at once, so fsdp2 gathers it once: hence 2.94 and not 3.
"""


def page(result: dict[str, Any]) -> str:
    """The whole page."""
    rows = {(row["layout"], row["mode"]): row for row in result["rows"]}
    full, lora = result["all_bytes"], result["adapter_bytes"]
    facts = result["environment"]
    lines = [
        f"Counted on gloo: {facts['device']}, torch {facts['torch']}, commit {facts['commit'][:7]}. "
        "Written by `tools/communication.py` from [`communication.json`](communication.json).",
        "",
        "## One strategy",
        "",
        f"{result['model']}, {result['num_ranks']} processes, {result['global_batch_size']} rows of "
        f"{result['sequence_length']} tokens, {result['micro_batch_size']} rows per micro-batch. "
        f"Φ = {full:,} bytes; with LoRA Φ = {full + lora:,} and Φt = {lora:,}.",
        "",
        "| layout | bytes | calls, full | full: derived | counted | calls | LoRA: derived | counted | calls |",
        "|---|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for layout, formulas in ALONE.items():
        both = [rows[layout, mode] for mode in ("full", "lora")]
        cells = [
            f"{row['derived_bytes']:,} | {row['counted_bytes']:,} | {sum(row['calls'].values())}"
            for row in both
        ]
        lines.append(f"| {' | '.join((layout, *formulas, *cells))} |")
    lines += [
        "",
        "## Compositions",
        "",
        "1 row per micro-batch. Each number is counted, and equals the sum of the parts' formulas. "
        "Calls: all-reduces + reduce-scatters + all-gathers + sends. "
        "Of 8 processes pp-hsdp-tp makes 2 replicas of one shard.",
        "",
        "| layout | processes | full: bytes | calls | LoRA: bytes | calls |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for layout in TOGETHER:
        both = [rows[layout, mode] for mode in ("full", "lora")]
        cells = [
            f"{row['counted_bytes']:,} | {' + '.join(map(str, _by_kind(row)))}" for row in both
        ]
        lines.append(f"| {layout} | {both[0]['processes']} | {' | '.join(cells)} |")
    lines += [
        "",
        "## Beside the table of ZeRO's authors",
        "",
        "One micro-batch per step, in units of r Φ.",
        "",
    ]
    lines += ["| | " + " | ".join(PAPER) + " |", "|---|" + "---:|" * len(PAPER)]
    lines.append(
        "| Rajbhandari et al., section 7 | "
        + " | ".join(f"{times}" for times in PAPER.values())
        + " |"
    )
    unit = full * (result["num_ranks"] - 1) / result["num_ranks"]
    counted = [rows[layout, "full"]["counted_bytes"] / unit for layout in PAPER]
    lines.append(
        "| counted, full training | " + " | ".join(f"{times:.2f}" for times in counted) + " |"
    )
    return HEAD + "\n".join(lines) + "\n" + FOOT


def _by_kind(row: dict[str, Any]) -> list[int]:
    return [sum(n for key, n in row["calls"].items() if key.startswith(kind)) for kind in KINDS]


def measure() -> dict[str, Any]:
    """Run every layout once in each mode."""
    rows: list[dict[str, Any]] = []
    sizes = {}
    for layout in (*ALONE, *TOGETHER):
        parts = layout.removesuffix("-sp").split("-")
        nproc, micro_rows = NUM_RANKS, MICRO_ROWS
        if layout in TOGETHER:  # 2 ranks an axis, of 8 at most
            nproc, micro_rows = 8 if len(parts) == 3 or "hsdp" in parts else 4, 1
        for mode in ("full", "lora"):
            schedule = "1f1b" if "pp" in parts else ""
            cell = Cell(
                "llama", layout, mode, nproc, schedule=schedule, rows=ROWS, micro_rows=micro_rows
            )
            ranks = run_ranks(nproc, count, cell)
            most = max(ranks, key=lambda rank: sent_bytes(rank.sent, rank.facts.sizes))
            facts = most.facts
            derived = expected(facts)
            rows.append(
                {
                    "layout": layout,
                    "mode": mode,
                    "processes": nproc,
                    "micro_batches": facts.num_microbatches,
                    "derived_bytes": sent_bytes(derived, facts.sizes),
                    "counted_bytes": sent_bytes(most.sent, facts.sizes),
                    "whole_bytes": {
                        " ".join(key): size for key, (_, size) in sorted(most.sent.items())
                    },
                    "derived_calls": {
                        " ".join(key): number for key, (number, _) in sorted(derived.items())
                    },
                    "calls": {
                        " ".join(key): number for key, (number, _) in sorted(most.sent.items())
                    },
                }
            )
            if layout == "ddp":
                sizes[mode] = facts.bytes_of(facts.trained)
            print(rows[-1], flush=True)
    return {
        "environment": environment(),
        "model": "configs/models/tiny-llama",
        "num_ranks": NUM_RANKS,
        "global_batch_size": ROWS,
        "micro_batch_size": MICRO_ROWS,
        "sequence_length": SEQUENCE,
        "all_bytes": sizes["full"],
        "adapter_bytes": sizes["lora"],
        "rows": rows,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--page-only", action="store_true")
    if not parser.parse_args().page_only:
        RESULTS.write_text(json.dumps(measure(), indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(page(json.loads(RESULTS.read_text(encoding="utf-8"))), encoding="utf-8")
