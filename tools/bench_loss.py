"""The chunked loss against the plain one, forward and backward of the head: peak memory and time.

    python tools/bench_loss.py [--repeats 3] [--threads 1] [--tokens 4096] [--out results/loss.json]

Plain and chunked runs take turns, so that what else the machine does falls on both. Memory: the most bytes of tensors
alive, less what was there before (hidden states, weight, labels) and less the head's gradient where it is trained. It
is taken in the timed runs: PeakMemory costs 15 microseconds for each of a few hundred allocations.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

from shardwise.interfaces import IGNORED
from shardwise.kernels.linear_cross_entropy import chunked, naive
from shardwise.metrics.hardware import environment
from shardwise.metrics.memory import PeakMemory

WIDTH, VOCABULARY = 1024, 248_320
LOSSES = {"plain": naive.linear_cross_entropy, "chunked": chunked.linear_cross_entropy}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parents[1] / "results" / "loss.json"
    )
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(options.tokens, WIDTH, generator=generator).requires_grad_()
    weight = torch.randn(VOCABULARY, WIDTH, generator=generator).mul_(0.02)
    labels = torch.randint(0, VOCABULARY, (options.tokens,), generator=generator)
    half = labels.clone()
    half[torch.randperm(options.tokens, generator=generator)[: options.tokens // 2]] = IGNORED
    rows = []
    for head in ("frozen", "trained"):
        for name, targets in (("all", labels), ("half", half)):
            weight.requires_grad_(head == "trained")
            row = compare(hidden, weight, targets, options.repeats)
            rows.append({"head": head, "targets": name, **row})
            print(json.dumps(rows[-1]), flush=True)
            result = {
                "environment": environment(),
                "tokens": options.tokens,
                "width": WIDTH,
                "vocabulary": VOCABULARY,
                "dtype": "float32",
                "chunk_bytes": chunked.CHUNK_BYTES,
                "rows": rows,
            }
            options.out.write_text(json.dumps(result, indent=1) + "\n")


def compare(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, repeats: int
) -> dict[str, Any]:
    """Both losses' peak bytes and seconds, and how many times less the chunked one takes (ratios of medians)."""
    runs: dict[str, list[tuple[float, float, int]]] = {name: [] for name in LOSSES}
    for _ in range(repeats):
        for name in LOSSES:
            runs[name].append(measure(name, hidden, weight, labels))
    values = [run[0] for name in LOSSES for run in runs[name]]
    assert max(values) - min(values) <= 1e-5 * max(values), (
        "the losses differ: no figures on a wrong result"
    )
    seconds = {name: [run[1] for run in runs[name]] for name in LOSSES}
    peak = {name: max(run[2] for run in runs[name]) for name in LOSSES}
    return {
        "seconds": {name: [round(s, 3) for s in seconds[name]] for name in LOSSES},
        "peak_bytes": peak,
        "times_faster": round(median(seconds["plain"]) / median(seconds["chunked"]), 2),
        "times_less_memory": round(peak["plain"] / peak["chunked"], 1),
    }


def measure(
    name: str, hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor
) -> tuple[float, float, int]:
    """The loss, seconds of forward and backward, and peak bytes above what was there and the head's gradient."""
    hidden.grad = weight.grad = None
    gc.collect()
    with PeakMemory(torch.device("cpu")) as memory:
        start = time.perf_counter()
        loss = LOSSES[name](hidden, weight, labels, ignore_index=IGNORED)
        loss.backward()
        seconds = time.perf_counter() - start
    assert memory.peak_bytes is not None
    assert memory.entry_bytes is not None
    return (
        loss.item(),
        seconds,
        memory.peak_bytes - memory.entry_bytes - weight.nbytes * weight.requires_grad,
    )


if __name__ == "__main__":
    main()
