"""The sides that are compared, which of ours does what a peer does, and what all have in common."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
MODEL = str(ROOT / "configs" / "models" / "demo-hybrid")
MICROBATCHES, ROWS, TOKENS = 4, 2, 128
WARM_UP, TIMED = 2, 5
"""Steps of a round; one more, which is not timed, takes the memory."""
LEARNING_RATE, MAX_NORM, RANK = 1e-3, 1.0, 8
MODES = ("lora", "full")


@dataclass(frozen=True)
class Side:
    """One way to train the same work."""

    title: str
    module: str
    option: str
    ranks: int = 2
    beside: str | None = None
    """The side of ours that lays a model out in the same way; None: it is ours."""
    checked_as: str | None = None
    """The option in the checks, where it is another one."""


def _ours(strategy: str, ranks: int = 2) -> Side:
    return Side(f"shardwise `{strategy}`", "ours", strategy, ranks, None, f"{strategy}+isolated")


SIDES = {
    "single": _ours("single", ranks=1),
    "trainer": Side("Trainer + PEFT", "trainer", "single", 1, "single"),
    "ddp": _ours("ddp"),
    "trainer_ddp": Side("Trainer + PEFT, DDP", "trainer", "ddp", 2, "ddp"),
    "zero1": _ours("zero1"),
    "deepspeed_1": Side("DeepSpeed ZeRO-1", "deepspeed_zero", "1", 2, "zero1"),
    "zero2": _ours("zero2"),
    "deepspeed_2": Side("DeepSpeed ZeRO-2", "deepspeed_zero", "2", 2, "zero2"),
    "fsdp2": _ours("fsdp2"),
    "torch_fsdp2": Side("PyTorch `fully_shard`", "torch_fsdp2", "", 2, "fsdp2"),
    "trainer_fsdp2": Side("Trainer + PEFT, `fsdp`", "trainer", "fsdp2", 2, "fsdp2"),
    "accelerate": Side("Accelerate, FSDP2 asked for", "accelerate_fsdp2", "asked", 2, "fsdp2"),
    "accelerate_made": Side("Accelerate, FSDP2 by force", "accelerate_fsdp2", "made", 2, "fsdp2"),
    "deepspeed_3": Side("DeepSpeed ZeRO-3", "deepspeed_zero", "3", 2, "fsdp2"),
    "torchtitan": Side("torchtitan", "torchtitan_fsdp", "", 1, "fsdp2"),
}


def definition() -> dict[str, Any]:
    """Return the sides, and what is equal for all of them, as plain data."""
    work = {
        "model": json.loads(Path(MODEL, "config.json").read_text(encoding="utf-8")),
        "lora": {"r": RANK, "alpha": 2 * RANK, "targets": "all-linear"},
        "optimizer": {"adamw": LEARNING_RATE, "max_grad_norm": MAX_NORM, "weight_decay": 0.0},
        "precision": "float32",
        "global_batch": {"micro_batches": MICROBATCHES, "rows": ROWS, "tokens": TOKENS},
        "steps": {"warm_up": WARM_UP, "timed": TIMED},
    }
    return {"work": work, "sides": {name: asdict(side) for name, side in SIDES.items()}}
