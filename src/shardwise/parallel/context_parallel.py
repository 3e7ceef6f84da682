"""Context parallelism: each rank computes some tokens of every row.

Rows are cut after labels were shifted and documents numbered: rank r of n has the tokens r T/n to
(r + 1) T/n - 1. What works token by token needs nothing of the others. Memory per rank: all that
other axes leave of the weights, and 1/n of the activations. Communication per micro-batch and layer
(docs/concepts/context.md): attention gathers keys and values, a convolution over W tokens sends W -
1 of them to the next rank, and a recurrent core gathers an affine map of its state. Gradients of
weights are partial sums, which the data-parallel strategy adds up over `cp` too (decision 040).
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist

from shardwise.config import RunConfig
from shardwise.interfaces import AnyBatch, Batch, Mesh, ParallelModel
from shardwise.models.causal_lm import CausalLM
from shardwise.models.patches.cores import use_attention
from shardwise.models.spec import ModelSpec
from shardwise.parallel.gathered_attention import attention
from shardwise.parallel.neighbours import ContextNeighbours
from shardwise.parallel.reduce import sum_gradients


def apply(pm: ParallelModel, mesh: Mesh, cfg: RunConfig, spec: ModelSpec) -> ParallelModel:
    """Let every part compute this rank's tokens of its rows."""
    group = mesh.group("cp")
    for part in pm.parts:
        assert isinstance(part, CausalLM)
        use_attention(part.hf, part.spec, part.tokens, attention)
    isolated = cfg.data.keeps_documents_apart

    def cut(batch: AnyBatch) -> Batch:
        assert isinstance(batch, Batch)
        return tokens_of(batch, group, isolated)

    pm = replace(pm, shard_batch=(*pm.shard_batch, cut))
    if cfg.parallel.data != "single":
        return pm

    def reduce() -> None:
        # No data-parallel strategy does: gradients go to all ranks of `cp`, once a step.
        sum_gradients(pm.trained().values(), mesh, (mesh.replicas,))

    return replace(pm, reduce_grads=(*pm.reduce_grads, reduce))


def tokens_of(batch: Batch, group: dist.ProcessGroup, isolated: bool) -> Batch:
    """Return this rank's tokens of the complete rows of a batch; nothing is sent."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    num_rows, length = batch.input_ids.shape
    assert length % size == 0, f"a rule refuses rows of {length} tokens on {size} ranks"
    places = torch.arange(length, device=batch.device).expand(num_rows, -1)

    def share(x: torch.Tensor) -> torch.Tensor:
        return x.chunk(size, 1)[rank].contiguous()

    return replace(
        batch,
        input_ids=share(batch.input_ids),
        labels=share(batch.labels),
        document_ids=share(batch.document_ids),
        positions=share(places),
        neighbours=ContextNeighbours(group, batch.document_ids, isolated),
    )
