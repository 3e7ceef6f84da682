"""Measure the messages of this machine's processes for `shardwise calibrate`."""

import statistics
from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from shardwise.base.process.watchdog import beat
from shardwise.lab.planner.calibration import LEAST_SECONDS, Collective
from shardwise.metrics.stopwatch import ROUNDS, Stopwatch
from shardwise.parallel.reduce import all_gather, from_every_rank, reduce_scatter

MESSAGE_BYTES = {
    "cpu": (2**10, 2**14, 2**17, 2**20, 2**23, 2**25),
    "cuda": (2**10, 2**16, 2**20, 2**23, 2**26, 2**28),
}
"""The sizes of whole tensors, for each type of device."""
COMPUTED = {"cpu": (256, 512, 512), "cuda": (4096, 4096, 4096)}
"""Rows, inner size and columns of the products between two messages."""
COMPUTING = {"cpu": 0.005, "cuda": 0.0005}
"""Seconds of computing between two messages: about a layer of a small model."""
STRETCHES = {"cpu": 20, "cuda": 400}
"""A GPU needs more of them, since a short message is a small part of what it is added to."""
TENSORS_OF_LAYER = 24
"""About eight linears with their adapters."""


class Rhythm:
    """Measures messages as they fall in training: between stretches of computing.

    A message right after another one costs less: the ranks come together, and caches hold its data.
    """

    def __init__(self, device: torch.device, seconds: float) -> None:
        rows, inner, columns = COMPUTED[device.type]
        self._x = torch.randn(rows, inner, device=device)
        self._w = torch.randn(inner, columns, device=device)
        self._watch = Stopwatch(device)
        product_seconds = self._watch.median_seconds(partial(torch.mm, self._x, self._w))
        self._products = max(1, round(seconds / product_seconds))
        # Ranks that counted differently would wait for one another.
        self._products = min(from_every_rank(self._products))
        self.stretches = STRETCHES[device.type]
        self.seconds = self._seconds_each(lambda: None, self.stretches)

    def message_seconds(self, message: Callable[[], Any], stretches: int) -> float:
        """Return what one message adds to a stretch of computing, on the rank that it costs most.

        Every rank must call this, with the same kind of message.
        """
        added = [
            self._seconds_each(message, stretches) - self._seconds_each(lambda: None, stretches)
            for _ in range(ROUNDS)
        ]
        return max(from_every_rank(max(LEAST_SECONDS, statistics.median(added))))

    def _seconds_each(self, message: Callable[[], Any], stretches: int) -> float:
        seconds: list[float] = []
        dist.barrier()
        with self._watch.taking(seconds):
            for _ in range(stretches):
                for _ in range(self._products):
                    torch.mm(self._x, self._w)
                _ = message()  # lives until the next one
        beat()
        return seconds[0] / stretches


def collectives(device: torch.device) -> Iterator[Collective]:
    """Yield the seconds of every collective over sizes of whole tensors: among all ranks, and among
    neighbours of each number that divides them, all of which send at a time.
    """
    num_ranks = dist.get_world_size()
    if num_ranks == 1:
        return
    rhythm = Rhythm(device, COMPUTING[device.type])
    for n in range(2, num_ranks + 1):
        if num_ranks % n == 0:
            yield from _among(n, rhythm, device)


