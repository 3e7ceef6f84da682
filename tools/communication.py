"""Count what a training step sends under each layout, and write docs/concepts/communication.md from it.

    PYTHONPATH=. python tools/communication.py [--page-only]

Counted are the bytes that each collective call is given on four processes, and beside them stand those of the closed
formulas in tests/communication.py. A page alone is written from what results/communication.json holds already.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from tests.communication import count, expected, sent_bytes
from tests.distributed import run_ranks
from tests.parity.harness import SEQUENCE, Cell

from shardwise.metrics.hardware import environment

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results" / "communication.json"
PAGE = ROOT / "docs" / "concepts" / "communication.md"
NUM_RANKS, ROWS, MICRO_ROWS = 4, 8, 2
LAYOUTS = {
    "ddp": "2 r Φt",
    "zero1": "r Φt + r Φt",
    "zero2": "m r Φt + r Φt",
    "fsdp2": "m (2 r Φ - r Φlast + r Φt)",
    "hsdp": "the same within shards, and 2 r Φt / shards",
    "tp": "m r (4 blocks + 4) BTD",
    "tp-sp": "m r (4 blocks + 5) BTD",
    "pp": "2 m BTD",
}
"""What leaves a rank, as the page says it."""
PAPER = {"ddp": 2, "zero1": 2, "zero2": 2, "fsdp2": 3}
"""Multiples of the model's size per step, of one micro-batch: Rajbhandari et al., arXiv 1910.02054, section 7."""
HEAD = """\
# What each strategy sends

Counted, not guessed: a mode that sees every collective a training step calls adds up the bytes that each call is given
([`tests/communication.py`](../../tests/communication.py)), and `tests/parallel/test_communication.py` compares them
with closed formulas, equal to the byte: LoRA and full training, each strategy alone and some together. The bytes that
leave a rank follow from what goes round a ring of n ranks: with r = (n-1)/n, 2r of what is all-reduced, r of what is
gathered or reduce-scattered (whole), all of what is sent.

Φ: bytes of all weights, Φt: of the trained ones, Φlast: of the last unit (norm and head), each in float32; m:
micro-batches that a rank computes in a step; BTD: bytes of a micro-batch's hidden states; blocks: mixers and
feed-forwards, two a layer.

"""
FOOT = """
What this says:

- **ZeRO** up to stage 2 sends what ddp sends; stage 3 sends half as much again, for weights that no rank keeps (a bit
  less here, as the last unit's backward follows its forward at once). That holds for one micro-batch a step: zero2 and
  fsdp2 reduce in each one.
- **LoRA** takes nearly everything from ddp and zero, whose messages are gradients; it takes only those from fsdp2,
  whose messages are mostly frozen weights: with adapters, ddp sends a small part of what fsdp2 does. And in fsdp2
  torch gathers even the frozen embedding ahead for a backward that never comes, which is counted here.
- **Tensor parallelism** sends activations, so its bytes grow with tokens and not with weights, and LoRA changes them
  little: the first block's input wants no gradient, and the factors that are whole on every rank are added up once a
  step. Sequence parallelism moves as many bytes in other messages, and one BTD more to give the embedding its
  gradient.
- **A pipeline** sends least, one BTD each way per cut and micro-batch; a rank between two others sends both.
- Besides, a few numbers a step: the count of targets, the loss, the squares of the norm; under tensor parallelism
  three numbers per target token, in place of its V logits.

Bytes are not time: tensor parallelism waits for each message, while ddp's and fsdp2's overlap with computation.
Counted on gloo; what NCCL makes of the calls is *unverified*. Written by `tools/communication.py`; the data, with
versions and commit: [`results/communication.json`](../../results/communication.json).
"""


def page(result: dict[str, Any]) -> str:
    """The whole page."""
    rows = {(row["layout"], row["mode"]): row for row in result["rows"]}
    full, lora = result["all_bytes"], result["adapter_bytes"]
    lines = [
        f"Bytes that leave a rank in a step (of its ranks, the one that sends most): {result['model']}, "
        f"{result['num_ranks']} processes, {result['global_batch_size']} rows of {result['sequence_length']} tokens, "
        f"{result['micro_batch_size']} a micro-batch. Φ = {full:,}; with LoRA {full + lora:,}, Φt = {lora:,}.",
        "",
        "| layout | derived | full: derived | counted | LoRA: derived | counted |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for layout, formula in LAYOUTS.items():
        numbers = [rows[layout, mode][key] for mode in ("full", "lora") for key in ("derived_bytes", "counted_bytes")]
        lines.append(f"| {layout} | {formula} | " + " | ".join(f"{number:,}" for number in numbers) + " |")
    lines += ["", "ZeRO's own table, one micro-batch a step, in units of r Φ:", ""]
    lines += ["| | " + " | ".join(PAPER) + " |", "|---|" + "---:|" * len(PAPER)]
    lines.append("| Rajbhandari et al., section 7 | " + " | ".join(f"{times}" for times in PAPER.values()) + " |")
    unit = full * (result["num_ranks"] - 1) / result["num_ranks"]
    counted = [rows[layout, "full"]["counted_bytes"] / unit for layout in PAPER]
    lines.append("| counted, full training | " + " | ".join(f"{times:.2f}" for times in counted) + " |")
    return HEAD + "\n".join(lines) + "\n" + FOOT


def measure() -> dict[str, Any]:
    """Run every layout once in each mode."""
    rows: list[dict[str, Any]] = []
    sizes = {}
    for layout in LAYOUTS:
        for mode in ("full", "lora"):
            schedule = "1f1b" if layout == "pp" else ""
            cell = Cell("llama", layout, mode, NUM_RANKS, schedule=schedule, rows=ROWS, micro_rows=MICRO_ROWS)
            ranks = run_ranks(NUM_RANKS, count, cell)
            most = max(ranks, key=lambda rank: sent_bytes(rank.bytes, rank.facts.sizes))
            facts = most.facts
            rows.append(
                {
                    "layout": layout,
                    "mode": mode,
                    "micro_batches": facts.num_microbatches,
                    "derived_bytes": sent_bytes(expected(facts), facts.sizes),
                    "counted_bytes": sent_bytes(most.bytes, facts.sizes),
                    "whole_bytes": {" ".join(key): size for key, size in sorted(most.bytes.items())},
                    "calls": {" ".join(key): number for key, number in sorted(most.calls.items())},
                }
            )
            if layout == "ddp":
                sizes[mode] = facts.bytes_of(facts.trained)
            print(rows[-1])
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page-only", action="store_true")
    if not parser.parse_args().page_only:
        RESULTS.write_text(json.dumps(measure(), indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(page(json.loads(RESULTS.read_text(encoding="utf-8"))), encoding="utf-8")
