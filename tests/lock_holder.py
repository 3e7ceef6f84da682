"""A process that holds the lock of an output folder: a module of its own, since a spawned process
imports it."""

from __future__ import annotations

import time
from pathlib import Path

from shardwise.checkpoint.output_lock import Lock, locked

SECONDS = 600
"""Longer than any test."""


def hold(folder: Path, ready: Path, lock: Lock | None) -> None:
    """Be a rank: of a launcher that holds `lock`, or, without one, a run of one process."""
    if lock is None:
        with locked(folder, None, {}):
            ready.touch()
            time.sleep(SECONDS)
    ready.touch()
    time.sleep(SECONDS)
