"""Sides of a comparison that are processes of their own, and the time that they may take."""

from __future__ import annotations

import contextlib
import json
import queue
import subprocess
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shardwise.lab.benchmark.process import run_command


class Deadline:
    """The moment at which everything must have ended."""

    def __init__(self, seconds: float) -> None:
        self.end = time.monotonic() + seconds

    def left(self, limit: float = float("inf")) -> float:
        """Return the seconds left for something that may take `limit` seconds."""
        return max(0.0, min(limit, self.end - time.monotonic()))


class WorkerError(RuntimeError):
    """A worker that died (`status` is failed) or did not answer in time (timeout)."""

    def __init__(self, status: str, reason: str) -> None:
        super().__init__(f"{status}: {reason}")
        self.status, self.reason = status, reason


class Worker:
    """A process that answers each line of JSON with a line of JSON; its stderr goes to `log`."""

    def __init__(self, command: Sequence[str], log: Path) -> None:
        self.log = log
        with log.open("w") as stderr:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, text=True
            )
        self.lines: queue.Queue[str] = queue.Queue()
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def ask(self, request: dict[str, Any], timeout: float) -> dict[str, Any]:
        """Return the answer. Raise WorkerError if there is none within `timeout` seconds."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
            line = self.lines.get(timeout=timeout)
        except queue.Empty:
            reason = f"no answer in {timeout:.0f} s to {json.dumps(request)}"
            raise WorkerError("timeout", reason) from None
        except OSError:
            line = ""
        if not line:
            self.lines.put("")  # for the next request
            raise WorkerError("failed", last_lines(self.log))
        return json.loads(line)

    def end(self) -> None:
        """Kill the process, whatever it is doing."""
        self.process.kill()
        self.process.wait()
        self.reader.join()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):  # of a request that was never read
                    pipe.close()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.put(line)
        self.lines.put("")


def run_limited(command: Sequence[str], log: Path, limit: float) -> dict[str, str]:
    """Run a command with its output in `log`; return its `status` (ok, failed, timeout), `reason`.

    After `limit` seconds it is killed.
    """
    code = run_command(command, log, limit)
    if code is None:
        return {"status": "timeout", "reason": f"stopped after {limit:.0f} s"}
    if code != 0:
        return {"status": "failed", "reason": f"exit code {code}: {last_lines(log)}"}
    return {"status": "ok", "reason": ""}


def last_lines(log: Path, number: int = 5) -> str:
    """Return the last lines of a log in one line."""
    return " | ".join(log.read_text(errors="replace").strip().splitlines()[-number:])
