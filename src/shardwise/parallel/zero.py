"""ZeRO stages 1 and 2: every rank holds all weights and 1/n of the optimizer's states.

The optimizer works on shards: DTensors along the replicas that are views into the complete weights,
so that they take no memory of their own. Gradients reach them by reduce-scatter: (n-1)/n of their
float32 bytes leave each rank. After the optimizer's step an all-gather sends what each rank has
updated to all others: (n-1)/n of the trained weights' bytes. Together that is what one all-reduce
of ddp moves. Where tensor parallelism has sharded a weight, ZeRO shards it along another dim. What
has no other dim (biases, rates per head) is not sharded, and its gradient is all-reduced.

zero1: complete gradients add up over a step's micro-batches and are reduce-scattered once, after
the last backward. zero2: a bucket of gradients is reduce-scattered in each backward as soon as its
last one is there, added to the shards' gradients and freed. So each rank keeps 1/n of the gradients
too, and the bytes are sent once per micro-batch.
Source: Rajbhandari et al., "ZeRO", arXiv 1910.02054 (P_os and P_os+g).
"""

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from shardwise.base.interfaces import Mesh, ParallelModel
from shardwise.parallel.place import axes_of, cut, free_dim, local, placed, placed_like
from shardwise.parallel.reduce import all_gather, reduce_scatter, sum_over_copies

BUCKET_BYTES = 25 * 2**20
"""Gradients that share a collective: enough to use the links well, little beside a model."""


@dataclass(frozen=True)
class Trained:
    """A trained parameter on this rank."""

    whole: nn.Parameter
    shard: nn.Parameter
    """A DTensor, whose local tensor is a view into that of `whole`."""
    dim: int
    """The dim that is sharded."""


