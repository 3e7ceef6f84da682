"""PyTorch alone: `fully_shard` around each layer and the model, in the usual plain loop."""

from __future__ import annotations

from typing import Any

import torch
from tools.peers.sides import MAX_NORM
from tools.peers.work import Rows, Watch, Work, layers_of, mean_over_ranks
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import clip_grad_norm_

Built = tuple[Any, torch.optim.Optimizer]


def build(work: Work) -> Built:
    """Return the sharded model and its optimizer."""
    model = work.model()
    for layer in layers_of(model):
        fully_shard(layer)
    model = fully_shard(model)
    return model, work.adamw(model)


def train(built: Built, batches: list[list[Rows]], watch: Watch, work: Work) -> None:
    """Train on the batches: the mean of each micro-batch counts alike."""
    model, optimizer = built
    for batch in batches:
        microbatches, losses = work.share(batch), []
        watch.begin()
        for rows in microbatches:
            model.set_requires_gradient_sync(rows is microbatches[-1])
            loss = model(**rows).loss
            (loss / len(microbatches)).backward()
            losses.append(loss)
        norm: Any = clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        watch.end()
        watch.took(mean_over_ranks(losses), norm.full_tensor().item())
