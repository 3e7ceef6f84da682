"""What our tensor parallelism costs over torch's own, step by step in turns.

    python tools/tensor_overhead.py [--pairs 30] [--out results/tensor-overhead.json]

Two processes of one thread train the same transformers llama from the same weights on the same
rows: once as a run of ours does it (`parallel.tp: 2`), once by `torch.distributed.tensor.parallel`
alone: `parallelize_module` with Colwise- and RowwiseParallel, embedding and head cut by vocabulary,
`loss_parallel`. A step is forward, backward, AdamW and zeroing gradients, without clipping. Each is
timed from a barrier to the next (`wall`), and by the seconds of CPU of the first process (`cpu`):
what is computed, without what is waited for. A ratio is ours over torch's.

In full training torch's side takes a block's input to a DTensor once (PrepareModuleInput), so that
the gradients of its column linears are added up before they are sent, as in ours. With LoRA it
cannot, since A of a column linear is a plain tensor there: each linear sends its own. B of a column
linear is cut and A of a row linear, whose output is then sent twice. The loss differs too: ours
never holds all logits, `loss_parallel` holds this rank's.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
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
from shardwise.batches import Batch
from shardwise.benchmark.paired import Results, command_line, ratios, spread, take_turns, timed
from shardwise.config import Data, Lora, Model, Optimizer, Parallel, RunConfig, Training
from shardwise.interfaces import Mesh
from shardwise.metrics.hardware import environment
from shardwise.models import load, lora
from shardwise.models.families import spec_of
from shardwise.parallel.mesh import build_mesh
from shardwise.parallel.place import materialise
from shardwise.training.step import forward_backward

RANKS, ROWS, TOKENS, WARM_UP = 2, 4, 256, 3
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
BLOCK_OF = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj"), "self_attn"),
    **dict.fromkeys(("gate_proj", "up_proj", "down_proj"), "mlp"),
}
ROW_LINEARS = ("o_proj", "down_proj")
Step = Callable[[Batch], float]


def main() -> None:
    results = Path(__file__).parents[1] / "results"
    parser = command_line(__doc__, results / "tensor-overhead.json")
    parser.add_argument("--pairs", type=int, default=30)
    options = parser.parse_args()
    sizes = {"rows": ROWS, "tokens": TOKENS, "model": SIZES, "pairs": options.pairs}
    results = Results(options.out, {"environment": environment(), "sizes": sizes})
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(SIZES), encoding="utf-8")
        for mode in ("full", "lora"):
            results.add(mode, partial(compare, folder, mode, options.pairs))
    results.write()


def compare(folder: str, mode: str, pairs: int) -> dict[str, Any]:
    """Start both processes and return what the first one has measured."""
    # More than a few tenths: something else runs, and the seconds say little.
    load_average = os.getloadavg()[0]
    file = Path(folder) / f"{mode}.json"
    multiprocessing.start_processes(
        compare_on_rank, (folder, mode, pairs, file), nprocs=RANKS, start_method="spawn"
    )
    return {"load_average": load_average, **json.loads(file.read_text(encoding="utf-8"))}


def compare_on_rank(rank: int, folder: str, mode: str, pairs: int, file: Path) -> None:
    """Time both sides on one of the two processes; the first one writes the file."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store-{mode}", rank=rank, world_size=RANKS
    )
    cfg = run_config(folder, mode)
    mesh = build_mesh(cfg, torch.device("cpu"))
    steps = {"ours": our_step(cfg, mesh), "torch": torch_step(cfg, mesh)}
    losses: dict[str, list[float]] = {side: [] for side in steps}

    def run(side: str, number: int) -> dict[str, float]:
        batch = batch_of(number)
        dist.barrier()
        (loss, busy), seconds = timed(lambda: between_barriers(steps[side], batch))
        losses[side].append(loss)
        return {"wall": seconds["wall"], "cpu": busy["cpu"]}

    taken = take_turns({side: partial(run, side) for side in steps}, pairs, WARM_UP)
    if rank == 0:
        result = {clock: compared(taken[clock]) for clock in ("wall", "cpu")}
        result |= difference(losses["ours"], losses["torch"])
        file.write_text(json.dumps(result), encoding="utf-8")
    dist.destroy_process_group()


def between_barriers(step: Step, batch: Batch) -> tuple[float, dict[str, float]]:
    """Return the loss of a step and its seconds, after the other process has ended its step too."""
    result = timed(lambda: step(batch))
    dist.barrier()
    return result


def compared(seconds: dict[str, list[float]]) -> dict[str, Any]:
    """Return the ratio, ours over torch's, and the seconds of both sides."""
    return {
        "ratio": ratios(seconds["ours"], seconds["torch"]),
        "seconds": {side: spread(values) for side, values in seconds.items()},
    }


def run_config(folder: str, mode: str) -> RunConfig:
    """Return the run of our side; the other side follows from it."""
    return RunConfig(
        model=Model(folder, init="random"),
        data=Data("unused", sequence_length=TOKENS),
        training=Training("unused", global_batch_size=ROWS, micro_batch_size=ROWS, device="cpu"),
        lora=Lora(targets="all-linear") if mode == "lora" else None,
        parallel=Parallel(tp=RANKS),
        optimizer=Optimizer(lr=1e-3),
    )


def batch_of(number: int) -> Batch:
    """Return random rows, the same on every rank and for both sides."""
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
    """Return a step of a run of ours, without clipping and the learning rate's schedule."""
    job = build(cfg, mesh)

    def step(batch: Batch) -> float:
        loss, _ = forward_backward(job.pm, [batch], mesh)
        job.optimizer.step()
        job.optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return step


def torch_step(cfg: RunConfig, mesh: Mesh) -> Step:
    """Return the same step by torch alone, of transformers' model as it is."""
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
    for name, block in BLOCK_OF.items():
        cut, factor = (RowwiseParallel, a) if name in ROW_LINEARS else (ColwiseParallel, b)
        plan |= {f"model.layers.*.{block}.{name}{end}": cut() for end in (base, factor)}
    if not cfg.lora:
        everywhere = Replicate()
        plan["model.layers.*.mlp"] = PrepareModuleInput(
            input_layouts=everywhere, desired_input_layouts=everywhere
        )
        plan["model.layers.*.self_attn"] = PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": everywhere},
            desired_input_kwarg_layouts={"hidden_states": everywhere},
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


def difference(ours: Sequence[float], other: Sequence[float]) -> dict[str, float]:
    """Return the largest relative difference of the losses, in the first step and in all."""
    differences = [abs(a - b) / abs(b) for a, b in zip(ours, other, strict=True)]
    return {"loss_difference_first": differences[0], "loss_difference": max(differences)}


if __name__ == "__main__":
    main()
