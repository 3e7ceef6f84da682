"""Count what a training step sends under each layout, and write docs/concepts/communication.md from it.

    PYTHONPATH=. python tools/communication.py [--page-only]

Counted are the collectives and the bytes that each is given, and beside them stand those of the closed formulas in
tests/communication_formulas.py. A page alone is written from what results/communication.json holds already.
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
PAGE = ROOT / "docs" / "concepts" / "communication.md"
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
# What each strategy sends

Counted, not guessed: a mode that sees every collective of a training step adds up calls and bytes
([`tests/communication.py`](../../tests/communication.py)), and `tests/parallel/test_communication.py` compares both,
for each kind of collective and each axis of the mesh, with [closed formulas](../../tests/communication_formulas.py):
under every layout that is offered, equal to the byte and to the call. A composition sends the sum of what its parts
send, so there are seven formulas for all layouts; they know the model's shapes and the mesh, and nothing of the run.
The bytes that leave a rank follow from what goes round a ring of n ranks: with r = (n-1)/n, 2r of what is all-reduced,
r of what is gathered or reduce-scattered (whole), all of what is sent.

Φ: bytes of all weights, Φt: of the trained ones, Φlast: of the last unit (norm and head), each in float32; m:
micro-batches that a rank computes in a step; BTD: bytes of a micro-batch's hidden states; blocks: mixers and
feed-forwards, two a layer; u: units that are gathered together (embedding, layers, norm with head). Gradients of more
than a bucket (25 MiB in ddp, whose first one is 1 MiB, and in zero) take a call for each.

"""
FOOT = """
What this says:

- **ZeRO** up to stage 2 sends what ddp sends; stage 3 sends half as much again, for weights that no rank keeps (a bit
  less here, as the last unit's backward follows its forward at once). That holds for one micro-batch a step: zero2 and
  fsdp2 reduce in each one.
- **LoRA** takes nearly everything from ddp and zero, whose messages are gradients; it takes only those from fsdp2,
  whose messages are mostly frozen weights: with adapters, ddp sends a small part of what fsdp2 does. And fsdp2
  gathers even the frozen embedding ahead for a backward that never comes, which is counted here; fsdp1 does not. But
  fsdp1 keeps a layer's adapters in a flat parameter of their own, and needs more messages for the same bytes.
- **Tensor parallelism** sends activations, so its bytes grow with tokens and not with weights, and LoRA changes them
  little: the first block's input wants no gradient, and the factors that are whole on every rank are added up once a
  step. Sequence parallelism moves as many bytes in other messages, twice as many, and one BTD more to give the
  embedding its gradient. Two messages of the head are the loss: three numbers per target token, in place of V logits.
- **A recurrent layer's block** is cut by heads or channels and sends what attention's does, with these exceptions,
  forwards and backwards: each Mamba layer of Jamba adds up what all channels give together (time step, B and C: R + 2N
  numbers a token, one message), and each attention layer of Olmo-Hybrid the squares that its two norms over cut
  features need (one number a token and norm), as Mamba2's gated norm does where it has fewer groups than there are
  ranks (a number a token and group). Where ranks share heads of keys and values, or groups of B and C, the gradients
  of these rows are added up once a step, one message each. All of it is in the formulas.
- **A pipeline** sends least, one BTD each way per cut and micro-batch; a rank between two others sends both. Under it
  fsdp2 reduces gradients once a step, and leaves weights gathered between a backward and what follows: m + 1 gathers
  of a unit in place of 2 m.
- Besides, a few numbers a step (the `+ 2` to `+ 5` of the calls): the targets, the loss, the squares of the norm, and
  with `sp` the gradients of what is whole on every rank.

Bytes are not time: tensor parallelism waits for each message, while ddp's and fsdp2's overlap with computation.
Counted on gloo; what NCCL makes of the calls is *unverified*. Written by `tools/communication.py`; the data, with
versions and commit: [`results/communication.json`](../../results/communication.json).
"""


def page(result: dict[str, Any]) -> str:
    """The whole page."""
    rows = {(row["layout"], row["mode"]): row for row in result["rows"]}
    full, lora = result["all_bytes"], result["adapter_bytes"]
    lines = [
        f"Leaving a rank in a step (of its ranks, the one that sends most): {result['model']}, "
        f"{result['num_ranks']} processes, {result['global_batch_size']} rows of {result['sequence_length']} tokens, "
        f"{result['micro_batch_size']} a micro-batch. Φ = {full:,}; with LoRA {full + lora:,}, Φt = {lora:,}.",
        "",
        "| layout | bytes | calls, full | full: derived | counted | calls | LoRA: derived | counted | calls |",
        "|---|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for layout, formulas in ALONE.items():
        both = [rows[layout, mode] for mode in ("full", "lora")]
        cells = [f"{row['derived_bytes']:,} | {row['counted_bytes']:,} | {sum(row['calls'].values())}" for row in both]
        lines.append(f"| {' | '.join((layout, *formulas, *cells))} |")
    lines += [
        "",
        "Compositions, 1 row a micro-batch; each number is counted, and equals the sum of the parts' formulas. Calls: "
        "all-reduces + reduce-scatters + all-gathers + sends. Of 8 processes pp-hsdp-tp makes 2 replicas of one shard.",
        "",
        "| layout | processes | full: bytes | calls | LoRA: bytes | calls |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for layout in TOGETHER:
        both = [rows[layout, mode] for mode in ("full", "lora")]
        cells = [f"{row['counted_bytes']:,} | {' + '.join(map(str, _by_kind(row)))}" for row in both]
        lines.append(f"| {layout} | {both[0]['processes']} | {' | '.join(cells)} |")
    lines += ["", "ZeRO's own table, one micro-batch a step, in units of r Φ:", ""]
    lines += ["| | " + " | ".join(PAPER) + " |", "|---|" + "---:|" * len(PAPER)]
    lines.append("| Rajbhandari et al., section 7 | " + " | ".join(f"{times}" for times in PAPER.values()) + " |")
    unit = full * (result["num_ranks"] - 1) / result["num_ranks"]
    counted = [rows[layout, "full"]["counted_bytes"] / unit for layout in PAPER]
    lines.append("| counted, full training | " + " | ".join(f"{times:.2f}" for times in counted) + " |")
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
            cell = Cell("llama", layout, mode, nproc, schedule=schedule, rows=ROWS, micro_rows=micro_rows)
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
                    "whole_bytes": {" ".join(key): size for key, (_, size) in sorted(most.sent.items())},
                    "derived_calls": {" ".join(key): number for key, (number, _) in sorted(derived.items())},
                    "calls": {" ".join(key): number for key, (number, _) in sorted(most.sent.items())},
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page-only", action="store_true")
    if not parser.parse_args().page_only:
        RESULTS.write_text(json.dumps(measure(), indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(page(json.loads(RESULTS.read_text(encoding="utf-8"))), encoding="utf-8")
