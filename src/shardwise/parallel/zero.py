"""ZeRO stages 1 and 2: every rank holds all weights, and 1/n of the optimizer's states (and, in stage 2, of gradients).

The optimizer works on shards: DTensors along `dp_replicate` that are views into the whole weights, so they take no
memory of their own. Gradients reach them by reduce-scatter, (n-1)/n of their float32 bytes leave each rank; what a rank
has updated it hands to all others in an all-gather after the optimizer's step, (n-1)/n of the trained weights' bytes.
Together that is what one all-reduce of ddp moves. Of what tensor parallelism has cut, a shard is 1/n of this rank's
share, along another dim; what has no other dim (biases, rates per head) stays whole, and its gradient is all-reduced.

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
from torch.distributed.tensor import DTensor, Shard

from shardwise.config import RunConfig
from shardwise.interfaces import Mesh, ParallelModel
from shardwise.models.spec import ModelSpec
from shardwise.parallel.place import cut, free_dim, local, placed_like
from shardwise.parallel.reduce import all_gather, reduce_scatter, sum_gradients

BUCKET_BYTES = 25 * 2**20
"""Gradients that share a collective: enough to use the links well, little beside a model."""


@dataclass(frozen=True)
class Trained:
    """A trained parameter on this rank."""

    whole: nn.Parameter
    shard: nn.Parameter  # a DTensor; its local tensor is a view into that of `whole`
    dim: int  # that is cut


@dataclass
class Bucket:
    """Parameters of one dtype whose gradients are reduced, and whose updates are gathered, together."""

    group: dist.ProcessGroup
    entries: list[Trained] = field(default_factory=list)
    arrived: int = 0  # gradients of the backward under way

    def cuts(self, wholes: Iterable[torch.Tensor]) -> list[tuple[torch.Tensor, ...]]:
        """For each rank its pieces of the tensors, which are like the entries' whole ones."""
        return list(
            zip(
                *(
                    cut(whole, entry.dim, self.group.size())
                    for whole, entry in zip(wholes, self.entries)
                )
            )
        )

    def sizes(self) -> list[int]:
        """Elements that each entry takes in a rank's row of a buffer: those of the first rank's piece, the largest."""
        return [
            piece.numel() for piece in self.cuts(local(entry.whole) for entry in self.entries)[0]
        ]

    def places(self, row: torch.Tensor, pieces: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Views into a row of a buffer, one for each of a rank's pieces."""
        offsets = accumulate(self.sizes(), initial=0)
        return [
            row[offset : offset + piece.numel()].view(piece.shape)
            for offset, piece in zip(offsets, pieces)
        ]


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
        gradients = [
            local(entry.whole.grad) for entry in bucket.entries if entry.whole.grad is not None
        ]
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
            for entry, mine in zip(
                bucket.entries, bucket.places(summed, [local(e.shard) for e in bucket.entries])
            ):
                gradient = entry.shard.grad
                if gradient is None:
                    kept = mine.to(entry.shard.grad_dtype or mine.dtype, copy=True)
                    entry.shard.grad = placed_like(entry.shard, kept)
                else:
                    local(gradient).add_(mine)
        self.pending.clear()

    def finish_backward(self) -> None:
        """zero2, after the last backward: wait for its last bucket."""
        assert not any(bucket.arrived for bucket in self.buckets), (
            "a trained parameter has no gradient"
        )
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
            own = local(bucket.entries[0].whole).new_empty(sum(bucket.sizes()))
            pieces = [local(entry.shard) for entry in bucket.entries]
            torch._foreach_copy_(bucket.places(own, pieces), pieces)
            buffer = own.new_empty(bucket.group.size(), len(own))
            # From rank r to all others: its row, in the weights' dtype.
            all_gather(buffer.view(-1), own, group=bucket.group)
            for row, pieces in zip(
                buffer, bucket.cuts(local(entry.whole.detach()) for entry in bucket.entries)
            ):
                torch._foreach_copy_(pieces, bucket.places(row, pieces))


def apply(pm: ParallelModel, mesh: Mesh, cfg: RunConfig, spec: ModelSpec) -> ParallelModel:
    """Give the optimizer shards of the loaded weights, and keep both in step."""
    wholes = {name: p for name, p in pm.named_parameters() if p.requires_grad}
    dims = {name: free_dim(p, mesh.size("dp_replicate")) for name, p in wholes.items()}
    trained = {
        name: _trained(wholes[name], dim, mesh) for name, dim in dims.items() if dim is not None
    }
    left = [wholes[name] for name, dim in dims.items() if dim is None]
    # Gradients come about in the reverse order of the model.
    shards = Shards(_buckets(reversed(trained.values()), mesh.dense.get_group("dp_replicate")))

    def make_optimizer(named: Sequence[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        optimizer = pm.make_optimizer(
            [(name, trained[name].shard if name in trained else p) for name, p in named]
        )
        optimizer.register_step_post_hook(lambda *_: shards.gather())
        return optimizer

    def reduce() -> None:
        shards.reduce_all()
        sum_gradients(left, mesh, ("dp_replicate",))

    if cfg.parallel.data == "zero1":
        return replace(pm, make_optimizer=make_optimizer, reduce_grads=(*pm.reduce_grads, reduce))
    assert not left, "of tensor parallelism, with which zero2 is refused"
    for bucket in shards.buckets:
        for entry in bucket.entries:
            entry.whole.register_post_accumulate_grad_hook(
                lambda _, bucket=bucket: shards.arrive(bucket)
            )
    return replace(
        pm, make_optimizer=make_optimizer, reduce_grads=(*pm.reduce_grads, shards.finish_backward)
    )


def _trained(whole: nn.Parameter, dim: int, mesh: Mesh) -> Trained:
    axes, placements = ("dp_replicate",), [Shard(dim)]
    if isinstance(whole, DTensor):  # along tp
        axes, placements = ("dp_replicate", "tp"), [Shard(dim), *whole.placements]
    own = cut(local(whole.detach()), dim, mesh.size("dp_replicate"))[
        mesh.dense.get_local_rank("dp_replicate")
    ]
    shape, stride = whole.shape, whole.stride()
    placed = DTensor.from_local(
        own, mesh.dense[axes], placements, run_check=False, shape=shape, stride=stride
    )
    return Trained(whole, nn.Parameter(placed), dim)


def _buckets(trained: Iterable[Trained], group: dist.ProcessGroup) -> list[Bucket]:
    buckets: list[Bucket] = []
    filling: dict[torch.dtype, Bucket] = {}
    for entry in trained:
        bucket, held = filling.get(entry.whole.dtype), local(entry.whole).nbytes
        if (
            bucket is None
            or sum(local(e.whole).nbytes for e in bucket.entries) + held > BUCKET_BYTES
        ):
            bucket = filling[entry.whole.dtype] = Bucket(group)
            buckets.append(bucket)
        bucket.entries.append(entry)
    return buckets
