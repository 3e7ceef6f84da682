"""Ranges of the numbers in a run file, and the text of a value in an error."""

from __future__ import annotations

import reprlib

RANGES = {
    "model.router_bias_rate": (0, 1),
    "model.router_aux_loss_coef": (0, 1_000_000),
    "model.expert_capacity": (0.001, 1_000_000),
    "lora.r": (1, 65_536),
    "lora.alpha": (-1_000_000, 1_000_000),
    "data.sequence_length": (1, 16_777_216),
    "data.max_documents": (1, 1_000_000_000_000),
    "data.workers": (0, 1_024),
    "parallel.dp_replicate": (1, 1_000_000),
    "parallel.tp": (1, 1_000_000),
    "parallel.cp": (1, 1_000_000),
    "parallel.ep": (1, 1_000_000),
    "parallel.pp": (1, 1_000_000),
    "parallel.virtual_stages": (1, 10_000),
    "optimizer.lr": (0, 1_000_000),
    "optimizer.lora_b_lr_ratio": (0.001, 1_000_000),
    "optimizer.eps": (0, 1_000_000),
    "optimizer.weight_decay": (0, 1_000_000),
    "optimizer.warmup_steps": (0, 1_000_000_000),
    "optimizer.warmup_ratio": (0, 1),
    "optimizer.decay_ratio": (0, 1),
    "optimizer.min_lr_ratio": (0, 1),
    "launch.nodes": (1, 1_000_000),
    "launch.min_nodes": (1, 1_000_000),
    "launch.processes": (1, 1_024),
    "launch.ahead_seconds": (1, 65_535),
    "launch.restarts": (0, 1_000_000),
    "launch.timeout_seconds": (0.001, 1_000_000),
    "training.steps": (1, 1_000_000_000),
    "training.epochs": (0.000_001, 1_000_000),
    "training.global_batch_size": (1, 1_000_000),
    "training.micro_batch_size": (1, 1_000_000),
    "training.seed": (-9_223_372_036_854_775_808, 9_223_372_036_854_775_807),
    "training.eval_every": (0, 1_000_000_000),
    "training.eval_batches": (0, 1_000_000_000),
    "training.patience": (0, 1_000_000_000),
    "training.save_every": (0, 1_000_000_000),
    "training.keep_last": (1, 1_000_000_000),
    "training.memory_checkpoint_every": (0, 1_000_000_000),
    "training.check_copies_every": (0, 1_000_000_000),
    "measure.warmup_steps": (0, 1_000_000_000),
    "measure.print_seconds": (0, 1_000_000_000),
}
"""The smallest and the largest value of each key that is a number.

No real run reaches the largest ones. A larger number is a typing error, and could cost memory or
time without end before it is noticed.
"""

MOST_TOKENS = 1_000_000_000
"""The largest number of tokens in an optimizer step."""

_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = _REPR.maxlong = 100


def shown(value: object) -> str:
    """Return the text of a value in an error: its repr, cut where it is long or nested."""
    try:
        return _REPR.repr(value)
    except ValueError:  # Python writes no numbers of more than some thousand digits
        return "a number of thousands of digits"


def missed_bound(value: float | None, least: float, most: float) -> str:
    """Return the bound that a value misses, such as "at most 8"; "" where it misses none.

    A value that is left out (None) misses none.
    """
    if value is None or least <= value <= most:
        return ""
    if value > most:
        return f"at most {most:,}"
    return f"at least {least:,}" if value < least else "a number"  # NaN is on neither side
