"""DeepSpeed's ZeRO: its engine counts the micro-batches of a step."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from tools.peers.sides import MAX_NORM, MICROBATCHES, ROWS
from tools.peers.work import Rows, Watch, Work, mean_over_ranks


def build(work: Work) -> Any:
    """Return the engine; the option is the stage of ZeRO.

    On a CPU it compiles its collectives of one machine where it first runs. Two defaults are for
    large models: a buffer of 500 million elements for gradients, of which 2 GB would be the peak
    here, and in stage 3 weights of less than 100,000 elements stay whole.
    """
    prefix = Path(sys.prefix)
    os.environ |= {"DS_ACCELERATOR": "cpu", "TORCH_EXTENSIONS_DIR": str(prefix / "extensions")}
    os.environ["PATH"] = f"{prefix / 'bin'}{os.pathsep}{os.environ['PATH']}"  # for ninja
    import deepspeed

    model = work.model()
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=work.adamw(model),
        config={
            "train_micro_batch_size_per_gpu": ROWS,
            "gradient_accumulation_steps": MICROBATCHES // work.num_ranks,
            "gradient_clipping": MAX_NORM,
            "zero_optimization": {
                "stage": int(work.option),
                "reduce_bucket_size": sum(p.numel() for p in model.parameters() if p.requires_grad),
                "stage3_param_persistence_threshold": 0,
            },
        },
    )
    return engine


def train(built: Any, batches: list[list[Rows]], watch: Watch, work: Work) -> None:
    """Train on the batches."""
    for batch in batches:
        losses = []
        watch.begin()
        for rows in work.share(batch):
            loss = built(**rows).loss
            built.backward(loss)
            built.step()
            losses.append(loss)
        watch.end()
        watch.took(mean_over_ranks(losses), float(built.get_global_grad_norm()))


def weights(built: Any) -> Iterable[torch.Tensor]:
    """Return what this rank holds of the weights; stage 3 keeps small ones beside their shards."""
    for parameter in built.parameters():
        yield parameter
        yield from [parameter.ds_tensor] if hasattr(parameter, "ds_tensor") else []
