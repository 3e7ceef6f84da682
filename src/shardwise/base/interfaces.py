"""The nouns that the packages pass to one another.

Shape legend for the whole project: B batch, T tokens, D model width, N query heads, K key/value
heads, H head size, S state size, V vocabulary, F feed-forward width, E experts, R LoRA rank, C
chunk. Mesh dimensions are *axes*, tensor dimensions are *dims*.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Protocol, Self

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise.base.batches import TARGET_TOKENS, AnyBatch, Batch, Objective
from shardwise.base.layouts import AXES, EXPERT_AXES
from shardwise.base.schedule.timeline import Event
from shardwise.config import Lora, RunConfig


@dataclass(frozen=True)
class Mesh:
    """All ranks as a grid with the axes AXES (of size 1 where one is not used).

    Ranks along `dp_replicate` and `dp_shard` read different rows. Ranks along `cp` read the same
    rows and compute different tokens of them, so that their gradients must be added up, as over
    rows. A data-parallel strategy therefore works over data and context together: `cp` is flattened
    into the axis of the strategy, `replica_axis` or `shard_axis`. These are the ranks 0 to 7 with
    dp_shard 2, cp 2 and tp 2:

                              tp 0   tp 1
        dp_shard 0   cp 0       0      1      half of the rows, some of their tokens
                     cp 1       2      3      the same rows, the other tokens
        dp_shard 1   cp 0       4      5      the other rows
                     cp 1       6      7

    The groups of `shard_axis` are 0 2 4 6 and 1 3 5 7: fsdp2 leaves each rank a quarter of its
    share along tp. With `ep` 2, each of the pairs 0 2, 4 6, 1 3 and 5 7 has all experts once; 0 4,
    2 6, 1 5 and 3 7 have the same experts (`dp_expert`).
    """

    AXES = AXES
    ROW_AXES = ("dp_replicate", "dp_shard")
    """The axes whose ranks read different rows of a global batch."""

    dense: DeviceMesh
    """The axes AXES, in this order."""
    device: torch.device
    """The device of this rank."""
    context_joins: str = "dp_shard"
    """The axis of ROW_AXES that `cp` is flattened into."""
    ep: int = 1
    """Ranks that the experts of a layer are spread over; a divisor of the axis that `cp` joins."""

    def __str__(self) -> str:
        used = [f"{axis}={self.size(axis)}" for axis in self.AXES if self.size(axis) > 1]
        return f"{self.device.type}, {' x '.join(used) or 'one process'}"

    @property
    def replica_axis(self) -> str:
        """The axis whose ranks hold copies of weights under ddp, ZeRO and HSDP."""
        return self._with_context("dp_replicate")

    @property
    def shard_axis(self) -> str:
        """The axis that FSDP shards weights over."""
        return self._with_context("dp_shard")

    @property
    def gradient_axes(self) -> tuple[str, str]:
        """Data x context: their ranks hold partial sums of the gradient of a copied weight."""
        return self.replica_axis, self.shard_axis

    def _with_context(self, axis: str) -> str:
        joined = axis == self.context_joins and self.size("cp") > 1
        return f"{axis}_cp" if joined else axis

    def _parts(self, axis: str) -> tuple[str, ...]:
        return (axis,) if axis in self.AXES else (axis.removesuffix("_cp"), "cp")

    def size(self, *axes: str) -> int:
        """Return the number of ranks along these axes together."""
        return prod(self._size(axis) for axis in axes)

    def _size(self, axis: str) -> int:
        if axis == "ep":
            return self.ep
        if axis == "dp_expert":
            return self.size(self._with_context(self.context_joins)) // self.ep
        return prod(self.dense.size(self.AXES.index(part)) for part in self._parts(axis))

    def along(self, *axes: str) -> DeviceMesh:
        """Return the ranks along these axes, the slowest first, as a DeviceMesh of as many dims.

        Its process groups are those of `dense`. The first use of a flattened axis makes its group,
        so all ranks must make it together.
        """
        if axes not in self._meshes:  # to make a mesh again would read its ranks from tensors
            self._meshes[axes] = self._along(axes)
        return self._meshes[axes]

    @cached_property
    def _meshes(self) -> dict[tuple[str, ...], DeviceMesh]:
        """The meshes that `along` has made."""
        return {}

    def _along(self, axes: tuple[str, ...]) -> DeviceMesh:
        if set(axes) <= {*self.AXES}:
            return self.dense[axes]
        if not set(axes).isdisjoint(EXPERT_AXES):
            return self.experts[axes]
        meshes = [
            self.dense[axis] if axis in self.AXES else self.dense[self._parts(axis)]._flatten(axis)
            for axis in axes
        ]
        return meshes[0] if len(meshes) == 1 else DeviceMesh._concatenate(meshes)

    def group(self, axis: str) -> dist.ProcessGroup:
        """Return the process group of this rank along an axis, also along those of `experts`."""
        mesh = self.dense if axis in self.AXES else self.along(axis)
        return mesh.get_group(axis)

    def rank(self, axis: str) -> int:
        """Return the place of this rank along an axis."""
        return dist.get_rank(self.group(axis))

    @cached_property
    def experts(self) -> DeviceMesh:
        """The ranks, with the axis that `cp` joins split into `dp_expert` x `ep` (neighbours).

        The axes are pp, replicas, shards and tp, where `dp_expert` (ranks with the same experts)
        and `ep` (ranks with different experts) stand for the split one. The first use makes the
        process groups of these two, so all ranks must make it together. Source: torchtitan's sparse
        mesh.
        """
        axis = self._with_context(self.context_joins)
        num_copies, rest = divmod(self.size(axis), self.ep)
        assert rest == 0, f"ep {self.ep} does not divide the {self.size(axis)} ranks of {axis}"
        dense = self.along("pp", *self.gradient_axes, "tp")
        return dense._unflatten(axis, (num_copies, self.ep), EXPERT_AXES)

    def copy_axes(self, weight_axes: Collection[str]) -> tuple[str, ...]:
        """Return the axes whose ranks hold partial sums of the gradient of a copy of a weight.

        `weight_axes`: those that its DTensor is placed along. Ranks of `ep` have different experts,
        and each computes the tokens of all of them.
        """
        if "ep" not in weight_axes:
            return self.gradient_axes
        joined = self._with_context(self.context_joins)
        return tuple("dp_expert" if axis == joined else axis for axis in self.gradient_axes)

    def data_axis(self, weight_axes: Collection[str]) -> str:
        """Return the one of `copy_axes` that the data-parallel strategy works over."""
        return self.copy_axes(weight_axes)[self.ROW_AXES.index(self.context_joins)]

    @property
    def data_size(self) -> int:
        """The number of ranks that read different rows of a global batch."""
        return self.size(*self.ROW_AXES)

    @property
    def data_rank(self) -> int:
        """The place of this rank among them."""
        return self.rank("dp_replicate") * self.size("dp_shard") + self.rank("dp_shard")

    def slots(self, global_batch_size: int) -> range:
        """Return the slots of a global batch whose rows this rank reads."""
        share = global_batch_size // self.data_size
        return range(self.data_rank * share, (self.data_rank + 1) * share)


class Part(nn.Module):
    """Module that a strategy splits; it takes a Batch.

    The last part of a model returns the summed loss.
    """

    hf: nn.Module
    """This rank's share of the model under its own names: a transformers model, or a module of the
    caller."""

    def train(self, mode: bool = True) -> Self:
        """Set the mode of all modules where it changes: the walk over them takes milliseconds."""
        if mode != self.training or mode != self.hf.training:
            super().train(mode)
        return self


class Run(Protocol):
    """Forward, and backward if `train`, of one optimizer step's micro-batches on this rank.

    Returns the local sum over target tokens of the loss, detached, float32, no reduction over
    ranks. In training each micro-batch's loss is multiplied by `loss_scale` before its backward.
    """

    def __call__(
        self, pm: "ParallelModel", microbatches: Sequence[AnyBatch], loss_scale: float, train: bool
    ) -> torch.Tensor:
        """See Run."""
        ...


def no_sync_needed(sync: bool) -> None:
    """The `set_sync` of a model that reduces no gradients by itself."""


def next_token(pm: "ParallelModel", row: Batch) -> int:
    """The `next_token` of a model in one part."""
    (part,) = pm.parts
    return int(part(row, return_logits=True)[0, -1].argmax())


class Storage:
    """Where the weights, gradients and states of a rank lie: this one, in memory as they are."""

    def values(self, held: torch.Tensor) -> torch.Tensor:
        """Return the values of what this rank holds: itself, or a copy of what lies elsewhere."""
        return held

    def change(self, held: torch.Tensor, values: torch.Tensor) -> None:
        """Let it have values that `values` has returned, and that were changed in place."""

    def moved_bytes(self) -> tuple[int, int]:
        """Return the bytes that were read and written to compute and to update so far."""
        return 0, 0

    def memory_bytes(self) -> int:
        """Return the bytes of the memory for what lies elsewhere, none of which is used then."""
        return 0

    def close(self) -> None:
        """Let go of what lies elsewhere, at the end of a run."""


IN_MEMORY = Storage()


def already_portable(name: str, local: torch.Tensor) -> torch.Tensor:
    """The `to_portable` of a model that holds plain tensors or DTensors."""
    return local.detach()


@dataclass(frozen=True)
class ParameterFacts:
    """Facts that a strategy states of a parameter, beside its placements as a DTensor."""

    sharded_axes: tuple[str, ...] = ()
    """Mesh axes over which a plain tensor is sharded."""
    counted: tuple[tuple[int, int, int], ...] | None = None
    """The ranges (dim, start, length) that this rank counts in the norm, where several ranks hold
    the same rows; None: all."""
    is_copy: bool = False
    """Whether another rank holds the same parameter and counts it."""


@dataclass(frozen=True)
class ParallelModel:
    """A model as one rank sees it.

    Strategies replace or extend its fields; the loop has no branch on them.
    """

    parts: tuple[Part, ...]
    """One module, or this rank's pipeline stages. What wraps a module stays inside `run`."""
    run: Run
    make_optimizer: Callable[[Sequence[tuple[str, nn.Parameter]]], torch.optim.Optimizer]
    """Makes the optimizer of the named trainable parameters of this rank."""
    set_sync: Callable[[bool], None] = no_sync_needed
    """Called before each micro-batch: whether its gradients are reduced, as a step's last are."""
    reduce_grads: tuple[Callable[[], None], ...] = ()
    """Called in order after the last backward, for gradients that no wrapper reduces."""
    shard_batch: tuple[Callable[[AnyBatch], AnyBatch], ...] = ()
    """Applied in order to each micro-batch. (Context parallelism takes its share of T here.)"""
    to_portable: Callable[[str, torch.Tensor], torch.Tensor] = already_portable
    """(parameter name, what this rank holds under it: the weight, its gradient, or an optimizer
    state with a number for each of its elements, or for some consecutive ones of its last dim) ->
    the same as a plain tensor, equal on every rank, or as a DTensor. A collective where a strategy
    replaces it."""
    from_portable: Callable[[str, torch.Tensor, torch.Tensor], None] = field(kw_only=True)
    """(parameter name, what this rank holds, a portable tensor placed as `to_portable` gives it, or
    a complete plain one): copies it, or this rank's share of it, into what this rank holds."""
    next_token: "Callable[[ParallelModel, Batch], int]" = next_token
    """Returns the most likely token after one row [1, T], on every rank: a collective."""
    events: Callable[[], Sequence[Event]] = tuple
    """Returns what this rank of a pipeline did in the latest training step, and when."""
    objective: Objective = TARGET_TOKENS
    """The loss is a mean over what it counts."""
    storage: Storage = IN_MEMORY
    """Where what this rank holds lies. Whoever reads weights outside of forwards asks it."""
    parameter_facts: dict[nn.Parameter, ParameterFacts] = field(default_factory=dict)
    """Facts of the parameters that have any; strategies add to it."""
    shards: Mapping[str, nn.Parameter] = field(default_factory=dict)
    """ZeRO's shards of trained parameters, which have their gradients after `reduce_grads`."""
    flat: tuple[nn.Parameter, ...] = ()
    """The parameters that the named ones are views into, as are their gradients, if they are."""

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield this rank's parameters with their names in the transformers model.

        A tied weight may be in the first and in the last stage of this rank; it comes once.
        """
        seen: set[nn.Parameter] = set()
        for part in self.parts:
            new = [(name, p) for name, p in part.hf.named_parameters() if p not in seen]
            seen.update(p for _, p in new)
            yield from new

    def trained(self) -> dict[str, nn.Parameter]:
        """Return this rank's trained parameters by their names."""
        return {name: p for name, p in self.named_parameters() if p.requires_grad}

    def stored(self) -> Iterator[nn.Parameter]:
        """Yield what takes this rank's memory for weights and, in `.grad`, gradients.

        A storage may come twice.
        """
        yield from (parameter for _, parameter in self.named_parameters())
        yield from self.flat


