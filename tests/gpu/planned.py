"""`make gpu-plan`: memory and step times of whole runs on a CUDA device, beside what is planned.

The device is calibrated first, with models that no run has. Then come runs of published shapes with
random weights, each in a process of its own. Both predictions stand beside what was measured: by
the calibration, and by the device's datasheet.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "src"))  # the interpreter need not have shardwise installed

from tools.paired import table, write_json  # noqa: E402

from shardwise.assembly.describe import describe  # noqa: E402
from shardwise.config import RunConfig, UserError  # noqa: E402
from shardwise.config.run_file import load_config  # noqa: E402
from shardwise.lab.planner.calibration import default_path  # noqa: E402
from shardwise.lab.planner.cluster import Cluster, cluster_of, preset_of  # noqa: E402
from shardwise.lab.planner.peak import memory_of_run  # noqa: E402
from shardwise.lab.planner.step_time import time_of_step  # noqa: E402
from tests.gpu import suite  # noqa: E402
from tests.gpu.draw import machine  # noqa: E402
from tests.gpu.processes import run_limited  # noqa: E402
from tests.gpu.runs import CORPUS, RUN_SECONDS, Runner  # noqa: E402
from tests.gpu.suite import Suite, python  # noqa: E402

LIMITS = {"warm": 150.0, "calibrate": 360.0}
"""Seconds of a stage. fla's kernels are compiled in the first, and tuned in the second."""
BASE: dict[str, Any] = {
    "model": {"init": "random", "dtype": "bfloat16"},
    "lora": {"r": 16, "alpha": 32},
    "data": {"packing": "concat"},
    "measure": {"warmup_steps": 3},
    "training": {"steps": 8, "precision": "bfloat16"},
}
RUNS: dict[str, dict[str, Any]] = {
    f"{model}, {mode}, {rows} x {length} tokens, {checkpointing}": {
        "model.path": f"configs/models/{model}",
        "data.sequence_length": length,
        "training.micro_batch_size": rows,
        "training.global_batch_size": 2 * rows,
        "training.checkpointing": checkpointing,
        **({} if mode == "lora" else {"lora": None}),
    }
    for model, mode, rows, length, checkpointing in (
        ("qwen3_5-0.8b", "lora", 4, 1024, "none"),
        ("qwen3_5-0.8b", "full", 4, 1024, "none"),
        ("qwen3_5-0.8b", "lora", 8, 4096, "full"),
        ("qwen3_5-2b", "lora", 4, 4096, "none"),
        ("gpt2-large", "full", 8, 1024, "none"),
        ("qwen3_5-0.8b", "full", 1, 4096, "full"),
        ("qwen3_5-0.8b", "lora", 1, 4096, "none"),
        ("gpt2-large", "lora", 16, 1024, "none"),
        ("lfm2-1.2b", "lora", 4, 4096, "none"),
        ("qwen3_5-0.8b", "lora", 4, 1024, "full"),
        ("qwen3_5-2b", "full", 2, 4096, "full"),
        ("lfm2-1.2b", "full", 4, 4096, "none"),
    )
}
"""Keys of a run file beside BASE, in the order of what is worth most if time runs out."""
REHEARSAL = {
    "demo-hybrid, lora": {
        "model.path": "configs/models/demo-hybrid",
        "model.dtype": "float32",
        "data.sequence_length": 64,
        "training.micro_batch_size": 1,
        "training.global_batch_size": 2,
        "training.precision": "float32",
    }
}
"""On a CPU."""


def main() -> int:
    return suite.main("tests.gpu.planned", __doc__, body)


def body(device: str, folder: Path, scratch: Path) -> int:
    """Calibrate and train; `plan.json` is whole after each run; return 1 if one has failed."""
    os.environ["SHARDWISE_CACHE"] = str(scratch / "cache")
    if not CORPUS.is_dir():
        run_limited(python("examples.corpus"), scratch / "corpus.log", RUN_SECONDS)
    program = Suite(device, folder, scratch, LIMITS)
    program.warm()
    command = python("shardwise", "calibrate", "--device", device, "--nproc", "1")
    calibrated = program.run("calibrate", command)
    if default_path().exists():
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copy(default_path(), folder / "calibration.json")
    rows: list[dict[str, Any]] = []
    content = {"complete": False, "environment": machine(), "calibration": calibrated, "rows": rows}
    with Runner(device, scratch).started() as runner:
        runner.deadline = program.deadline
        for name, keys in (RUNS if device == "cuda" else REHEARSAL).items():
            run = runner.train(BASE, keys, device, name)
            with suppress(AttributeError):  # a failed run has ended its process
                runner.end()  # runs leave some memory
            row = {"run": name, "keys": keys, **measured(run)}
            try:
                row |= planned(load_config(*run["config"]))
            except Exception as error:  # what was measured stays worth having
                row |= {"status": "not planned", "reason": repr(error)}
            rows.append(row)
            write_json(folder / "plan.json", content)
            print(*cells(rows[-1]), sep=" | ", flush=True)
    write_json(folder / "plan.json", content | {"complete": True})
    print(table(("run", "status", "GiB", "planned", "ms", "here", "preset"), map(cells, rows)))
    return 0 if {row["status"] for row in rows} == {calibrated["status"]} == {"ok"} else 1


def measured(run: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a run's record says of its memory and its time."""
    row = {"status": run["status"], "reason": run["reason"]}
    if run["status"] == "ok":
        record = run["record"]
        row["peak_bytes"] = record["peak_memory_bytes"][0]
        row |= {name: record[name] for name in ("kernels", "step_seconds", "tokens_per_second")}
        row |= {name: record[name] for name in ("launches_per_step", "host_waits_per_step")}
    return row


def planned(cfg: RunConfig) -> dict[str, Any]:
    """Return the planned memory, and the step's time by part on every cluster that is known."""
    run = describe(cfg, 1)
    memory = memory_of_run(cfg, run)
    times = {name: time_of_step(cfg, run, cluster) for name, cluster in clusters()}
    return {
        "planned": memory._asdict() | {"total": memory.total},
        "seconds": {name: asdict(time) | {"total": time.total} for name, time in times.items()},
    }


def clusters() -> Iterator[tuple[str, Cluster]]:
    """Yield this machine as it was calibrated, and the preset of its device."""
    with suppress(UserError):
        here = cluster_of("here")
        yield "here", here
        assert here.calibration is not None
        if name := preset_of(here.calibration.environment["device"]):
            yield name, cluster_of(f"1x{name}")


def cells(row: Mapping[str, Any]) -> list[object]:
    """Return the row of the table: what was measured, and how far predictions are off."""
    if "peak_bytes" not in row or "seconds" not in row:
        return [row["run"], f"{row['status']}: {row['reason'][-200:]}", *[""] * 5]
    tensors = row["planned"]["total"] - row["planned"]["overhead"]
    seconds = row["step_seconds"]["p50"]
    off = [f"{time['total'] / seconds - 1:+.1%}" for time in row["seconds"].values()]
    memory = f"{row['peak_bytes'] / 2**30:.2f}", f"{tensors / row['peak_bytes'] - 1:+.1%}"
    return [
        row["run"],
        row["status"],
        *memory,
        f"{seconds * 1e3:.1f}",
        *off,
        *[""] * (2 - len(off)),
    ]


if __name__ == "__main__":
    sys.exit(main())
