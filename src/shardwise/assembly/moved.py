"""The state of a running pipeline whose layers move between its ranks, from memory to memory.

The ranks of a pipeline with the same place along every other axis hold the same shards of
whatever layers they have. So a layer moves as what one rank holds of it: weights, buffers and
optimizer states go from that rank to one other, as bytes, and nothing is gathered. The embedding
and the head never move; a weight that both ends hold is there already, with its states.
"""

from bisect import bisect_right
from collections.abc import Callable, Collection, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn

from shardwise.assembly.build import Job
from shardwise.assembly.state import portable_tensors
from shardwise.base.interfaces import Mesh
from shardwise.base.process.watchdog import beat
from shardwise.base.schedule.orders import Pipeline
from shardwise.config import Lora, RunConfig
from shardwise.parallel.place import local
from shardwise.parallel.reduce import from_every_rank

Described = Mapping[int, Sequence[tuple[str, torch.Size, torch.dtype]]]
"""The tensors of layers that leave a rank, by the layers' numbers."""


class MovedState:
    """Tensors of its new layers that this rank holds: see `interfaces.State`.

    On a GPU the tensors wait in CPU memory, so that the device never holds two models. A weight or
    optimizer state is released as soon as it is read.
    """

    def __init__(self, job: Job, cfg: RunConfig, step: int) -> None:
        """Take what this rank holds of a job, after `step` steps."""
        has_folder = cfg.lora is not None and cfg.lora.path is not None
        self.step = step
        self.loss_scale = job.loss_scale.state_dict()
        self.lora: Lora | None = job.run.lora if has_folder else None
        self.moved_bytes = 0
        """The bytes that have moved between the ranks of this pipeline."""
        portable = portable_tensors(job.pm, job.optimizer, trained_only=False)
        self._tensors = {key: _aside(local(tensor)) for key, tensor in portable}

    @property
    def keys(self) -> Collection[str]:
        """The keys of the tensors: all that this rank has."""
        return self._keys

    def check(self, model: nn.Module, cfg: RunConfig, selected: Collection[str]) -> None:
        """Check nothing: it is the same run of the same model."""

    def read(self, key: str, portable: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Fill this rank's part."""
        target = portable()
        values = self._tensors[key] if key.startswith("buffers/") else self._tensors.pop(key)
        held = local(target)
        assert (held.shape, held.dtype) == (values.shape, values.dtype), key
        held.copy_(values)
        return target

    def move(self, job: Job, mesh: Mesh, boundaries: Sequence[int]) -> None:
        """Let each layer go to the rank that has it under the new boundaries.

        A collective of the ranks of each pipeline. Some 100 bytes for each tensor go from every
        rank to all; then the bytes of each layer that moves go to one rank.
        """
        assert job.cut is not None
        pipeline, group, here = job.cut.pipeline, mesh.group("pp"), mesh.rank("pp")
        before, after = (_owners(b, pipeline) for b in (job.cut.split.boundaries, boundaries))
        leaving: dict[int, list[str]] = {}
        for number, layer in enumerate(job.run.spec.layers):
            if before[number] == here != after[number]:
                prefix = f"{layer.name}."
                names = ((key, key.partition("/")[2]) for key in self._tensors)
                leaving[number] = [key for key, name in names if name.startswith(prefix)]
        described: list[Described] = from_every_rank(
            {n: [self._describe(key) for key in keys] for n, keys in leaving.items()}, group
        )
        for number, (source, target) in enumerate(zip(before, after, strict=True)):
            for key, shape, dtype in described[source].get(number, ()):
                if here == source:
                    tensor = self._tensors.pop(key).to(mesh.device).contiguous()
                    dist.send(_bytes(tensor), group=group, group_dst=target)
                elif here == target:
                    tensor = torch.empty(shape, dtype=dtype, device=mesh.device)
                    dist.recv(_bytes(tensor), group=group, group_src=source)
                    self._tensors[key] = _aside(tensor)
                self.moved_bytes += shape.numel() * dtype.itemsize
                beat()
        self._keys = frozenset(self._tensors)

    def _describe(self, key: str) -> tuple[str, torch.Size, torch.dtype]:
        tensor = self._tensors[key]
        return key, tensor.shape, tensor.dtype


def _owners(boundaries: Sequence[int], pipeline: Pipeline) -> list[int]:
    """Return the rank of each layer; unit 0 is the embedding, and the last one the head."""
    chunks = (bisect_right(boundaries, unit) - 1 for unit in range(1, boundaries[-1] - 1))
    return [pipeline.rank_of(chunk) for chunk in chunks]


def _aside(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu()


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a contiguous tensor; not every backend knows every dtype."""
    return tensor.view(-1).view(torch.uint8)
