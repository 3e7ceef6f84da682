"""Accelerate, asked for FSDP2 by its plugin, in the loop of its guide on accumulation."""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState
from tools.peers.sides import MAX_NORM, MICROBATCHES
from tools.peers.work import Rows, Watch, Work, layers_of, mean_over_ranks
from torch.distributed.tensor import DTensor

Built = tuple[Any, Accelerator, Any]


def build(work: Work) -> Built:
    """Return the model and the optimizer as Accelerate prepares them.

    Its state takes the plugin on accelerators alone. With the option `made` the state is changed by
    hand, so that its code for FSDP2 runs on a CPU.
    """
    model = work.model()
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=[type(layers_of(model)[0]).__name__],
        cpu_ram_efficient_loading=False,
    )
    accumulated = MICROBATCHES // work.num_ranks
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin, gradient_accumulation_steps=accumulated)
    if work.option == "made":
        shared = AcceleratorState._shared_state
        shared |= {"distributed_type": DistributedType.FSDP, "fsdp_plugin": plugin}
    model, optimizer = accelerator.prepare(model, work.adamw(model))
    return model, accelerator, optimizer


def train(built: Built, batches: list[list[Rows]], watch: Watch, work: Work) -> None:
    """Train on the batches."""
    model, accelerator, optimizer = built
    for batch in batches:
        losses: list[torch.Tensor] = []
        norm: Any = None
        watch.begin()
        for rows in work.share(batch):
            with accelerator.accumulate(model):
                loss = model(**rows).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss)
        watch.end()
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        watch.took(mean_over_ranks(losses), float(norm))
