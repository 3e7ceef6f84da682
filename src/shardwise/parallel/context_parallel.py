"""Context parallelism: each rank computes some tokens of every row.

Rows are cut after labels were shifted and documents numbered: rank r of n has the tokens r T/n to
(r + 1) T/n - 1 or, where all layers that mix tokens are attention, the chunks r and 2n - 1 - r of
2n (schedule/context.py). What works token by token needs nothing of the others. Memory per rank:
all that other axes leave of the weights, and 1/n of the activations. Communication per micro-batch
and layer (docs/concepts/context.md): attention sends keys and values, a convolution over W tokens
sends W - 1 of them to the next rank, and a recurrent core sends affine maps of its state.
Gradients of weights are partial sums, which the data-parallel strategy adds up over `cp` too
(decision 050).
"""

from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist

from shardwise.base.batches import AnyBatch, Batch, OnHost
from shardwise.base.interfaces import Mesh, ParallelModel
from shardwise.base.layouts import strategy_facts
from shardwise.base.schedule.context import TokenSplit
from shardwise.config import RunConfig
from shardwise.models.causal_lm import CausalLM
from shardwise.models.facts import context_facts
from shardwise.models.patches.cores import use_attention
from shardwise.models.spec import ModelSpec
from shardwise.parallel.context_attention import ContextAttention
from shardwise.parallel.context_exchange import ranges_of
from shardwise.parallel.neighbours import ContextNeighbours
from shardwise.parallel.reduce import sum_over_copies


def apply(pm: ParallelModel, mesh: Mesh, cfg: RunConfig, spec: ModelSpec) -> ParallelModel:
    """Let every part compute this rank's tokens of its rows."""
    group = mesh.group("cp")
    parts = [part for part in pm.parts if isinstance(part, CausalLM)]
    facts = context_facts(parts[0].hf, spec)
    way, cut = facts.way_and_cut(cfg.parallel)
    attention = ContextAttention(group, cut, way)
    for part in parts:
        use_attention(part.hf, part.spec, part.tokens, attention.for_mixer)
    isolated = cfg.data.keeps_documents_apart

    def shard(batch: AnyBatch) -> Batch:
        assert isinstance(batch, Batch)
        return tokens_of(batch, group, cut, isolated)

    pm = replace(pm, shard_batch=(*pm.shard_batch, shard))
    if strategy_facts(cfg.parallel).axis is not None:
        return pm

    def reduce() -> None:
        # No data-parallel strategy does: gradients go to all ranks of `cp`, once a step.
        sum_over_copies(pm.trained().values(), mesh)

    return replace(pm, reduce_grads=(*pm.reduce_grads, reduce))


def tokens_of(batch: Batch, group: dist.ProcessGroup, cut: TokenSplit, isolated: bool) -> Batch:
    """Return this rank's tokens of the complete rows of a batch; nothing is sent."""
    num_rows, length = batch.input_ids.shape
    num_chunks = cut.num_ranks * cut.chunks_per_rank
    assert length % num_chunks == 0, f"a rule refuses rows of {length} tokens in {num_chunks} parts"
    places = torch.arange(length, device=batch.device).expand(num_rows, -1)
    stretches = ranges_of(cut.chunks(dist.get_rank(group)), length // num_chunks)

    def share(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x[:, part.start : part.stop] for part in stretches], 1)

    labels, document_ids, on_host = share(batch.labels), share(batch.document_ids), None
    if batch.on_host is not None:  # so the host does not wait to find this rank's targets
        columns = np.concatenate(stretches)
        arrays = batch.on_host.labels_array, batch.on_host.documents_array
        on_host = OnHost.of(labels, arrays[0][:, columns], document_ids, arrays[1][:, columns])
    return replace(
        batch,
        on_host=on_host,
        input_ids=share(batch.input_ids),
        labels=labels,
        document_ids=document_ids,
        positions=share(places),
        neighbours=ContextNeighbours(group, batch.document_ids, isolated),
    )
