"""Ask sides for rounds of LoRA steps by turns, and compare them. It imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tools.paired import ratios, spread, turns

from tests.gpu.processes import Deadline, Worker, WorkerError
from tests.gpu.workload import Workload

TRAINER = "transformers"
"""Hugging Face's Trainer with PEFT."""
SIDES = ("shardwise", TRAINER)
CHECKPOINTING = ("none", "full")
LOSS_TOLERANCE = 2**-8
"""Relative, of the first step's loss and gradient norm between the sides: one rounding to bfloat16.
Both round the same products of the same numbers; sides.DIFFERENCES are in float32."""
Row = dict[str, Any]


def time_sides(
    gdn: str,
    workload: Workload,
    start: Callable[[str, str], Worker],
    deadline: Deadline,
    save: Callable[[list[Row]], None],
    sides: Sequence[str] = SIDES,
    modes: Sequence[str] = CHECKPOINTING,
) -> None:
    """Time the sides with one choice of kernels; call `save(rows)` whenever a row has changed.

    A side that fails keeps its reason in its row, and the others are timed without it.
    """
    rows: list[Row] = []
    for mode in modes:
        for side in sides:
            row = {"side": side, "gdn": gdn, "checkpointing": mode}
            rows.append({**row, "status": "failed", "reason": "not reached"})
    workers = {side: start(side, gdn) for side in sides}
    try:
        for mode in modes:
            of_mode = [row for row in rows if row["checkpointing"] == mode]
            _Mode(of_mode, workers, deadline).time(workload, lambda: save(rows))
    finally:
        for worker in workers.values():
            worker.end()
        save(rows)


class _Mode:
    """The rows of all sides with or without checkpointing; `running` are those that can go on."""

    def __init__(self, rows: list[Row], workers: dict[str, Worker], deadline: Deadline) -> None:
        self.running, self.workers, self.deadline = list(rows), workers, deadline

    def time(self, workload: Workload, save: Callable[[], None]) -> None:
        for row in list(self.running):
            row["facts"] = self.ask(row, {"do": "build", "checkpointing": row["checkpointing"]})
        for row in list(self.running):
            row["warmup"] = self.steps(row, workload.warmup_steps, lead_in=0, figures=True)
        # As many steps per round on all sides as the slowest one takes `round_seconds` for.
        seconds = [self.steps(row, 1).get("seconds", 0.0) for row in list(self.running)]
        number = max(1, min(20, round(workload.round_seconds / max([*seconds, 1e-3]))))
        for row in self.running:
            row.update(status="timeout", reason="not all rounds", steps_per_round=number, rounds=[])
        save()
        for _, row in turns(list(self.running), workload.rounds):
            if row in self.running:
                reply = self.steps(row, number)
                if reply:
                    row["rounds"].append(reply["seconds"] / number)
                save()
        for row in list(self.running):
            row["memory"] = self.steps(row, 1, memory=True)
        for row in self.running:
            row.update(status="ok", reason="")
        save()

    def steps(self, row: Row, number: int, lead_in: int = 1, **wanted: bool) -> dict[str, Any]:
        """Let a side take steps, see rounds.Rounds.more; return its reply, {} if it has failed."""
        options = {"figures": False, "memory": False, **wanted}
        return self.ask(row, {"do": "steps", "steps": number, "lead_in": lead_in, **options})

    def ask(self, row: Row, request: dict[str, Any]) -> dict[str, Any]:
        worker = self.workers[row["side"]]
        try:
            return worker.ask(request, self.deadline.left())
        except WorkerError as error:
            row.update(status=error.status, reason=error.reason)
            self.running.remove(row)
            print(f"{row['side']}: {worker.log.read_text(errors='replace')[-3000:]}", flush=True)
            return {}


def with_figures(row: Row, workload: Workload, facts: dict[str, Any]) -> Row:
    """Return a row with seconds per step, tokens/s, and MFU by both peaks."""
    if not row.get("rounds"):
        return row
    seconds = spread(row["rounds"])
    tokens_per_second = workload.batch * workload.sequence_length / seconds["median"]
    flops_per_second = facts["flops"]["model_per_token"] * tokens_per_second
    mfu = {name: flops_per_second / p["flops_per_second"] for name, p in facts["peaks"].items()}
    return {**row, "step_seconds": seconds, "tokens_per_second": tokens_per_second, "mfu": mfu}


def comparisons(rows: Sequence[Row], gate: str, sides: tuple[str, str] = SIDES) -> list[Row]:
    """Compare two sides in each mode: what was equal, and ratios if all was and the gate is green.

    `gate` is that of the tests with the same kernels. Above 1 the first side takes less: `time`
    round by round, `peak_memory` of the bytes.
    """
    entries = []
    for mode in dict.fromkeys(row["checkpointing"] for row in rows):
        of_mode = {row["side"]: row for row in rows if row["checkpointing"] == mode}
        ours, theirs = (of_mode[side] for side in sides)
        entry: Row = {"gdn": ours["gdn"], "checkpointing": mode, "gate": gate}
        entries.append(entry)
        if ours["status"] == theirs["status"] == "ok":
            entry["equal"] = equal_work(ours, theirs)
            if gate == "green" and all(entry["equal"].values()):
                entry["time"] = ratios(theirs["rounds"], ours["rounds"])
                peaks = [row["memory"]["peak_bytes"] for row in (theirs, ours)]
                entry["peak_memory"] = peaks[0] / peaks[1]
    return entries


def equal_work(ours: Row, theirs: Row) -> dict[str, bool]:
    """Return what was equal: parameters, adapters, optimizer, kernels, first loss and norm."""
    same = {key: ours["facts"][key] == theirs["facts"][key] for key in ours["facts"]}
    for key in ("losses", "grad_norms"):
        one, other = ours["warmup"][key][0], theirs["warmup"][key][0]
        same[f"first of {key}"] = abs(one - other) <= LOSS_TOLERANCE * abs(other)
    return same


def in_words(entry: Row) -> str:
    """Return a comparison as a line for people."""
    text = f"gate {entry['gate']}"
    if "time" in entry:
        time, memory = entry["time"]["median"], entry["peak_memory"]
        text += f", Trainer takes {time:.2f} x the time and {memory:.2f} x the peak memory"
    unequal = [key for key, same in entry.get("equal", {}).items() if not same]
    return f"{text}; unequal: {', '.join(unequal)}" if unequal else text
