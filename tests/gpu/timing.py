"""Asks the two sides for rounds in turns and keeps what they say. Imports no torch: it only waits
and counts.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.gpu.workload import Workload

SIDES = ("shardwise", "transformers")
CHECKPOINTING = ("none", "full")
LOSS_TOLERANCE = 2**-8
"""Relative, of the first step's loss and gradient norm between the sides: one bfloat16 rounding of
the whole. Both round the same products of the same numbers; what differs (see sides.DIFFERENCES) is
in float32.
"""


class Deadline:
    """The time that is left until everything must have ended."""

    def __init__(self, seconds: float) -> None:
        self.end = time.monotonic() + seconds

    def left(self, limit: float = float("inf")) -> float:
        """Seconds for something that may take `limit`."""
        return max(0.0, min(limit, self.end - time.monotonic()))


class WorkerError(RuntimeError):
    """A worker died or did not answer in time."""


class Worker:
    """A process that answers each line of JSON with a line of JSON; what else it prints goes to
    `log`.
    """

    def __init__(self, command: Sequence[str], env: dict[str, str], log: Path) -> None:
        self.log = log
        with log.open("w") as stderr:
            self.process = subprocess.Popen(
                command,
                env=env,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
            )
        self.lines: queue.Queue[str] = queue.Queue()
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def ask(self, request: dict[str, Any], timeout: float) -> dict[str, Any]:
        """The answer. Raises WorkerError where there is none within `timeout` seconds."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
            line = self.lines.get(timeout=timeout)
        except queue.Empty:
            raise WorkerError(
                f"timeout: no answer in {timeout:.0f} s to {json.dumps(request)}"
            ) from None
        except OSError:
            line = ""
        if not line:
            self.lines.put("")  # for whoever asks next
            raise WorkerError(f"failed: {last_words(self.log)}")
        return json.loads(line)

    def end(self) -> None:
        """End the process, whatever it is doing."""
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


def last_words(log: Path, lines: int = 5) -> str:
    """The end of a log, on one line."""
    return " | ".join(log.read_text(errors="replace").strip().splitlines()[-lines:])


def start_side(
    side: str, gdn: str, folder: Path, device: str, env: dict[str, str], workload: str = "qwen3_5"
) -> Worker:
    """One side of the timing, see worker.py."""
    command = [sys.executable, "-m", "tests.gpu.worker", side, gdn, str(folder), device, workload]
    return Worker(command, env, folder.parent / f"{side}-{gdn}.log")


def time_pair(
    gdn: str,
    workload: Workload,
    start: Callable[[str, str], Worker],
    deadline: Deadline,
    limit: float,
    save: Callable[[list[dict[str, Any]]], None],
    sides: Sequence[str] = SIDES,
    modes: Sequence[str] = CHECKPOINTING,
) -> None:
    """Time the sides with one choice of kernels; `save(rows)` is called whenever there is something
    new.

    A side that fails keeps its reason in its row, and the others go on without it.
    """
    rows = [
        {
            "side": side,
            "gdn": gdn,
            "checkpointing": checkpointing,
            "status": "failed",
            "reason": "not reached",
        }
        for checkpointing in modes
        for side in sides
    ]
    stage = Deadline(deadline.left(limit))
    workers = {side: start(side, gdn) for side in sides}
    try:
        for checkpointing in modes:
            pair = [row for row in rows if row["checkpointing"] == checkpointing]
            _time_mode(pair, workload, workers, stage, lambda: save(rows))
    finally:
        for worker in workers.values():
            worker.end()
        save(rows)