@dataclass(frozen=True)
class Evaluation:
    """The mean loss over the target tokens of a validation set, however they are batched."""

    step: int
    """Optimizer steps done before it."""
    loss: float
    perplexity: float | None
    """exp(loss); infinite where that overflows, None for a loss of pairs."""
    tokens: int
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Means over its pairs, by `Objective.names`; empty where it has target tokens alone."""


class State(Protocol):
    """Where a run starts: a provider of portable tensors, which are weights and optimizer states.

    The keys are `weights/NAME`, `buffers/NAME` and `optimizer/NAME/STATE`; NAME is the parameter's
    or buffer's name in the transformers model. A fresh start has no tensors, a resume has those of
    a checkpoint, a live re-split those in memory. Weights that a state does not have come from the
    model's files.
    """

    @property
    def step(self) -> int:
        """Optimizer steps that were done before; the learning rate is a function of it."""
        ...

    @property
    def loss_scale(self) -> Mapping[str, float | int | bool] | None:
        """`LossScale.state_dict()` after that step; None: that of a new run."""
        ...

    @property
    def lora(self) -> Lora | None:
        """Adapters that the folder of `lora.path` gave its run; None: as the run says."""
        ...

    @property
    def keys(self) -> Collection[str]:
        """The keys of the tensors, equal on every rank."""
        ...

    def check(self, model: nn.Module, cfg: RunConfig, selected: Collection[str]) -> None:
        """Raise UserError, the same on every rank, if the tensors do not fit a run of this model.

        `model`: all of it, on meta, with its adapters; `selected`: names of parameters, by
        `UpdateRule.selected`. `build` calls this before it takes memory.
        """
        ...

    def read(self, key: str, portable: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Return a tensor: the full one, or `portable()` after this rank's part was read into it.

        `portable()` gives what this rank holds under the key, placed as `ParallelModel.to_portable`
        does. It may be a collective: a state calls it for a key on every rank or on none.
        """
        ...