def _among(n: int, rhythm: Rhythm, device: torch.device) -> Iterator[Collective]:
    shape = dist.get_world_size() // n, n
    meshes = init_device_mesh(device.type, shape, mesh_dim_names=("others", "neighbours"))
    mesh = meshes["neighbours"]
    group = mesh.get_group()
    for num_bytes in MESSAGE_BYTES[device.type]:
        complete = torch.zeros(num_bytes // 4, device=device)
        shards = torch.zeros(num_bytes // 4 // n * n, device=device)
        part = shards[: len(shards) // n]
        into = torch.zeros_like(shards)
        kinds: dict[str, Callable[[], Any]] = {
            "all-reduce": partial(_sum, complete, group),
            "all-gather": partial(all_gather, into, part, group=group),
            "all-gather of weights": partial(_gather, _sharded_layer(num_bytes, mesh)),
            "reduce-scatter": partial(reduce_scatter, part.clone(), shards, group=group),
            "reduce-scatter of weights": partial(_scatter_layer, shards, n, group),
            "all-to-all": partial(dist.all_to_all_single, into, shards, group=group),
            "broadcast": partial(dist.broadcast, complete, group=group, group_src=0),
            "reduce": partial(dist.reduce, complete, group=group, group_dst=0),
            "send": partial(transfer, complete, {0}, group),
            "exchange": partial(transfer, complete, {0, 1}, group),
        }
        stretches = rhythm.stretches if num_bytes < 2**23 else rhythm.stretches // 5
        for kind, message in kinds.items():
            seconds = rhythm.message_seconds(message, stretches)
            # A pipeline's ranks send to one other rank, however many they are.
            yield Collective(kind, 2 if kind == "send" else n, num_bytes, seconds)


def jitter(device: torch.device) -> float:
    """Return the seconds that a rank waits for others per second of computing.

    Ranks with equal work do not end together: the longer they compute, the longer one waits.
    """
    if dist.get_world_size() == 1:
        return 0.0
    tiny = torch.zeros(8, device=device)
    short, long = (Rhythm(device, times * COMPUTING[device.type]) for times in (1, 8))
    waits = [
        rhythm.message_seconds(partial(_sum, tiny), rhythm.stretches) for rhythm in (short, long)
    ]
    return max(0.0, (waits[1] - waits[0]) / (long.seconds - short.seconds))


def _sum(tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Add up a copy, as tensor parallelism does, which needs both."""
    dist.all_reduce(tensor.clone(), group=group)


def _sharded_layer(num_bytes: int, mesh: DeviceMesh) -> FSDPModule:
    """Return a layer of FSDP whose weights have so many bytes, in as many tensors as with LoRA."""
    size = max(1, num_bytes // 4 // TENSORS_OF_LAYER)
    layer = nn.ParameterList(
        nn.Parameter(torch.zeros(size, device=mesh.device_type), requires_grad=False)
        for _ in range(TENSORS_OF_LAYER)
    )
    return fully_shard(layer, mesh=mesh)


def _gather(layer: FSDPModule) -> None:
    """Do what FSDP does with a layer: copy, gather and copy its shards, and free the weights."""
    layer.unshard()
    layer.reshard()


def _scatter_layer(gradients: torch.Tensor, num_ranks: int, group: dist.ProcessGroup) -> None:
    """Do what FSDP does with a layer's gradients: they are copied and reduced into a new shard."""
    copied = gradients.clone()
    reduce_scatter(copied.new_empty(len(copied) // num_ranks), copied, group=group)


def transfer(
    tensor: torch.Tensor,
    senders: Collection[int],
    group: dist.ProcessGroup | None = None,
    into: torch.Tensor | None = None,
) -> list[dist.Work]:
    """Send from ranks 0 and 1 to one another: from one, as pipelines do, or from both, as context
    parallelism does. Other ranks do nothing. `into`: what receives, by default new memory.

    Returns what it waited for: who frees that at once waits for gloo's thread, on a machine that
    does other work for milliseconds.
    """
    rank = dist.get_rank(group)
    if rank > 1:
        return []
    transfers = []
    if rank in senders:
        transfers.append(dist.P2POp(dist.isend, tensor, group=group, group_peer=1 - rank))
    if 1 - rank in senders:
        received = torch.empty_like(tensor) if into is None else into
        transfers.append(dist.P2POp(dist.irecv, received, group=group, group_peer=1 - rank))
    works = dist.batch_isend_irecv(transfers)
    for work in works:
        work.wait()
    return works
