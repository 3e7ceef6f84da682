"""ZeRO stages 1 and 2: every rank holds all weights, and 1/n of the optimizer's states (and, in stage 2, of gradients).

The optimizer works on shards: DTensors along `dp_replicate` that are views into the whole weights, so they take no
memory of their own. Gradients reach them by reduce-scatter, (n-1)/n of their float32 bytes leave each rank; what a rank
has updated it hands to all others in an all-gather after the optimizer's step, (n-1)/n of the trained weights' bytes.
Together that is what one all-reduce of ddp moves.

zero1: whole gradients add up over a step's micro-batches and are reduce-scattered once, after the last backward.
zero2: a bucket of gradients is reduce-scattered in each backward as soon as its last one is there, added to the shards'
gradients and freed, so no rank ever keeps whole gradients; the bytes are sent once per micro-batch.
Source: Rajbhandari et al., "ZeRO", arXiv 1910.02054 (P_os and P_os+g).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from shardwise.config import RunConfig
from shardwise.interfaces import Mesh, ParallelModel
from shardwise.models.spec import ModelSpec
from shardwise.parallel.place import cut, placed_like, shard_dim
from shardwise.parallel.reduce import all_gather, reduce_scatter

BUCKET_BYTES = 25 * 2**20
"""Gradients that share a collective: enough to use the links well, little beside a model."""


@dataclass(frozen=True)
class Trained:
    """A trained parameter on this rank."""

    whole: nn.Parameter
    shard: nn.Parameter  # a DTensor; its local tensor is a view into `whole`
    dim: int  # that is cut

    @property
    def local(self) -> torch.Tensor:
        """The shard as a plain tensor."""
        assert isinstance(self.shard, DTensor)
        return self.shard.to_local()


@dataclass
class Bucket:
    """Parameters of one dtype whose gradients are reduced, and whose updates are gathered, together."""

    group: dist.ProcessGroup
    entries: list[Trained] = field(default_factory=list)
    arrived: int = 0  # gradients of the backward under way

    def cuts(self, wholes: Iterable[torch.Tensor]) -> list[tuple[torch.Tensor, ...]]:
        """For each rank its pieces of the tensors, which are like the entries' whole ones."""
        return list(zip(*(cut(whole, entry.dim, self.group.size()) for whole, entry in zip(wholes, self.entries))))

    def sizes(self) -> list[int]:
        """Elements that each entry takes in a rank's row of a buffer: those of the first rank's piece, the largest."""
        return [piece.numel() for piece in self.cuts(entry.whole for entry in self.entries)[0]]

    def places(self, row: torch.Tensor, pieces: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Views into a row of a buffer, one for each of a rank's pieces."""
        offsets = accumulate(self.sizes(), initial=0)
        return [row[offset : offset + piece.numel()].view(piece.shape) for offset, piece in zip(offsets, pieces)]


@dataclass
class Shards:
    """All buckets of a model, and the one reduction that may be under way."""

    buckets: list[Bucket]
    pending: list[tuple[Bucket, torch.Tensor, dist.Work]] = field(default_factory=list)

    def arrive(self, bucket: Bucket) -> None:
        """zero2, in the backward: one more gradient of this bucket has been added up."""
        bucket.arrived += 1
        if bucket.arrived == len(bucket.entries):
            bucket.arrived = 0
            self.reduce(bucket)

    def reduce(self, bucket: Bucket) -> None:
        """Start the reduce-scatter of a bucket's whole gradients, in float32, and free them."""
        self.finish()  # at most one is under way: it overlaps with the backward up to the next bucket
        gradients = [entry.whole.grad for entry in bucket.entries if entry.whole.grad is not None]
        assert len(gradients) == len(bucket.entries), "a trained parameter has no gradient"
        shape = bucket.group.size(), sum(bucket.sizes())
        buffer = torch.empty(shape, dtype=torch.float32, device=gradients[0].device)
        for row, pieces in zip(buffer, bucket.cuts(gradients)):
            torch._foreach_copy_(bucket.places(row, pieces), pieces)
        for entry in bucket.entries:
            entry.whole.grad = None
        summed = torch.empty_like(buffer[0])
        # To rank r from all others: row r of their buffers, to be added up. What lies in the padding is never read.
        work = reduce_scatter(summed, buffer.view(-1), group=bucket.group, async_op=True)
        assert work is not None
        self.pending.append((bucket, summed, work))

    @torch.no_grad()
    def finish(self) -> None:
        """Wait for the reduction under way and add what came to the gradients of the shards."""
        for bucket, summed, work in self.pending:
            work.wait()
            for entry, mine in zip(bucket.entries, bucket.places(summed, [entry.local for entry in bucket.entries])):
                gradient = entry.shard.grad
                if gradient is None:
                    kept = mine.to(entry.shard.grad_dtype or mine.dtype, copy=True)
                    entry.shard.grad = placed_like(entry.shard, kept)
                else:
                    assert isinstance(gradient, DTensor)
                    gradient.to_local().add_(mine)
        self.pending.clear()

    def finish_backward(self) -> None:
        """zero2, after the last backward: wait for its last bucket."""
        assert not any(bucket.arrived for bucket in self.buckets), "a trained parameter has no gradient"
        self.finish()

    def reduce_all(self) -> None:
        """zero1, after the last backward: every bucket in turn."""
        for bucket in self.buckets:
            self.reduce(bucket)
        self.finish()

    @torch.no_grad()
    def gather(self) -> None:
        """After the optimizer's step: put the shards that each rank has updated into the whole weights of all."""
        for bucket in self.buckets:
            own = bucket.entries[0].whole.new_empty(sum(bucket.sizes()))
            pieces = [entry.local for entry in bucket.entries]
            torch._foreach_copy_(bucket.places(own, pieces), pieces)
            buffer = own.new_empty(bucket.group.size(), len(own))
            # From rank r to all others: its row, in the weights' dtype.
            all_gather(buffer.view(-1), own, group=bucket.group)
            for row, pieces in zip(buffer, bucket.cuts(entry.whole.detach() for entry in bucket.entries)):
                torch._foreach_copy_(pieces, bucket.places(row, pieces))


def apply(pm: ParallelModel, mesh: Mesh, cfg: RunConfig, spec: ModelSpec) -> ParallelModel:
    """Give the optimizer shards of the loaded weights, and keep both in step."""
    trained = {name: _trained(p, mesh.dense["dp_replicate"]) for name, p in pm.named_parameters() if p.requires_grad}
    # Gradients come about in the reverse order of the model.
    shards = Shards(_buckets(reversed(trained.values()), mesh.dense.get_group("dp_replicate")))

    def make_optimizer(named: Sequence[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        optimizer = pm.make_optimizer([(name, trained[name].shard) for name, _ in named])
        optimizer.register_step_post_hook(lambda *_: shards.gather())
        return optimizer

    if cfg.parallel.data == "zero1":
        return replace(pm, make_optimizer=make_optimizer, reduce_grads=(*pm.reduce_grads, shards.reduce_all))
    for bucket in shards.buckets:
        for entry in bucket.entries:
            entry.whole.register_post_accumulate_grad_hook(lambda _, bucket=bucket: shards.arrive(bucket))
    return replace(pm, make_optimizer=make_optimizer, reduce_grads=(*pm.reduce_grads, shards.finish_backward))


def _trained(whole: nn.Parameter, mesh: DeviceMesh) -> Trained:
    dim = shard_dim(whole.shape, mesh.size())
    local = cut(whole.detach(), dim, mesh.size())[mesh.get_local_rank()]
    placed = DTensor.from_local(local, mesh, [Shard(dim)], run_check=False, shape=whole.shape, stride=whole.stride())
    return Trained(whole, nn.Parameter(placed), dim)


def _buckets(trained: Iterable[Trained], group: dist.ProcessGroup) -> list[Bucket]:
    buckets: list[Bucket] = []
    filling: dict[torch.dtype, Bucket] = {}
    for entry in trained:
        bucket = filling.get(entry.whole.dtype)
        if bucket is None or sum(e.whole.nbytes for e in bucket.entries) + entry.whole.nbytes > BUCKET_BYTES:
            bucket = filling[entry.whole.dtype] = Bucket(group)
            buckets.append(bucket)
        bucket.entries.append(entry)
    return buckets
