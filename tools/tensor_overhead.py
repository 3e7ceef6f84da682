"""What our tensor parallelism costs over torch's own, step by step in turns: results/tensor-overhead.json.

    python tools/tensor_overhead.py [--pairs 30] [--out results/tensor-overhead.json] [--profile]

Two processes of one thread train the same transformers llama from the same weights on the same rows, once as a run of
ours does it (`parallel.tp: 2`) and once by `torch.distributed.tensor.parallel` alone: `parallelize_module` with
Colwise- and RowwiseParallel, embedding and head cut by vocabulary, `loss_parallel`. A step is forward, backward, AdamW
and zeroing gradients, without clipping; each is timed from a barrier to the next, and the two sides take turns, the one
that was first in a pair second in the next. A pair gives a ratio, ours over torch's; of the ratios the median, with the
order statistics that hold it in at least 95 % of such series, whatever the distribution. The same of the seconds of CPU
that the first process took, all its threads, which other load on the machine changes less: what is computed, without
what is waited for.

In full training torch's side takes a block's input to a DTensor once (PrepareModuleInput), so that the gradients of its
column linears are added up before they are sent, as in ours. With LoRA it cannot, since A of a column linear is a plain
tensor there: each linear sends its own. B of a column linear is cut and A of a row linear, whose output is then sent
twice. The loss differs too: ours never holds all logits, `loss_parallel` holds this rank's.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional as F

from shardwise.assembly.build import build
from shardwise.config import Data, Lora, Model, Optimizer, Parallel, RunConfig, Training
from shardwise.interfaces import Batch, Mesh
from shardwise.metrics.hardware import environment
from shardwise.models import load, lora
from shardwise.models.families import spec_of
from shardwise.parallel.mesh import build_mesh
from shardwise.parallel.place import materialise
from shardwise.training.step import forward_backward

ROOT = Path(__file__).parents[1]
RANKS, ROWS, TOKENS, WARM_UP, SURE = 2, 4, 256, 3, 0.95
SIZES = {
    "model_type": "llama",
    "vocab_size": 2048,
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
    "architectures": ["LlamaForCausalLM"],
}
COLUMN, ROW = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), ("o_proj", "down_proj")
Step = Callable[[Batch], float]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "tensor-overhead.json")
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument(
        "--profile",
        action="store_true",
        help="show where each side's time goes; nothing is written",
    )
    options = parser.parse_args()
    modes = {}
    load_average = os.getloadavg()[
        0
    ]  # more than a few tenths: something else runs, and the seconds say little
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(SIZES), encoding="utf-8")
        for mode in ("full", "lora"):
            arguments = (folder, mode, options.pairs, options.profile)
            multiprocessing.start_processes(compare, arguments, nprocs=RANKS, start_method="spawn")
            if not options.profile:
                modes[mode] = json.loads(
                    (Path(folder) / f"{mode}.json").read_text(encoding="utf-8")
                )
                print(mode, modes[mode])
    if not options.profile:
        shape = {"rows": ROWS, "tokens": TOKENS, "model": SIZES}
        result = {
            "environment": environment(),
            "load_average": load_average,
            **shape,
            "modes": modes,
        }
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def compare(rank: int, folder: str, mode: str, pairs: int, profiled: bool) -> None:
    """One of the two processes; the first writes what it has found."""
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store-{mode}", rank=rank, world_size=RANKS
    )
    cfg = run_config(folder, mode)
    mesh = build_mesh(cfg, torch.device("cpu"))
    sides = {"ours": our_step(cfg, mesh), "torch": torch_step(cfg, mesh)}
    losses: dict[str, list[float]] = {side: [] for side in sides}
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    cpu_seconds: dict[str, list[float]] = {side: [] for side in sides}
    for number in range(WARM_UP + pairs):
        batch = batch_of(number)
        for side in sorted(sides, reverse=number % 2 == 1):
            dist.barrier()
            start, cpu_start = time.perf_counter(), time.process_time()
            losses[side].append(sides[side](batch))
            cpu_seconds[side].append(time.process_time() - cpu_start)
            dist.barrier()
            seconds[side].append(time.perf_counter() - start)
    if rank == 0 and not profiled:
        timed = {"wall": seconds, "cpu": cpu_seconds}
        found = {
            clock: ratios(*(taken[side][WARM_UP:] for side in sides))
            for clock, taken in timed.items()
        }
        result = {"pairs": pairs, **found, **difference(*losses.values())}
        (Path(folder) / f"{mode}.json").write_text(json.dumps(result), encoding="utf-8")
    for side, step in sides.items() if profiled else ():
        with (
            torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
            if rank == 0
            else nullcontext() as p
        ):
            step(batch_of(0))
        if p is not None:
            print(mode, side, p.key_averages().table(sort_by="self_cpu_time_total", row_limit=25))
    dist.destroy_process_group()


def run_config(folder: str, mode: str) -> RunConfig:
    """Ours; the other side is made from it."""
    return RunConfig(
        model=Model(folder, init="random"),
        data=Data("unused", sequence_length=TOKENS),
        training=Training("unused", global_batch_size=ROWS, micro_batch_size=ROWS, device="cpu"),
        lora=Lora(targets="all-linear") if mode == "lora" else None,
        parallel=Parallel(tp=RANKS),
        optimizer=Optimizer(lr=1e-3),
    )


def batch_of(number: int) -> Batch:
    """Random rows, the same on every rank and for both sides."""
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(0, SIZES["vocab_size"], (ROWS, TOKENS + 1), generator=generator)
    return Batch(
        tokens[:, :-1],
        tokens[:, 1:],
        torch.zeros(ROWS, TOKENS, dtype=torch.long),
        tuple(range(ROWS)),
        number,
    )


def our_step(cfg: RunConfig, mesh: Mesh) -> Step:
    """A step of a run of ours, without clipping and the learning rate's schedule."""
    job = build(cfg, mesh)

    def step(batch: Batch) -> float:
        loss, _ = forward_backward(job.pm, [batch], mesh)
        job.optimizer.step()
        job.optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return step