def _time_mode(
    pair: list[dict[str, Any]],
    workload: Workload,
    workers: dict[str, Worker],
    stage: Deadline,
    save: Callable[[], None],
) -> None:
    running = list(pair)

    def ask(row: dict[str, Any], request: dict[str, Any]) -> dict[str, Any]:
        worker = workers[row["side"]]
        try:
            return worker.ask(request, stage.left())
        except WorkerError as error:
            row["status"], _, row["reason"] = str(error).partition(": ")
            running.remove(row)
            print(f"{row['side']}: {worker.log.read_text(errors='replace')[-3000:]}", flush=True)
            return {}

    def steps(row: dict[str, Any], number: int, lead_in: int = 1, **what: bool) -> dict[str, Any]:
        wanted = {"figures": False, "memory": False, **what}
        return ask(row, {"do": "steps", "steps": number, "lead_in": lead_in, **wanted})

    for row in list(running):
        row["facts"] = ask(row, {"do": "build", "checkpointing": row["checkpointing"]})
    for row in list(running):
        row["warmup"] = steps(row, workload.warmup_steps, lead_in=0, figures=True)
    # As many steps a round on all sides as the slowest one takes `round_seconds` for.
    seconds = [steps(row, 1).get("seconds", 0.0) for row in list(running)]
    number = max(1, min(20, round(workload.round_seconds / max([*seconds, 1e-3]))))
    for row in running:
        row.update(status="timeout", reason="not all rounds", steps_per_round=number, rounds=[])
    save()
    for i in range(workload.rounds):
        for row in list(running) if i % 2 == 0 else list(reversed(running)):
            reply = steps(row, number)
            row["rounds"] += [reply["seconds"] / number] if reply else []
        save()
    for row in list(running):
        row["memory"] = steps(row, 1, memory=True)
    for row in running:
        row["status"], row["reason"] = "ok", ""
    save()


def with_figures(row: dict[str, Any], workload: Workload, facts: dict[str, Any]) -> dict[str, Any]:
    """A row with what follows from its rounds: seconds a step, tokens a second, MFU by both peaks.
    """
    if not row.get("rounds"):
        return row
    median = statistics.median(row["rounds"])
    tokens_per_second = workload.batch * workload.sequence_length / median
    flops = facts["flops"]["model_per_token"]
    return {
        **row,
        "step_seconds": {"median": median, "min": min(row["rounds"]), "max": max(row["rounds"])},
        "tokens_per_second": tokens_per_second,
        "mfu": {
            name: flops * tokens_per_second / peak["flops_per_second"]
            for name, peak in facts["peaks"].items()
        },
    }


def comparisons(
    rows: Sequence[dict[str, Any]], gate: str, sides: tuple[str, str] = SIDES
) -> list[dict[str, Any]]:
    """The two sides of each variant against each other: what was equal, and ratios if the gate is
    green and all was.

    `gate` is that of the tests with the same kernels. A ratio above 1 says that shardwise takes
    less. `time` is over the rounds, each side's against the other's next to it.
    """
    found = []
    for gdn, checkpointing in dict.fromkeys((row["gdn"], row["checkpointing"]) for row in rows):
        ours, theirs = (
            next(
                r
                for r in rows
                if (r["side"], r["gdn"], r["checkpointing"]) == (side, gdn, checkpointing)
            )
            for side in sides
        )
        entry: dict[str, Any] = {"gdn": gdn, "checkpointing": checkpointing, "gate": gate}
        found.append(entry)
        if ours["status"] != "ok" or theirs["status"] != "ok":
            continue
        entry["equal"] = equal_work(ours, theirs)
        if gate == "green" and all(entry["equal"].values()):
            ratios = [their / our for our, their in zip(ours["rounds"], theirs["rounds"])]
            entry["time"] = {
                "median": statistics.median(ratios),
                "min": min(ratios),
                "max": max(ratios),
            }
            entry["peak_memory"] = theirs["memory"]["peak_bytes"] / ours["memory"]["peak_bytes"]
    return found


def equal_work(ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, bool]:
    """Whether the two sides did the same: parameters by dtype, adapters, optimizer, kernels, first
    loss and norm.
    """
    same = {key: ours["facts"][key] == theirs["facts"][key] for key in ours["facts"]}
    for key in ("losses", "grad_norms"):
        one, other = ours["warmup"][key][0], theirs["warmup"][key][0]
        same[f"first of {key}"] = abs(one - other) <= LOSS_TOLERANCE * abs(other)
    return same


def run_limited(
    command: Sequence[str], env: dict[str, str], log: Path, limit: float
) -> tuple[str, str]:
    """Run a command to its end, its output in `log`: ("ok", "") or a status and a reason."""
    with log.open("w") as out:
        process = subprocess.Popen(
            command, env=env, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            return "timeout", f"stopped after {limit:.0f} s"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    return ("ok", "") if code == 0 else ("failed", f"exit code {code}: {last_words(log)}")
