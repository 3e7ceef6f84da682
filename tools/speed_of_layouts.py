"""What a step of the demo's model costs on two processes, here and in Hugging Face Trainer.

    python tools/speed_of_layouts.py [--rounds 9] [--out results/cores/two_processes.json]

Two gloo processes of one thread each train the demo's model, from random weights, with LoRA (r = 8
on all linears of the layers): 4 rows of 128 tokens on each, in two micro-batches. `trainer` is
Trainer with PEFT, its model in torch's DistributedDataParallel, which sums gradients after the last
micro-batch. `trainer_fsdp2` shards its layers by torch's `fully_shard`, as accelerate does, and
sums after the last micro-batch too. The other sides are our data-parallel strategies. All flush
numbers below 1e-38 to zero, as our runs do. The sides have the same weights and rows, and take
turns in the same processes. A step ends when the last process has ended it. `speed`: the seconds of
`trainer` over those of another side; `speed_sharded`: those of `trainer_fsdp2`, which gathers
weights as fsdp1 and fsdp2 do.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from speed_of_cores import CPU, trainer_of
from torch import multiprocessing
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

from shardwise.assembly.build import build
from shardwise.batches import IGNORED, Batch
from shardwise.benchmark.paired import Results, command_line, ratios, spread, take_turns, timed
from shardwise.config import Data, Lora, Model, Optimizer, Parallel, RunConfig, Training
from shardwise.metrics.hardware import environment
from shardwise.parallel.mesh import build_mesh
from shardwise.training.step import training_step

ROOT = Path(__file__).parents[1]
RANKS, MICROBATCHES, ROWS, TOKENS = 2, 2, 2, 128
STRATEGIES = ("ddp", "zero1", "zero2", "fsdp1", "fsdp2")
Step = Callable[[list[Batch]], float]


def main() -> None:
    parser = command_line(__doc__, ROOT / "results" / "cores" / "two_processes.json")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(1)
    sizes = {"rows": ROWS, "tokens": TOKENS, "microbatches": MICROBATCHES, "rounds": options.rounds}
    results = Results(options.out, {"environment": environment(), "sizes": sizes})
    results.add("demo-hybrid", partial(on_ranks, options.rounds))
    results.write()


def on_ranks(rounds: int) -> dict[str, Any]:
    """Return what steps take on all sides."""
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.start_processes(compare, (rounds, folder), RANKS, start_method="fork")
        return json.loads((Path(folder) / "row.json").read_text(encoding="utf-8"))


def compare(rank: int, rounds: int, folder: str) -> None:
    """Compare the sides on one of the ranks; the first one writes the row."""
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=RANKS)
    torch.set_flush_denormal(True)  # as launch/rank.py does for a run
    load_average = os.getloadavg()[0]
    sides = {"trainer": trainer_step(config("single"))}
    sides |= {"trainer_fsdp2": trainer_step(config("single"), sharded=True)}
    sides |= {name: our_step(config(name)) for name in STRATEGIES}

    def run(side: str, number: int) -> dict[str, float]:
        dist.barrier()
        loss, seconds = timed(lambda: sides[side](batches_of(number, rank)))
        slowest = torch.tensor(seconds["wall"], dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        return {"loss": loss, "wall": slowest.item()}

    taken = take_turns({side: partial(run, side) for side in sides}, rounds, warm_up=3)
    if rank == 0:
        walls = taken["wall"]
        row = {
            "load_average": load_average,
            "speed": {side: ratios(walls["trainer"], walls[side]) for side in sides},
            "speed_sharded": {
                side: ratios(walls["trainer_fsdp2"], walls[side]) for side in ("fsdp1", "fsdp2")
            },
            "seconds": {side: spread(seconds) for side, seconds in walls.items()},
            "loss": {side: spread(losses) for side, losses in taken["loss"].items()},
        }
        (Path(folder) / "row.json").write_text(json.dumps(row), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def config(data: Any) -> RunConfig:
    """Return our run under a strategy; Trainer's settings follow from it."""
    size = {"global_batch_size": RANKS * MICROBATCHES * ROWS, "micro_batch_size": ROWS}
    return RunConfig(
        model=Model(str(ROOT / "configs" / "models" / "demo-hybrid"), init="random"),
        data=Data("unused", sequence_length=TOKENS),
        parallel=Parallel(data=data),
        training=Training("unused", device="cpu", **size),
        lora=Lora(r=8, alpha=16, targets="all-linear"),
        optimizer=Optimizer(lr=1e-3),
    )


def batches_of(number: int, rank: int) -> list[Batch]:
    """Return a rank's micro-batches of a step, the same for all sides."""
    generator = torch.Generator().manual_seed(RANKS * number + rank)
    shape = (MICROBATCHES, ROWS, TOKENS)
    batches = []
    for rows in torch.randint(0, 1024, shape, generator=generator):
        labels = F.pad(rows[:, 1:], (0, 1), value=IGNORED)
        batches.append(Batch(rows, labels, torch.zeros_like(rows), tuple(range(ROWS)), number + 1))
    return batches


def our_step(cfg: RunConfig) -> Step:
    """Return a step of a run of ours."""
    mesh = build_mesh(cfg, CPU)
    job = build(cfg, mesh)

    def step(batches: list[Batch]) -> float:
        loss = training_step(job, batches, mesh, cfg.optimizer.max_grad_norm).loss
        job.optimizer.zero_grad(set_to_none=True)
        return loss

    return step


def trainer_step(cfg: RunConfig, sharded: bool = False) -> Step:
    """Return a step of Trainer with PEFT under torch's DistributedDataParallel or fully_shard."""
    trainer, adapted, optimizer = trainer_of(cfg)
    trainer.current_gradient_accumulation_steps = MICROBATCHES  # its loop sets it
    if sharded:
        for layer in adapted.get_base_model().model.layers:
            fully_shard(layer)
        replica: Any = fully_shard(adapted)
        optimizer = AdamW([p for p in adapted.parameters() if p.requires_grad], lr=1e-3)
    else:
        replica = DistributedDataParallel(adapted)

    def step(batches: list[Batch]) -> float:
        losses = []
        for batch in batches:
            is_last = batch is batches[-1]
            rows = {"input_ids": batch.input_ids, "labels": batch.input_ids}  # transformers shifts
            if sharded:
                replica.set_requires_gradient_sync(is_last)
            with contextlib.nullcontext() if sharded or is_last else replica.no_sync():
                losses.append(trainer.training_step(replica, rows))
        trainer.accelerator.clip_grad_norm_(adapted.parameters(), trainer.args.max_grad_norm)
        optimizer.step()
        adapted.zero_grad()
        loss = torch.stack(losses).sum()
        dist.all_reduce(loss)
        return loss.item() / RANKS

    return step


if __name__ == "__main__":
    main()