def torch_step(cfg: RunConfig, mesh: Mesh) -> Step:
    """The same by torch alone, of transformers' model as it is."""
    hf_config = load.read_config(cfg.model)
    hf = load.build_meta(cfg.model, hf_config)
    if cfg.lora:
        lora.inject(hf, cfg.lora, spec_of(hf_config, hf))
    materialise(hf, torch.device("cpu"))
    places: dict[str, list[str]] = {}
    for name, _ in hf.named_parameters():
        places.setdefault(name.replace(".base_layer", ""), []).append(name)
    weights = dict(load.weights(hf, cfg.model, cfg.training.seed, places)) | dict(
        lora.adapter_weights(hf, cfg.training.seed)
    )
    with torch.no_grad():
        for name, parameter in hf.named_parameters():
            parameter.copy_(weights[name.replace(".base_layer", "")])
    plan: dict[str, Any] = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
        "lm_head": ColwiseParallel(use_local_output=False),
    }
    base, a, b = (".base_layer", ".lora_A.default", ".lora_B.default") if cfg.lora else ("", "", "")
    for names, style, factor in ((COLUMN, ColwiseParallel, b), (ROW, RowwiseParallel, a)):
        for name in names:
            path = f"model.layers.*.{'mlp' if name in ('gate_proj', 'up_proj', 'down_proj') else 'self_attn'}.{name}"
            plan |= {path + end: style() for end in (base, factor)}
    if not cfg.lora:
        whole = Replicate()
        plan["model.layers.*.mlp"] = PrepareModuleInput(
            input_layouts=whole, desired_input_layouts=whole
        )
        plan["model.layers.*.self_attn"] = PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": whole},
            desired_input_kwarg_layouts={"hidden_states": whole},
        )
    parallelize_module(hf, mesh.dense["tp"], plan)
    trained = [parameter for parameter in hf.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(
        trained, lr=cfg.optimizer.lr, betas=cfg.optimizer.betas, weight_decay=0.0
    )
    hf.train()

    def step(batch: Batch) -> float:
        with loss_parallel():
            logits = hf(input_ids=batch.input_ids, use_cache=False).logits
            loss = F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten())
            loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return step


def ratios(ours: Sequence[float], other: Sequence[float]) -> dict[str, Any]:
    """Of each pair's times: the median ratio, and the order statistics around it."""
    found = sorted(a / b for a, b in zip(ours, other, strict=True))
    outside = outside_of(len(found))
    return {
        "ratio": round(median(found), 4),
        "interval": [round(found[outside], 4), round(found[-1 - outside], 4)],
        "median_seconds": {"ours": round(median(ours), 5), "torch": round(median(other), 5)},
        "ratios": [round(a / b, 4) for a, b in zip(ours, other)],
    }


def outside_of(number: int) -> int:
    """How many of so many sorted values may be left out at each end, so that the rest hold the median with SURE."""
    outside, tail = 0, 0.5**number  # chance that all lie on one side
    while (
        outside + 1 < number / 2
        and 2 * (tail + math.comb(number, outside + 1) * 0.5**number) <= 1 - SURE
    ):
        outside += 1
        tail += math.comb(number, outside) * 0.5**number
    return outside


def difference(ours: Sequence[float], other: Sequence[float]) -> dict[str, float]:
    """The largest relative difference of the losses, in the first step and in all."""
    found = [abs(a - b) / abs(b) for a, b in zip(ours, other, strict=True)]
    return {"loss_difference_first": found[0], "loss_difference": max(found)}


if __name__ == "__main__":
    main()