@dataclass
class Bucket:
    """Parameters of one dtype whose gradients are reduced, and whose updates gathered, together."""

    group: dist.ProcessGroup
    entries: list[Trained] = field(default_factory=list)
    arrived: int = 0
    """Gradients of the backward under way that are there."""

    def cuts(self, wholes: Iterable[torch.Tensor]) -> list[tuple[torch.Tensor, ...]]:
        """Return each rank's pieces of tensors that are like the entries' complete ones."""
        size = self.group.size()
        by_entry = [cut(whole, e.dim, size) for whole, e in zip(wholes, self.entries)]
        return list(zip(*by_entry))

    @cached_property
    def offsets(self) -> list[int]:
        """Where each entry begins in a rank's row of a buffer, and where the row ends.

        The first rank's piece of an entry is the largest, so each piece has room for that one.
        """
        first, *_ = self.cuts(local(entry.whole) for entry in self.entries)
        return list(accumulate((piece.numel() for piece in first), initial=0))

    def places(self, row: torch.Tensor, pieces: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return views into a row of a buffer, one for each of a rank's pieces."""
        return [
            row[offset : offset + piece.numel()].view(piece.shape)
            for offset, piece in zip(self.offsets, pieces)
        ]


@dataclass
class Shards:
    """All buckets of a model, and the reduction that may be under way."""

    buckets: list[Bucket]
    pending: list[tuple[Bucket, torch.Tensor, dist.Work]] = field(default_factory=list)

    def arrive(self, index: int) -> None:
        """Count a gradient in the backward of zero2; a bucket's last one starts its reduction."""
        bucket = self.buckets[index]
        bucket.arrived = (bucket.arrived + 1) % len(bucket.entries)
        if not bucket.arrived:
            self.reduce(bucket)

    def reduce(self, bucket: Bucket) -> None:
        """Start the reduce-scatter of a bucket's complete gradients, in float32, and free them."""
        self.finish()  # One is under way at most, which overlaps with the backward.
        gradients = [local(e.whole.grad) for e in bucket.entries if e.whole.grad is not None]
        assert len(gradients) == len(bucket.entries), "a trained parameter has no gradient"
        shape = bucket.group.size(), bucket.offsets[-1]
        buffer = torch.empty(shape, dtype=torch.float32, device=gradients[0].device)
        for row, pieces in zip(buffer, bucket.cuts(gradients)):
            torch._foreach_copy_(bucket.places(row, pieces), pieces)
        for entry in bucket.entries:
            entry.whole.grad = None
        del gradients, pieces  # the last references to them
        summed = torch.empty_like(buffer[0])
        # Row r of every rank's buffer goes to rank r and is added up. Padding is never read.
        work = reduce_scatter(summed, buffer.view(-1), group=bucket.group, async_op=True)
        assert work is not None
        self.pending.append((bucket, summed, work))

    @torch.no_grad()
    def finish(self) -> None:
        """Wait for the reduction under way and add its sums to the gradients of the shards."""
        for bucket, summed, work in self.pending:
            work.wait()
            sums = bucket.places(summed, [local(entry.shard) for entry in bucket.entries])
            kept = [e.shard.grad for e in bucket.entries if e.shard.grad is not None]
            if kept:  # all of them, from an earlier micro-batch
                torch._foreach_add_([local(gradient) for gradient in kept], sums)
                continue
            for entry, shard_sum in zip(bucket.entries, sums):
                dtype = entry.shard.grad_dtype or shard_sum.dtype
                first = shard_sum.to(dtype, copy=True)
                entry.shard.grad = placed_like(entry.shard, first)
        self.pending.clear()

    def finish_backward(self) -> None:
        """Wait for the last bucket of zero2, after the last backward."""
        for bucket in self.buckets:
            assert not bucket.arrived, "a trained parameter has no gradient"
        self.finish()

    def reduce_all(self) -> None:
        """Reduce every bucket of zero1 in turn, after the last backward."""
        for bucket in self.buckets:
            self.reduce(bucket)
        self.finish()

    @torch.no_grad()
    def gather(self) -> None:
        """Send the shards that each rank has updated to the complete weights of all ranks."""
        for bucket in self.buckets:
            updated = local(bucket.entries[0].whole).new_empty(bucket.offsets[-1])
            pieces = [local(entry.shard) for entry in bucket.entries]
            torch._foreach_copy_(bucket.places(updated, pieces), pieces)
            buffer = updated.new_empty(bucket.group.size(), len(updated))
            # Each rank's row goes to all others, in the weights' dtype.
            all_gather(buffer.view(-1), updated, group=bucket.group)
            wholes = [local(entry.whole.detach()) for entry in bucket.entries]
            for row, pieces in zip(buffer, bucket.cuts(wholes)):
                torch._foreach_copy_(pieces, bucket.places(row, pieces))


def apply(pm: ParallelModel, mesh: Mesh, in_backward: bool) -> ParallelModel:
    """Give the optimizer shards of the loaded weights, and keep both in step.

    `in_backward`: whether each backward reduces its gradients.
    """
    sharded: dict[str, Trained] = {}
    replicated: list[nn.Parameter] = []
    for name, parameter in pm.trained().items():
        dim = free_dim(parameter, mesh.size(_axis(parameter, mesh)))
        if dim is None:
            replicated.append(parameter)
        else:
            sharded[name] = _trained(parameter, dim, mesh)
    # A backward makes gradients in the reverse order of the model.
    shards = Shards(_buckets(reversed(sharded.values()), mesh))
    by_name = {name: entry.shard for name, entry in sharded.items()}

    def make_optimizer(named: Sequence[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        optimizer = pm.make_optimizer([(name, by_name.get(name, p)) for name, p in named])
        optimizer.register_step_post_hook(lambda *_: shards.gather())
        return optimizer

    def reduce() -> None:
        shards.reduce_all()
        sum_over_copies(replicated, mesh)

    split = replace(pm, make_optimizer=make_optimizer, shards=by_name)
    if not in_backward:
        return replace(split, reduce_grads=(*pm.reduce_grads, reduce))
    assert not replicated, "only tensor parallelism leaves some, with which zero2 is refused"
    # A hook that leads to its own parameter would keep it alive for ever. `reduce_grads` has these.
    known = weakref.proxy(shards)
    for i, entry in [(i, e) for i, bucket in enumerate(shards.buckets) for e in bucket.entries]:
        entry.whole.register_post_accumulate_grad_hook(lambda _, i=i: known.arrive(i))
    return replace(split, reduce_grads=(*pm.reduce_grads, shards.finish_backward))


def _trained(whole: nn.Parameter, dim: int, mesh: Mesh) -> Trained:
    axis = _axis(whole, mesh)
    # Tensor or expert parallelism may have sharded it along other dims.
    placements = whole.placements if isinstance(whole, DTensor) else ()
    shard = cut(local(whole.detach()), dim, mesh.size(axis))[mesh.rank(axis)]
    sharded = placed(
        shard, mesh.along(axis, *axes_of(whole)), [Shard(dim), *placements], whole.shape
    )
    return Trained(whole, nn.Parameter(sharded), dim)


def _axis(whole: nn.Parameter, mesh: Mesh) -> str:
    """Return the axis over which a weight's states are sharded."""
    return mesh.data_axis(axes_of(whole))


def _buckets(trained: Iterable[Trained], mesh: Mesh) -> list[Bucket]:
    """Return buckets of at most BUCKET_BYTES, or of one larger parameter, of one dtype and axis."""
    buckets: list[Bucket] = []
    filling: dict[tuple[torch.dtype, str], Bucket] = {}
    for entry in trained:
        key = entry.whole.dtype, _axis(entry.whole, mesh)
        entries = [*filling[key].entries, entry] if key in filling else []
        if not entries or sum(local(e.whole).nbytes for e in entries) > BUCKET_BYTES:
            filling[key] = Bucket(mesh.group(key[1]))
            buckets.append(filling[key])
        filling[key].entries.append(entry)
    return buckets
