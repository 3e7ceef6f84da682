"""Runs whose undisturbed outcome on this machine is known, and waiting for what they do."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import chdir
from pathlib import Path

from shardwise.commands import cli


def prepare(folder: Path, *overrides: str) -> Path:
    """Write a run file of a small hybrid model into a folder; return the folder.

    With overrides, train it so on two processes of this machine, into `runs/local`.
    """
    with chdir(folder):
        assert cli.main(["init"]) == 0
        if overrides:
            local = [*overrides, "--training.output_dir=runs/local", "--nproc=2"]
            assert cli.main(["train", "run.yaml", *local]) == 0
    return folder


def losses(folder: Path, name: str) -> list[float]:
    """Return the losses of the run in `runs/NAME`; none if it has not begun."""
    path = folder / "runs" / name / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [row["loss"] for row in map(json.loads, lines) if "loss" in row]


def wait_for_step(folder: Path, name: str, step: int) -> None:
    metrics = folder / "runs" / name / "metrics.jsonl"
    wait_for(
        lambda: metrics.exists() and len(metrics.read_text().splitlines()) > step, f"step {step}"
    )


def wait_for(condition: Callable[[], object], what: str, seconds: float = 180) -> None:
    """Wait until a condition holds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"waited {seconds:.0f} s for {what}"
        time.sleep(0.2)
