"""`make gpu-runs`: whole runs on a CUDA device, beside the same runs on a CPU.

Every run is `shardwise.train`. On the device one comes after the other, in one process
(trainer.py): there CUDA, fla and Triton's tuning start once. Beside them processes of the CPU train
what the losses are compared with, so nothing here is a speed.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "src"))  # the interpreter need not have shardwise installed

from tools.paired import table, write_json  # noqa: E402

from shardwise.base.layouts import torch_version  # noqa: E402
from shardwise.config.rules.compiled import COMPILE_TORCH  # noqa: E402
from tests.gpu import suite  # noqa: E402
from tests.gpu.draw import machine  # noqa: E402
from tests.gpu.processes import Deadline, Worker, WorkerError, run_limited  # noqa: E402
from tests.gpu.suite import fla_or_torch, processes, python  # noqa: E402
from tests.gpu.workload import FLA_SHAPES, preset  # noqa: E402

Sides = dict[str, Future[dict[str, Any]]]
ROOM = 3.0
"""How many times as far from the CPU's losses a device may be as float32 on the CPU is. It rounds
at other places and adds up in another order."""
RUN_SECONDS = 120.0
CORPUS = ROOT / "runs" / "corpus"
LEVERS_BASE: dict[str, Any] = {
    "model": {"init": "random", "dtype": "bfloat16"},
    "lora": {"r": 8, "alpha": 16},
    "data": {"sequence_length": 128, "packing": "concat"},
    "optimizer": {"lr": 3e-3, "lr_schedule": "constant"},
    "training": {
        **{"steps": 6, "global_batch_size": 8, "micro_batch_size": 2},
        "precision": "bfloat16",
    },
}


@dataclass(frozen=True)
class Lever:
    """Keys of the run file that a run has beside LEVERS_BASE."""

    keys: Mapping[str, Any] = field(default_factory=dict)
    like: str = ""
    """The lever with which a run computes the same, on the CPU too; empty: this one itself."""
    needs: tuple[int, int] = (0, 0)
    """The first torch that does not refuse it."""


FULL = {"lora": None}
LEVERS: dict[str, Lever] = {
    "lora": Lever(),
    "full": Lever(FULL),
    "compile, lora": Lever({"training.compile": "inductor"}, "lora", COMPILE_TORCH),
    "compile, full": Lever({"training.compile": "inductor", **FULL}, "full", COMPILE_TORCH),
    "lora.kernel torch": Lever({"lora.kernel": "torch"}, "lora"),
    "lora.kernel peft": Lever({"lora.kernel": "peft"}, "lora"),
    "lora.dropout": Lever({"lora.dropout": 0.1}),
    "lora.dora": Lever({"lora.dora": True}),
    "loss chunked": Lever({"training.loss": "chunked"}, "lora"),
    "loss plain": Lever({"training.loss": "plain"}, "lora"),
    "float16": Lever({"training.precision": "float16", "model.dtype": "float32"}, "lora"),
    "accumulation float32": Lever({"training.accumulation": "float32"}, "lora"),
    "checkpointing full": Lever({"training.checkpointing": "full"}, "lora"),
    "checkpointing operators": Lever({"training.checkpointing": "operators"}, "lora"),
    "offload_activations": Lever({"training.offload_activations": True}, "lora"),
    "packing isolated": Lever({"data.packing": "isolated"}),
    "fp8_tensorwise, lora": Lever({"training.matmul": "fp8_tensorwise", "lora.kernel": "torch"}),
    "fp8_tensorwise, full": Lever({"training.matmul": "fp8_tensorwise", **FULL}),
    "fp8_rowwise, lora": Lever({"training.matmul": "fp8_rowwise", "lora.kernel": "torch"}),
    "fp8_rowwise, full": Lever({"training.matmul": "fp8_rowwise", **FULL}),
    "base nf4": Lever({"model.base": "nf4"}),
    "base int8": Lever({"model.base": "int8"}),
    "base fp8": Lever({"model.base": "fp8"}),
    "adamw8bit": Lever({"optimizer.name": "adamw8bit", **FULL}),
    "muon": Lever({"optimizer.name": "muon", **FULL}),
    "sgd": Lever({"optimizer.name": "sgd"}),
    "offload optimizer": Lever({"parallel.offload": "optimizer", **FULL}, "full"),
    "offload all": Lever({"parallel.data": "fsdp2", "parallel.offload": "all"}, "lora"),
    "offload disk": Lever({"parallel.offload": "disk", **FULL}, "full"),
    **{f"sdpa {name}": Lever({"model.attention": name}, "lora") for name in ("flash", "math")},
    **{
        f"{data}, {mode}": Lever({"parallel.data": data, **keys}, mode)
        for data in ("ddp", "fsdp2")
        for mode, keys in (("lora", {}), ("full", FULL))
    },
    "saved and evaluated": Lever(
        {
            **{"data.validation": 0.1, "training.eval_every": 2, "training.eval_batches": 1},
            **{"training.save_every": 2, "training.async_save": True, "training.sample": "def "},
        }
    ),
}


def main() -> int:
    return suite.main("tests.gpu.runs", __doc__, body)


def body(device: str, folder: Path, scratch: Path) -> int:
    """Run everything; `runs.json` is whole after each run; return 1 if one failed or is off."""
    if not CORPUS.is_dir():
        run_limited(python("examples.corpus"), scratch / "corpus.log", RUN_SECONDS)
    model = preset("tiny-qwen3_5") | FLA_SHAPES["tiny-qwen3_5"]
    model |= {"vocab_size": 2048, "intermediate_size": 192}  # the corpus'; and for 8-bit products
    write_json(scratch / "config.json", model)
    levers = LEVERS if device == "cuda" else {"lora": LEVERS["lora"]}
    rows: list[dict[str, Any]] = []
    content = {"complete": False, "environment": machine(), "room": ROOM, "levers": rows}
    with (
        Runner(device, scratch).started() as runner,
        ThreadPoolExecutor(1) as alone,
        ThreadPoolExecutor(processes()) as pool,
    ):
        sides = {name: runner.start(alone, pool, name, lever) for name, lever in levers.items()}
        for name, lever in levers.items():
            rows.append(lever_row(name, lever, sides[name], sides[lever.like or name]))
            write_json(folder / "runs.json", content)
    write_json(folder / "runs.json", content | {"complete": True})
    print(table(("lever", "status", "off by", "by rounding"), map(lever_cells, rows)))
    return 0 if {row["status"] for row in rows} <= {"ok", "refused"} else 1


class Runner:
    """Starts the runs on a device, and on the CPU those that they are compared with."""

    def __init__(self, device: str, scratch: Path) -> None:
        self.device, self.scratch = device, scratch
        self.deadline = Deadline(suite.TOTAL_SECONDS)
        self.of_thread = threading.local()
        self.workers: list[Worker] = []
        self.numbers = count()

    @contextmanager
    def started(self) -> Iterator[Runner]:
        """End every process at the end."""
        try:
            yield self
        finally:
            for worker in self.workers:
                worker.end()

    def worker(self, device: str) -> Worker:
        """Return the process that trains for this thread; its runs are all on one device."""
        if not hasattr(self.of_thread, "worker"):
            # transformers takes fla wherever it sees a GPU, and fla cannot run on the CPU.
            unseen = {} if device == "cuda" else {"CUDA_VISIBLE_DEVICES": ""}
            gdn = fla_or_torch() if device == "cuda" else "torch"
            command = python("tests.gpu.trainer", gdn, **unseen, OMP_NUM_THREADS="1")
            log = self.scratch / f"trainer-{next(self.numbers)}.log"
            self.of_thread.worker = Worker(command, log)
            self.workers.append(self.of_thread.worker)
        return self.of_thread.worker

    def start(
        self, alone: ThreadPoolExecutor, pool: ThreadPoolExecutor, name: str, lever: Lever
    ) -> Sides:
        """Start the run of a lever; if it is like no other, also on the CPU, twice."""

        def start(pool: ThreadPoolExecutor, side: str, device: str, **more: Any) -> Any:
            keys = dict(lever.keys) | more
            return pool.submit(self.train, LEVERS_BASE, keys, device, f"{side} {name}")

        sides = {"device": start(alone, "device", self.device)}
        if not lever.like:
            sides["cpu"] = start(pool, "cpu", "cpu")
            exact = {"training.precision": "float32", "model.dtype": "float32"}
            sides["float32"] = start(pool, "float32", "cpu", **exact)
        return sides

    def train(
        self, base: Mapping[str, Any], keys: Mapping[str, Any], device: str, name: str
    ) -> dict[str, Any]:
        """Train in this thread's process; return the status, and the record if there is one."""
        folder = self.scratch / name.replace(" ", "-").replace(",", "")
        run = {**base, "data": {**base["data"], "train": str(CORPUS / "python")}}
        places = {"path": str(self.scratch), "tokenizer": str(CORPUS / "tokenizer")}
        run["model"] = places | base["model"]
        run["training"] = {**base["training"], "output_dir": str(folder), "device": device}
        path = Path(f"{folder}.json")  # which is YAML, too
        write_json(path, run)
        more = [f"--{key}={json.dumps(value)}" for key, value in keys.items()]
        try:
            request = {"do": "train", "run": str(path), "overrides": more}
            outcome = self.worker(device).ask(request, self.deadline.left(RUN_SECONDS))
        except WorkerError as error:
            outcome = {"status": error.status, "reason": error.reason}
        # After some errors a process cannot use its device.
        if outcome["status"] not in ("ok", "refused"):
            self.end()
        record = folder / "record.json"
        found = json.loads(record.read_text(encoding="utf-8")) if record.exists() else None
        return {**outcome, "record": found, "config": (str(path), more)}

    def end(self) -> None:
        """End this thread's process."""
        self.of_thread.worker.end()
        del self.of_thread.worker


