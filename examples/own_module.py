"""Train a module that is not from transformers, under any layout.

`python examples/own_module.py --nproc 2 --parallel.data=fsdp2` runs it on two processes,
`--parallel.pp=2` as a pipeline, `--parallel.tp=2` with sharded linears. The task: which of the
first four coordinates of a point is the largest?
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Mapping, Sequence

import torch
from torch import nn
from torch.nn import functional as F

import shardwise

CONFIG = {
    "optimizer": {"name": "adamw", "lr": 0.01},
    "training": {
        "steps": 6,
        "global_batch_size": 16,
        "micro_batch_size": 4,
        "output_dir": "runs/own-module",
    },
}
DIMS, WIDTH, CLASSES, DEPTH = 8, 32, 4, 4


class Block(nn.Module):
    """A residual layer on [B, WIDTH]."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.feed_forward = FeedForward()
        self.dropout = nn.Dropout(0.1)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return hidden states [B, WIDTH]."""
        return hidden + self.dropout(self.feed_forward(self.norm(hidden)))


class FeedForward(nn.Module):
    """Two linears, between which the width is 4 times as large."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return what the residual sum adds, [B, WIDTH]."""
        return self.down(F.gelu(self.up(hidden)))


class Classifier(nn.Module):
    """A residual network that knows nothing of shardwise, except for its last three methods."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(DIMS, WIDTH)
        self.blocks = nn.ModuleDict({f"block{i}": Block() for i in range(DEPTH)})
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(
        self, batch: shardwise.TensorBatch, hidden: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the loss summed over rows: a sum, not a mean.

        As a stage of a pipeline it goes on from `hidden`, and returns hidden states unless it is
        the last one.
        """
        if hidden is None:
            hidden = self.embed(batch["points"])
        for block in self.blocks.values():
            hidden = block(hidden)
        if self.head is None:
            return hidden
        return F.cross_entropy(self.head(hidden).float(), batch["labels"], reduction="sum")

    def layer_names(self) -> Sequence[str]:
        """Return the paths of the layers, in order."""
        return [f"blocks.{name}" for name in self.blocks]

    def cut(self, layers: Sequence[str], first: bool, last: bool) -> nn.Module:
        """Return a stage with these layers."""
        stage = copy.deepcopy(self)
        for name in set(self.layer_names()) - set(layers):
            del stage.blocks[name.removeprefix("blocks.")]
        if not first:
            stage.embed = None
        if not last:
            stage.head = None
        return stage

    def passed_on(self, batch: shardwise.TensorBatch) -> torch.Tensor:
        """Return a tensor on meta like the hidden states between two stages."""
        return torch.empty(len(batch["points"]), WIDTH, device="meta")

    def tensor_cuts(self) -> Mapping[str, shardwise.TensorCut]:
        """Return how tensor parallelism shards the blocks of each layer."""
        cut = shardwise.TensorCut(out=("up",), into=("down",))
        return {f"{name}.feed_forward": cut for name in self.layer_names()}


def main(cfg: shardwise.RunConfig, mesh: shardwise.Mesh) -> None:
    """Be one rank: every rank runs the same loop, on its own rows."""
    torch.manual_seed(cfg.training.seed)  # the same initial values on every rank
    with shardwise.prepare(cfg, mesh, Classifier()) as run:
        for step in run.steps():
            run.step(run.microbatches(step, points(step, run.slots)))
            if step % 2 == 0:
                run.evaluate([run.microbatches(0, points(0, run.slots))])
        run.finish()


def points(step: int, slots: range) -> dict[str, torch.Tensor]:
    """Return the rows of these slots in a step: points [slots, DIMS] and labels [slots]."""
    rows = []
    for slot in slots:
        generator = torch.Generator().manual_seed(1000 * step + slot)
        rows.append(torch.randn(DIMS, generator=generator))
    features = torch.stack(rows)
    return {"points": features, "labels": features[:, :CLASSES].argmax(-1)}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--nproc", type=int)
    options, overrides = parser.parse_known_args()
    shardwise.run(main, CONFIG, options.nproc, overrides)
