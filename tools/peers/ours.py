"""shardwise: the assembly and the training step that `shardwise train` runs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from tools.peers.sides import MAX_NORM, ROWS, TOKENS
from tools.peers.work import CPU, Rows, Watch, Work
from torch.nn import functional as F

from shardwise.assembly.build import Job
from shardwise.assembly.build import build as build_job
from shardwise.base.batches import IGNORED, Batch
from shardwise.base.interfaces import Mesh
from shardwise.config import Data, Parallel
from shardwise.parallel.mesh import build_mesh
from shardwise.training.step import training_step

Built = tuple[Job, Mesh]


def build(work: Work) -> Built:
    """Return a run of ours; its option is `parallel.data`, with `isolated` rows after a plus."""
    strategy, _, packing = work.option.partition("+")
    cfg: Any = replace(work.config(), parallel=Parallel(data=strategy))  # type: ignore[arg-type]
    if packing:
        cfg = replace(cfg, data=Data("unused", sequence_length=TOKENS, packing="isolated"))
    mesh = build_mesh(cfg, CPU)
    return build_job(cfg, mesh), mesh


def train(built: Built, batches: list[list[Rows]], watch: Watch, work: Work) -> None:
    """Train on the batches."""
    job, mesh = built
    for step, batch in enumerate(batches, start=1):
        rows = [_batch(microbatch, step) for microbatch in work.share(batch)]
        watch.begin()
        result = training_step(job, rows, mesh, MAX_NORM)
        watch.end()
        watch.took(result.loss, result.grad_norm)


def weights(built: Built) -> Iterable[torch.Tensor]:
    """Return what this rank holds of the weights."""
    return built[0].pm.stored()


def _batch(rows: Rows, step: int) -> Batch:
    ids, labels = rows["input_ids"], F.pad(rows["labels"][:, 1:], (0, 1), value=IGNORED)
    documents = torch.zeros_like(ids)
    if "position_ids" in rows:
        documents = (rows["position_ids"] == 0).cumsum(1) - 1
    return Batch(ids, labels, documents, tuple(range(ROWS)), step)
