"""Measure the messages of this machine's processes for `shardwise calibrate`."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from shardwise.parallel.reduce import of_every_rank
from shardwise.planner.calibration import Collective
from shardwise.process.watchdog import beat

MESSAGE_BYTES = (2**10, 2**14, 2**17, 2**20, 2**23, 2**25)
ROUNDS = 5
COMPUTING = 0.005
"""Seconds of computing between two messages: about a layer of a small model."""
STRETCHES = 20
TENSORS_OF_LAYER = 24
"""About eight linears with their adapters."""


def median_seconds(work: Callable[[], Any], rounds: int = ROUNDS) -> float:
    """Return the median seconds of a function, which runs once before."""
    work()
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


class Rhythm:
    """Measures messages as they fall in training: between stretches of computing.

    A message right after another one costs less: the ranks come together, and caches hold its data.
    """

    def __init__(self, seconds: float) -> None:
        self._x, self._w = torch.randn(256, 512), torch.randn(512, 512)
        self._products = max(
            1, round(seconds / median_seconds(partial(torch.mm, self._x, self._w)))
        )
        # Ranks that counted differently would wait for one another.
        self._products = min(of_every_rank(self._products))
        self.seconds = self._seconds_each(lambda: None, STRETCHES)

    def message_seconds(self, message: Callable[[], Any], stretches: int) -> float:
        """Return what one message adds to a stretch of computing, on the rank that it costs most.

        Every rank must call this, with the same kind of message.
        """
        added = [
            self._seconds_each(message, stretches) - self._seconds_each(lambda: None, stretches)
            for _ in range(ROUNDS)
        ]
        return max(of_every_rank(max(1e-6, statistics.median(added))))

    def _seconds_each(self, message: Callable[[], Any], stretches: int) -> float:
        dist.barrier()
        start = time.perf_counter()
        for _ in range(stretches):
            for _ in range(self._products):
                torch.mm(self._x, self._w)
            message()
        beat()
        return (time.perf_counter() - start) / stretches


def collectives() -> Iterator[Collective]:
    """Yield the seconds of every collective over sizes of whole tensors: among all ranks, and among
    neighbours of each number that divides them, all of which send at a time.
    """
    num_ranks = dist.get_world_size()
    if num_ranks == 1:
        return
    rhythm = Rhythm(COMPUTING)
    for n in range(2, num_ranks + 1):
        if num_ranks % n == 0:
            yield from _among(n, rhythm)


def _among(n: int, rhythm: Rhythm) -> Iterator[Collective]:
    shape = dist.get_world_size() // n, n
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("others", "neighbours"))["neighbours"]
    group = mesh.get_group()
    for num_bytes in MESSAGE_BYTES:
        complete = torch.zeros(num_bytes // 4)
        shards = torch.zeros(num_bytes // 4 // n * n)
        part = shards[: len(shards) // n]
        into = torch.zeros_like(shards)
        kinds: dict[str, Callable[[], Any]] = {
            "all-reduce": partial(_sum, complete, group),
            "all-gather": partial(dist.all_gather_single, into, part, group=group),
            "all-gather of weights": partial(_gather, _sharded_layer(num_bytes, mesh)),
            "reduce-scatter": partial(
                dist.reduce_scatter_single, part.clone(), shards, group=group
            ),
            "reduce-scatter of weights": partial(_scatter_layer, shards, n, group),
            "all-to-all": partial(dist.all_to_all_single, into, shards, group=group),
            "broadcast": partial(dist.broadcast, complete, group=group, group_src=0),
            "reduce": partial(dist.reduce, complete, group=group, group_dst=0),
            "send": partial(_transfer, complete, group, is_two_way=False),
            "exchange": partial(_transfer, complete, group, is_two_way=True),
        }
        stretches = STRETCHES if num_bytes < 2**23 else STRETCHES // 5
        for kind, message in kinds.items():
            seconds = rhythm.message_seconds(message, stretches)
            # A pipeline's ranks send to one other rank, however many they are.
            yield Collective(kind, 2 if kind == "send" else n, num_bytes, seconds)


def jitter() -> float:
    """Return the seconds that a rank waits for others per second of computing.

    Ranks with equal work do not end together: the longer they compute, the longer one waits.
    """
    if dist.get_world_size() == 1:
        return 0.0
    tiny = torch.zeros(8)
    short, long = (Rhythm(seconds) for seconds in (COMPUTING, 8 * COMPUTING))
    waits = [rhythm.message_seconds(partial(_sum, tiny), STRETCHES) for rhythm in (short, long)]
    return max(0.0, (waits[1] - waits[0]) / (long.seconds - short.seconds))


def _sum(tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Add up a copy, as tensor parallelism does, which needs both."""
    dist.all_reduce(tensor.clone(), group=group)


def _sharded_layer(num_bytes: int, mesh: DeviceMesh) -> FSDPModule:
    """Return a layer of FSDP whose weights have so many bytes, in as many tensors as with LoRA."""
    size = max(1, num_bytes // 4 // TENSORS_OF_LAYER)
    tensors = [
        nn.Parameter(torch.zeros(size), requires_grad=False) for _ in range(TENSORS_OF_LAYER)
    ]
    layer = nn.ParameterList(tensors)
    return fully_shard(layer, mesh=mesh)


def _gather(layer: FSDPModule) -> None:
    """Do what FSDP does with a layer: copy, gather and copy its shards, and free the weights."""
    layer.unshard()
    layer.reshard()


def _scatter_layer(gradients: torch.Tensor, num_ranks: int, group: dist.ProcessGroup) -> None:
    """Do what FSDP does with a layer's gradients: they are copied and reduced into a new shard."""
    copied = gradients.clone()
    dist.reduce_scatter_single(copied.new_empty(len(copied) // num_ranks), copied, group=group)


def _transfer(tensor: torch.Tensor, group: dist.ProcessGroup, is_two_way: bool) -> None:
    """Send from rank 0 to rank 1, as pipelines do, or both ways, as context parallelism does.

    Other ranks do nothing.
    """
    rank = dist.get_rank(group)
    if rank > 1:
        return
    transfers = []
    if rank == 0 or is_two_way:
        transfers.append(dist.P2POp(dist.isend, tensor, group=group, group_peer=1 - rank))
    if rank == 1 or is_two_way:
        received = torch.empty_like(tensor)
        transfers.append(dist.P2POp(dist.irecv, received, group=group, group_peer=1 - rank))
    for work in dist.batch_isend_irecv(transfers):
        work.wait()
