"""A LoRA step with the project's LoRA linears against one with PEFT's forward, on this CPU: time and peak memory.

    python tools/lora_step.py [--rounds 15] [--out results/lora-step.json]

One process, one thread, the small hybrid of configs/models/demo-hybrid, r = 16 on every projection, 2 micro-batches of
2 x 256 tokens. The variants take turns within a round, so that what else the machine does falls on all; a ratio is the
median over rounds of PEFT's seconds over the variant's. CPU time leaves out what a process waits for others. Losses of
the first step must agree before anything is timed. It says nothing of a GPU.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from shardwise.assembly.build import Job, build
from shardwise.config import Data, Lora, Model, RunConfig, Training
from shardwise.interfaces import Batch, Mesh
from shardwise.metrics.hardware import environment
from shardwise.metrics.memory import PeakMemory
from shardwise.parallel.mesh import build_mesh
from shardwise.training.step import forward_backward

ROOT = Path(__file__).parents[1]
ROWS, TOKENS, MICROBATCHES, RANK = 2, 256, 2, 16
CASES = {
    "float32": ("float32", "float32", 0.0),
    "float32, dropout 0.1": ("float32", "float32", 0.1),
    "bfloat16 model, float32 adapters": ("bfloat16", "float32", 0.0),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "lora-step.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        rows = [compare(name, *case, options.rounds) for name, case in CASES.items()]
        dist.destroy_process_group()
    shape = {
        "rows": ROWS,
        "tokens": TOKENS,
        "microbatches": MICROBATCHES,
        "rank": RANK,
        "rounds": options.rounds,
    }
    result = {"environment": environment(), "model": "demo-hybrid", **shape, "cases": rows}
    options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def compare(name: str, dtype: Any, precision: Any, dropout: float, rounds: int) -> dict[str, Any]:
    cfg = RunConfig(
        model=Model(str(ROOT / "configs" / "models" / "demo-hybrid"), init="random", dtype=dtype),
        data=Data(train="none", sequence_length=TOKENS),
        training=Training(
            output_dir="none",
            global_batch_size=ROWS * MICROBATCHES,
            micro_batch_size=ROWS,
            precision=precision,
        ),
        lora=Lora(r=RANK, dropout=dropout),
    )
    assert cfg.lora is not None
    loras = {"peft": replace(cfg.lora, kernel="peft"), "torch": replace(cfg.lora, kernel="torch")}
    mesh = build_mesh(cfg, torch.device("cpu"))
    jobs = {way: build(replace(cfg, lora=lora), mesh) for way, lora in loras.items()}
    losses = {way: step(job, mesh, 0) for way, job in jobs.items()}
    tolerance = 1e-5 if dtype == "float32" else 1e-2
    assert all(abs(loss / losses["peft"] - 1) < tolerance for loss in losses.values()), losses
    peaks = {way: peak(job, mesh) for way, job in jobs.items()}
    wall: dict[str, list[float]] = {way: [] for way in jobs}
    busy: dict[str, list[float]] = {way: [] for way in jobs}
    for number in range(rounds):
        ways = list(jobs) if number % 2 else list(jobs)[::-1]
        for way in ways:
            start, started = time.perf_counter(), time.process_time()
            step(jobs[way], mesh, number)
            wall[way].append(time.perf_counter() - start)
            busy[way].append(time.process_time() - started)
    row: dict[str, Any] = {"case": name}
    for way in jobs:
        row[way] = {
            "wall_seconds": round(median(wall[way]), 4),
            "cpu_seconds": round(median(busy[way]), 4),
            "cpu_speed_of_peft": round(median(p / o for p, o in zip(busy["peft"], busy[way])), 3),
            "wall_speed_of_peft": round(median(p / o for p, o in zip(wall["peft"], wall[way])), 3),
            "peak_bytes": peaks[way],
        }
    print(json.dumps(row), flush=True)
    return row


def step(job: Job, mesh: Mesh, number: int) -> float:
    """The loss; gradients are thrown away."""
    generator = torch.Generator().manual_seed(number)
    batches = []
    for i in range(MICROBATCHES):
        tokens = torch.randint(0, 2048, (ROWS, TOKENS + 1), generator=generator)
        slots = tuple(range(i * ROWS, (i + 1) * ROWS))
        ids = torch.zeros(ROWS, TOKENS, dtype=torch.long)
        batches.append(Batch(tokens[:, :-1], tokens[:, 1:], ids, slots, number + 1))
    loss = forward_backward(job.pm, batches, mesh)
    job.optimizer.zero_grad()
    return float(loss[0] if isinstance(loss, tuple) else loss)


def peak(job: Job, mesh: Mesh) -> int:
    """The most bytes alive in a step, over what there was before."""
    with PeakMemory(mesh.device) as memory:
        step(job, mesh, 0)
    assert memory.peak_bytes is not None
    assert memory.entry_bytes is not None
    return memory.peak_bytes - memory.entry_bytes


if __name__ == "__main__":
    main()
