"""Walk through a run: its public stages, one after the other, each with what it made.

`python examples/anatomy.py` trains a tiny hybrid model with LoRA on one process, without the
command, launcher and session around it. What it calls is what `shardwise train` calls, in the same
order (`shardwise/training/loop.py`); another layout differs in the config alone.
"""

from __future__ import annotations

import sys
from collections import Counter
from contextlib import closing
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from shardwise.assembly import order
from shardwise.assembly.build import Job, build
from shardwise.assembly.describe import describe
from shardwise.base.interfaces import Mesh
from shardwise.base.words import size
from shardwise.checkpoint.export import save_result
from shardwise.checkpoint.resume import Start, find_start
from shardwise.config import RunConfig
from shardwise.config.presets import MODELS, STARTER
from shardwise.config.run_file import parse_config
from shardwise.data.loader import Loaders, build_loaders
from shardwise.data.tokenizer import load_tokenizer
from shardwise.models import folder_config
from shardwise.parallel.mesh import build_mesh
from shardwise.training.evaluate import evaluate
from shardwise.training.step import training_step

SECTIONS = {
    "model": {
        "path": str(MODELS / "tiny-qwen3_5"),  # three Gated DeltaNet layers, one of attention
        "tokenizer": str(STARTER),
        "init": "random",
    },
    "lora": {"r": 4, "alpha": 8},
    "data": {"train": str(STARTER / "corpus.jsonl"), "validation": 0.2, "sequence_length": 64},
    "optimizer": {"lr": 0.01},
    "training": {"steps": 3, "global_batch_size": 4, "micro_batch_size": 2},
}


def main(output_dir: Path) -> list[float]:
    """Be the only rank of a run, from its config to its adapter; return the losses of its steps."""
    cfg = config(output_dir)
    mesh = grid(cfg)
    tokenizer, start, loaders = rows(cfg, mesh)
    with closing(loaders.train):
        job = model(cfg, mesh, start)
        losses = steps(cfg, mesh, job, loaders)
    save(cfg, mesh, job, tokenizer)
    return losses


def config(output_dir: Path) -> RunConfig:
    """Check what a user wrote."""
    print("1. The run file becomes frozen dataclasses; a wrong key or value ends here.")
    training = SECTIONS["training"] | {"output_dir": str(output_dir)}
    cfg = parse_config(SECTIONS | {"training": training}, "anatomy.py")
    show(f"{cfg.training.steps} steps of {cfg.training.global_batch_size} rows")
    show(f"laid out as `{cfg.parallel.data}`")
    return cfg


def grid(cfg: RunConfig) -> Mesh:
    """Number the ranks along the axes of the layout."""
    print("2. The processes of a run meet, here one, and become a grid.")
    mesh = build_mesh(cfg, torch.device("cpu"))
    axes = mesh.dense.mesh_dim_names or ()
    show("ranks along each axis: " + ", ".join(f"{axis} {mesh.size(axis)}" for axis in axes))
    return mesh


def rows(cfg: RunConfig, mesh: Mesh) -> tuple[PreTrainedTokenizerBase, Start, Loaders]:
    """Open the data: this rank reads its slots of each global batch."""
    print("3. The tokenizer is read; it may have no token without an embedding.")
    tokenizer = load_tokenizer(cfg.model, cfg.data.chat_template)
    num_rows = folder_config.check_vocabulary(folder_config.read_config(cfg.model), tokenizer)
    show(f"{len(tokenizer)} tokens")

    print("4. Row j of every step is a function of (seed, step, j), whatever the layout.")
    start = find_start(cfg)  # from scratch, or after a checkpoint
    slots = mesh.slots(cfg.training.global_batch_size)
    loaders = build_loaders(cfg, tokenizer, slots, start.loader, num_rows)
    first = loaders.first_step()
    for batch in first:
        shape, targets = [*batch.input_ids.shape], int(batch.num_target_tokens())
        show(f"slots {[*batch.slots]}: input_ids {shape}, {targets} targets")
    show(f"row 0 begins with {tokenizer.decode(first[0].input_ids[0, :24].tolist())!r}")
    return tokenizer, start, loaders


def model(cfg: RunConfig, mesh: Mesh, start: Start) -> Job:
    """Describe the run without memory, then build this rank's part of it."""
    print("5. The run is described on `meta`: rules, kinds of layers, adapters.")
    facts = describe(cfg, mesh.dense.size(), mesh.device)
    kinds = Counter(layer.kind for layer in facts.spec.layers)
    show("layers: " + ", ".join(f"{number} {kind}" for kind, number in kinds.items()))
    trained = [name for name, p in facts.hf.named_parameters() if p.requires_grad]
    show("LoRA adapts " + ", ".join(dict.fromkeys(name.split(".")[-4] for name in trained)))

    print("6. What the run asks for is done in one ORDER; weights and optimizer come last.")
    show("; ".join(entry.name for entry in order.ORDER if entry.is_requested(cfg)))
    job = build(cfg, mesh, start.state(), cfg.training.steps)
    show(", ".join(f"{number:,} parameters {name}" for name, number in job.parameters.items()))
    show("kernels: " + ", ".join(f"{what} by {which}" for what, which in job.run.kernels.items()))
    show(f"this rank holds {size(sum(p.nbytes for p in job.pm.stored()))} of weights")
    return job


def steps(cfg: RunConfig, mesh: Mesh, job: Job, loaders: Loaders) -> list[float]:
    """Evaluate, train, evaluate."""
    assert loaders.validation is not None
    print("7. The loss of held-out rows is taken without gradients.")
    before = evaluate(job.pm, loaders.validation, mesh, step=0)
    show(f"{before.loss:.3f} over {before.tokens} targets")

    print("8. A step: forward and backward of each micro-batch, sums over ranks, clip, update.")
    losses = []
    for number in range(1, job.num_steps + 1):
        lr = job.optimizer.param_groups[0]["lr"]
        done = training_step(job, next(loaders.train), mesh, cfg.optimizer.max_grad_norm)
        losses.append(done.loss)
        show(
            f"step {number}: loss {done.loss:.3f} over {done.tokens} targets, "
            f"gradient norm {done.grad_norm:.2f}, learning rate {lr:.2g}"
        )

    print("9. The same held-out rows are evaluated again.")
    after = evaluate(job.pm, loaders.validation, mesh, step=job.num_steps)
    show(f"{after.loss:.3f}, lower by {before.loss - after.loss:.3f}")
    return losses


def save(cfg: RunConfig, mesh: Mesh, job: Job, tokenizer: PreTrainedTokenizerBase) -> None:
    """Write the result as PEFT does."""
    print("10. The result is gathered tensor by tensor, and loads with `peft` alone.")
    output_dir = Path(cfg.training.output_dir)
    output_dir.mkdir(parents=True, exist_ok=True)
    folder = save_result(job, cfg, mesh, output_dir, tokenizer)
    assert folder is not None, "rank 0 writes"
    show(f"{folder.name}/: " + ", ".join(sorted(path.name for path in folder.iterdir())))


def show(line: str) -> None:
    """Print what a stage has made."""
    print(f"   {line}")


if __name__ == "__main__":
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/anatomy"))
    finally:
        dist.destroy_process_group()
