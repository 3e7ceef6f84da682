"""Sweep files for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

BASE: dict[str, Any] = {
    "model": {"path": "model", "init": "random"},
    "lora": {"r": 4},
    "data": {"train": "corpus.jsonl", "sequence_length": 32},
    "training": {"steps": 4, "global_batch_size": 8, "micro_batch_size": 2},
}
STRATEGIES: dict[str, Any] = {
    "single": {"nproc": 1, "parallel.data": "single"},
    "ddp": {"nproc": 2, "parallel.data": "ddp"},
}


def sweep_file(folder: Path, **content: Any) -> Path:
    """Write a sweep over STRATEGIES, with `content` in place of these keys."""
    path = folder / "sweep.yaml"
    path.write_text(
        yaml.safe_dump({"base": BASE, "axes": {"strategy": STRATEGIES}, **content}, sort_keys=False)
    )
    return path


def ends(*names: str) -> dict[str, Any]:
    """Return an axis whose cells end in different ways; see fake_train.py."""
    return {"end": {name: {"training.sample": name} for name in names}}