def lever_row(name: str, lever: Lever, own: Sides, like: Sides) -> dict[str, Any]:
    """Return whether a device's losses are those of the CPU, and what it ran with."""
    row: dict[str, Any] = {"lever": name, "keys": dict(lever.keys), "like": lever.like or name}
    here, cpu, exact = (f.result() for f in (own["device"], like["cpu"], like["float32"]))
    for side in (here, cpu, exact):
        if side["status"] != "ok":
            is_expected = side["status"] == "refused" and torch_version() < lever.needs
            status = "refused" if is_expected else "failed"
            return {**row, "status": status, "reason": side["reason"]}
    losses = [side["record"]["losses"] for side in (here, cpu, exact)]
    row["off_by"], row["by_rounding"] = (farthest(losses[1], losses[i]) for i in (0, 2))
    row |= {"losses": losses[0], "peak_bytes": here["record"]["peak_memory_bytes"][0]}
    row |= {key: here["record"][key] for key in ("kernels", "notes", "eval", "sample")}
    if row["off_by"] <= ROOM * row["by_rounding"]:
        return {**row, "status": "ok", "reason": ""}
    return {**row, "status": "off", "reason": f"over {ROOM} times what a rounding changes"}


def farthest(one: list[float], other: list[float]) -> float:
    """Return how far two curves are apart at most."""
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


def lever_cells(row: dict[str, Any]) -> list[object]:
    if "off_by" not in row:
        return [row["lever"], f"{row['status']}: {row['reason'][-200:]}", "", ""]
    return [row["lever"], row["status"], f"{row['off_by']:.1e}", f"{row['by_rounding']:.1e}"]


if __name__ == "__main__":
    sys.exit(main())
