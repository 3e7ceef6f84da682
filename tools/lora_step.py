"""A LoRA step with the project's LoRA linears against one with PEFT's forward, on this CPU.

    python tools/lora_step.py [--rounds 15] [--out results/lora-step.json]

One process, one thread, the small hybrid of configs/models/demo-hybrid, R = 16 on every projection,
2 micro-batches of 2 x 256 tokens. The kernels take turns within a round; a ratio is PEFT's seconds
over the kernel's. Losses of the first step must agree before anything is timed. It says nothing of
a GPU.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardwise.assembly.build import Job, build
from shardwise.benchmark.paired import Results, command_line, ratios, spread, take_turns, timed
from shardwise.config import Data, Lora, Model, RunConfig, Training
from shardwise.interfaces import Batch, Mesh
from shardwise.metrics.hardware import environment
from shardwise.metrics.memory import PeakMemory
from shardwise.parallel.mesh import build_mesh
from shardwise.training.step import forward_backward

ROOT = Path(__file__).parents[1]
MODEL = ROOT / "configs" / "models" / "demo-hybrid"
SIZES = {"rows": 2, "tokens": 256, "micro_batches": 2, "rank": 16}
ROWS, TOKENS, MICROBATCHES, RANK = SIZES.values()
KERNELS = ("peft", "torch")
CASES = {
    "float32": ("float32", "float32", 0.0),
    "float32, dropout 0.1": ("float32", "float32", 0.1),
    "bfloat16 model, float32 adapters": ("bfloat16", "float32", 0.0),
}
"""dtype of the model, precision of the products, dropout of LoRA."""


def main() -> None:
    parser = command_line(__doc__, ROOT / "results" / "lora-step.json")
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(1)
    equal = {"environment": environment(), "model": MODEL.name, "sizes": SIZES}
    results = Results(options.out, {**equal, "rounds": options.rounds})
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        for name, case in CASES.items():
            results.add(name, partial(compare, *case, options.rounds))
        dist.destroy_process_group()
    results.write()


def compare(dtype: Any, precision: Any, dropout: float, rounds: int) -> dict[str, Any]:
    """Return seconds, ratios and peak bytes of a step with each kernel."""
    cfg = RunConfig(
        model=Model(str(MODEL), init="random", dtype=dtype),
        data=Data(train="none", sequence_length=TOKENS),
        training=Training(
            output_dir="none",
            global_batch_size=ROWS * MICROBATCHES,
            micro_batch_size=ROWS,
            precision=precision,
        ),
    )
    mesh = build_mesh(cfg, torch.device("cpu"))
    jobs = {}
    for kernel in KERNELS:
        lora = Lora(r=RANK, dropout=dropout, kernel=kernel)
        jobs[kernel] = build(replace(cfg, lora=lora), mesh)
    losses = {kernel: step(job, mesh, 0) for kernel, job in jobs.items()}
    tolerance = 1e-5 if dtype == "float32" else 1e-2
    assert all(abs(loss / losses["peft"] - 1) < tolerance for loss in losses.values()), losses
    peak_bytes = {kernel: added_bytes(job, mesh) for kernel, job in jobs.items()}
    sides = {kernel: partial(seconds_of_step, job, mesh) for kernel, job in jobs.items()}
    taken = take_turns(sides, rounds)
    return {
        kernel: {
            "peak_bytes": peak_bytes[kernel],
            "seconds": {clock: spread(taken[clock][kernel]) for clock in ("wall", "cpu")},
            "speed_of_peft": {
                clock: ratios(taken[clock]["peft"], taken[clock][kernel])
                for clock in ("wall", "cpu")
            },
        }
        for kernel in KERNELS
    }


def step(job: Job, mesh: Mesh, number: int) -> float:
    """Compute loss and gradients of step `number`, and return the loss."""
    generator = torch.Generator().manual_seed(number)
    batches = []
    for i in range(MICROBATCHES):
        tokens = torch.randint(0, 2048, (ROWS, TOKENS + 1), generator=generator)
        documents = torch.zeros(ROWS, TOKENS, dtype=torch.long)
        slots = tuple(range(i * ROWS, (i + 1) * ROWS))
        batches.append(Batch(tokens[:, :-1], tokens[:, 1:], documents, slots, number + 1))
    loss, _ = forward_backward(job.pm, batches, mesh)
    job.optimizer.zero_grad()
    return loss.item()


def seconds_of_step(job: Job, mesh: Mesh, number: int) -> dict[str, float]:
    _, seconds = timed(partial(step, job, mesh, number))
    return seconds


def added_bytes(job: Job, mesh: Mesh) -> int:
    """Return the most bytes alive in a step, above those before it."""
    with PeakMemory(mesh.device) as memory:
        step(job, mesh, 0)
    return memory.added_bytes()


if __name__ == "__main__":
    main()
