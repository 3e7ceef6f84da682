"""Context parallelism: each rank computes some tokens of every row.

Rows are cut after labels were shifted and documents numbered: rank r of n has the tokens r T/n to
(r + 1) T/n - 1 or, where all layers that mix tokens are attention, the chunks r and 2n - 1 - r of
2n (schedule/context.py). What works token by token needs nothing of the others. Memory per rank:
all that other axes leave of the weights, and 1/n of the activations. Communication per micro-batch
and layer (docs/concepts/context.md): attention sends keys and values, a convolution over W tokens
sends W - 1 of them to the next rank, and a recurrent core gathers an affine map of its state.
Gradients of weights are partial sums, which the data-parallel strategy adds up over `cp` too
(decision 040).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardwise.config import RunConfig
from shardwise.interfaces import AnyBatch, Batch, Mesh, ParallelModel
from shardwise.kernels.attention import Sight, attend
from shardwise.kernels.recurrence import Tokens
from shardwise.models.causal_lm import CausalLM
from shardwise.models.facts import context_facts
from shardwise.models.patches.cores import Attention, use_attention
from shardwise.models.spec import ModelSpec
from shardwise.parallel.context_attention import ContextAttention
from shardwise.parallel.neighbours import ContextNeighbours
from shardwise.parallel.reduce import sum_gradients
from shardwise.schedule.context import Cut


def apply(pm: ParallelModel, mesh: Mesh, cfg: RunConfig, spec: ModelSpec) -> ParallelModel:
    """Let every part compute this rank's tokens of its rows."""
    group = mesh.group("cp")
    parts = [part for part in pm.parts if isinstance(part, CausalLM)]
    facts = context_facts(parts[0].hf, spec)
    way, cut = facts.way_and_cut(cfg.parallel)
    attention = _attention(ContextAttention(group, cut, way))
    for part in parts:
        use_attention(part.hf, part.spec, part.tokens, attention)
    isolated = cfg.data.keeps_documents_apart

    def shard(batch: AnyBatch) -> Batch:
        assert isinstance(batch, Batch)
        return tokens_of(batch, group, cut, isolated)

    pm = replace(pm, shard_batch=(*pm.shard_batch, shard))
    if cfg.parallel.data != "single":
        return pm

    def reduce() -> None:
        # No data-parallel strategy does: gradients go to all ranks of `cp`, once a step.
        sum_gradients(pm.trained().values(), mesh, (mesh.replicas,))

    return replace(pm, reduce_grads=(*pm.reduce_grads, reduce))


def tokens_of(batch: Batch, group: dist.ProcessGroup, cut: Cut, isolated: bool) -> Batch:
    """Return this rank's tokens of the complete rows of a batch; nothing is sent."""
    num_rows, length = batch.input_ids.shape
    num_chunks = cut.num_ranks * cut.chunks_per_rank
    assert length % num_chunks == 0, f"a rule refuses rows of {length} tokens in {num_chunks} parts"
    places = torch.arange(length, device=batch.device).expand(num_rows, -1)

    def share(x: torch.Tensor) -> torch.Tensor:
        chunks = x.chunk(num_chunks, 1)
        return torch.cat([chunks[i] for i in cut.chunks(dist.get_rank(group))], 1)

    return replace(
        batch,
        input_ids=share(batch.input_ids),
        labels=share(batch.labels),
        document_ids=share(batch.document_ids),
        positions=share(places),
        neighbours=ContextNeighbours(group, batch.document_ids, isolated),
    )


def _attention(context: ContextAttention) -> Attention:
    """Return what takes the place of transformers' attention functions."""

    def attention(
        tokens: Tokens,
        module: nn.Module,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: None,
        dropout: float = 0.0,
        scaling: float | None = None,
        sliding_window: int | None = None,
        **flags: Any,
    ) -> tuple[torch.Tensor, None]:
        """Return [B, T, N, V] of q [B, N, T, H], k [B, K, T, H] and v [B, K, T, V]."""
        assert mask is None
        assert dropout == 0.0, "a rule refuses dropout inside attention"
        device, dtype = q.device.type, v.dtype
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
        q, k, v = (x.to(dtype) for x in (q, k, v))
        scale = q.shape[-1] ** -0.5 if scaling is None else scaling
        with torch.autocast(device, enabled=False):
            if isinstance(tokens.neighbours, ContextNeighbours):
                documents = tokens.neighbours.documents
                out = context(q, k, v, scale, sliding_window, documents)
            else:  # complete rows, of a sample
                ids = tokens.documents
                out, _ = attend(q, k, v, Sight(scale, 0, sliding_window, ids, ids))
        return out.transpose(1, 2).contiguous(), None

    return attention
