"""The chunked loss against the plain one, forward and backward of the head: peak memory and time.

    python tools/bench_loss.py [--repeats 3] [--threads 1] [--tokens 4096] [--out results/loss.json]

Plain and chunked runs take turns. Memory is the most bytes of tensors alive, less what was there
before (hidden states, weight, labels) and less the head's gradient where it is trained. It is taken
in the timed runs: PeakMemory costs 15 microseconds for each of a few hundred allocations.
"""

from __future__ import annotations

import gc
from functools import partial
from pathlib import Path
from typing import Any

import torch

from shardwise.benchmark.paired import Results, command_line, ratios, spread, take_turns, timed
from shardwise.interfaces import IGNORED
from shardwise.kernels.linear_cross_entropy import chunked, naive
from shardwise.metrics.hardware import environment
from shardwise.metrics.memory import PeakMemory

WIDTH, VOCABULARY = 1024, 248_320
LOSSES = {"plain": naive.linear_cross_entropy, "chunked": chunked.linear_cross_entropy}


def main() -> None:
    parser = command_line(__doc__, Path(__file__).parents[1] / "results" / "loss.json")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=4096)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(options.tokens, WIDTH, generator=generator).requires_grad_()
    weight = torch.randn(VOCABULARY, WIDTH, generator=generator).mul_(0.02)
    all_labels = torch.randint(0, VOCABULARY, (options.tokens,), generator=generator)
    half = all_labels.clone()
    half[torch.randperm(options.tokens, generator=generator)[: options.tokens // 2]] = IGNORED
    results = Results(
        options.out,
        {
            "environment": environment(),
            "sizes": {"tokens": options.tokens, "width": WIDTH, "vocabulary": VOCABULARY},
            "dtype": "float32",
            "chunk_bytes": chunked.CHUNK_BYTES,
        },
    )
    for head in ("frozen", "trained"):
        for targets, labels in (("all", all_labels), ("half", half)):
            weight.requires_grad_(head == "trained")
            inputs = hidden, weight, labels
            case = f"{head} head, {targets} targets"
            results.add(case, partial(compare, *inputs, options.repeats))
    results.write()


def compare(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, repeats: int
) -> dict[str, Any]:
    """Return seconds and peak bytes of both losses, and the ratios plain over chunked."""
    sides = {name: partial(measure, name, hidden, weight, labels) for name in LOSSES}
    taken = take_turns(sides, repeats)
    losses = [loss for name in LOSSES for loss in taken["loss"][name]]
    # No figures on a wrong result.
    assert max(losses) - min(losses) <= 1e-5 * max(losses), "the losses differ"
    peak_bytes = {name: max(taken["peak_bytes"][name]) for name in LOSSES}
    return {
        "seconds": {name: spread(taken["wall"][name]) for name in LOSSES},
        "peak_bytes": peak_bytes,
        "times_faster": ratios(*(taken["wall"][name] for name in LOSSES)),
        "times_less_memory": round(peak_bytes["plain"] / peak_bytes["chunked"], 1),
    }


def measure(
    name: str, hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, round_number: int
) -> dict[str, float]:
    """Return the loss, seconds of forward and backward, and peak bytes of one run."""
    hidden.grad = weight.grad = None
    gc.collect()

    def forward_backward() -> float:
        loss = LOSSES[name](hidden, weight, labels, ignore_index=IGNORED)
        loss.backward()
        return loss.item()

    with PeakMemory(torch.device("cpu")) as memory:
        loss, seconds = timed(forward_backward)
    head_gradient_bytes = weight.nbytes if weight.requires_grad else 0
    peak_bytes = memory.added_bytes() - head_gradient_bytes
    return {"loss": loss, "peak_bytes": peak_bytes, **seconds}


if __name__ == "__main__":
    main()
