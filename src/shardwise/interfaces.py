"""The nouns that the packages pass to one another.

Shape legend for the whole project: B batch, T tokens, D model width, N query heads, K key/value heads, H head size,
S state size, V vocabulary, F feed-forward width, E experts, R LoRA rank, C chunk. Mesh dimensions are *axes*, tensor
dimensions are *dims*.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise.layouts import AXES

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from shardwise.config import RunConfig
    from shardwise.schedule.timeline import Event

IGNORED = -100
"""The label of a position that has no target; cross entropy skips it."""


@dataclass(frozen=True)
class Batch:
    """One micro-batch on this rank; its labels were shifted before any split, so a slice along T stays right."""

    input_ids: torch.Tensor  # [B, T] int64
    labels: torch.Tensor  # [B, T] int64: the token after input_ids[b, t], or IGNORED
    document_ids: (
        torch.Tensor
    )  # [B, T] int64: equal within a document; -1 where the row is filled up
    slots: tuple[
        int, ...
    ]  # B slots of the global batch: row b is the next row of slot slots[b]'s own stream
    step: int  # optimizer step, from 1: with the slot it seeds dropout, so masks do not depend on the layout

    def num_target_tokens(self) -> int:
        """Positions that have a target."""
        return int((self.labels != IGNORED).sum())

    def to(self, device: torch.device) -> Batch:
        """The same batch with its tensors on `device`."""
        moved = {
            k: getattr(self, k).to(device, non_blocking=True)
            for k in ("input_ids", "labels", "document_ids")
        }
        return replace(self, **moved)


@dataclass(frozen=True)
class Mesh:
    """All ranks as a grid with the axes AXES (size 1 where one is not used), and the device of this rank."""

    AXES = AXES

    dense: DeviceMesh
    device: torch.device

    def __str__(self) -> str:
        used = [f"{axis}={self.size(axis)}" for axis in self.AXES if self.size(axis) > 1]
        return f"{self.device.type}, {' x '.join(used) or 'one process'}"

    def size(self, *axes: str) -> int:
        """Ranks along these axes together."""
        total = 1
        for axis in axes:
            total *= self.dense.size(self.AXES.index(axis))
        return total

    @property
    def data_size(self) -> int:
        """Ranks that take different rows of a global batch."""
        return self.size("dp_replicate", "dp_shard")

    @property
    def data_rank(self) -> int:
        """The place of this rank among them."""
        return self.dense.get_local_rank("dp_replicate") * self.size(
            "dp_shard"
        ) + self.dense.get_local_rank("dp_shard")

    def slots(self, global_batch_size: int) -> range:
        """The slots of a global batch whose rows this rank reads."""
        share = global_batch_size // self.data_size
        return range(self.data_rank * share, (self.data_rank + 1) * share)


class Part(nn.Module):
    """What a strategy splits: a module that takes a Batch; the last part of a model returns the summed loss."""

    hf: PreTrainedModel  # this rank's share of the transformers model, under transformers' names


class Run(Protocol):
    """Forward, and backward if `train`, of one optimizer step's micro-batches on this rank.

    Returns the local sum over target tokens of the loss, detached, float32, no reduction over ranks. In training each
    micro-batch's loss is multiplied by `loss_scale` before its backward.
    """

    def __call__(
        self, pm: ParallelModel, microbatches: Sequence[Batch], loss_scale: float, train: bool
    ) -> torch.Tensor:
        """See Run."""
        ...


def no_sync_needed(sync: bool) -> None:
    """The `set_sync` of a model that reduces no gradients by itself."""


def next_token(pm: ParallelModel, row: Batch) -> int:
    """The `next_token` of a model in one part."""
    (part,) = pm.parts
    return int(part(row, return_logits=True)[0, -1].argmax())


def already_portable(name: str, held: torch.Tensor) -> torch.Tensor:
    """The `to_portable` of a model that holds plain tensors or DTensors."""
    return held.detach()


@dataclass(frozen=True)
class ParameterFacts:
    """What a strategy tells others of a parameter that the optimizer holds, beside its placements as a DTensor."""

    sharded_axes: tuple[str, ...] = ()
    """Mesh axes over which a plain tensor is cut into disjoint parts."""
    counted: tuple[tuple[int, int, int], ...] | None = None
    """Of rows that several ranks hold, the ranges (dim, start, length) that the norm counts on this rank; None: all."""
    is_copy: bool = False
    """Whether another rank holds the same parameter and counts it."""


@dataclass(frozen=True)
class ParallelModel:
    """A model as one rank sees it. Strategies replace or extend these fields; the loop has no branch on them."""

    parts: tuple[Part, ...]
    """One module, or this rank's pipeline stages. What wraps a module stays inside `run`."""
    run: Run
    make_optimizer: Callable[[Sequence[tuple[str, nn.Parameter]]], torch.optim.Optimizer]
    """From the named trainable parameters of this rank."""
    set_sync: Callable[[bool], None] = no_sync_needed
    """Gradient reduction on or off, called before each micro-batch: on for the last one of a step only."""
    reduce_grads: tuple[Callable[[], None], ...] = ()
    """Called in order after the last backward: gradients that no wrapper reduces."""
    shard_batch: tuple[Callable[[Batch], Batch], ...] = field(default=())
    """Applied in order to each micro-batch (context parallelism takes its share of T here)."""
    to_portable: Callable[[str, torch.Tensor], torch.Tensor] = already_portable
    """(parameter name, what this rank holds under it: the weight, its gradient or an optimizer state of its size) ->
    the same as a plain tensor, equal on every rank, or as a DTensor. A collective where a strategy replaces it."""
    from_portable: Callable[[str, torch.Tensor, torch.Tensor], None] = field(kw_only=True)
    """(parameter name, what this rank holds, a portable tensor placed as `to_portable` gives it, or a plain whole one):
    copy it, or this rank's share of it, back."""
    next_token: Callable[[ParallelModel, Batch], int] = next_token
    """The most likely token after one row [1, T], the same on every rank; a collective where weights are split."""
    events: Callable[[], Sequence[Event]] = tuple
    """What this rank of a pipeline did in the latest training step, in seconds from its start."""
    parameter_facts: dict[nn.Parameter, ParameterFacts] = field(default_factory=dict)
    """Of the parameters that have any; strategies add to it."""
    flat: tuple[nn.Parameter, ...] = ()
    """What a strategy keeps the named parameters in, with their gradients, if they are views."""

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters of this rank by their names in the transformers model (with PEFT's layers in it)."""
        seen: set[nn.Parameter] = (
            set()
        )  # a tied weight may be in the first of this rank's stages and in the last
        for part in self.parts:
            fresh = [(name, p) for name, p in part.hf.named_parameters() if p not in seen]
            seen.update(p for _, p in fresh)
            yield from fresh

    def stored(self) -> Iterator[nn.Parameter]:
        """What takes this rank's memory for weights and, in their `.grad`, gradients; storages may come up twice."""
        yield from (parameter for _, parameter in self.named_parameters())
        yield from self.flat


@dataclass(frozen=True)
class Evaluation:
    """Loss over a whole validation set: the mean over its target tokens, whatever batch they came in."""

    step: int  # optimizer steps done before it
    loss: float
    perplexity: float  # exp(loss); infinite where that overflows
    tokens: int


class State(Protocol):
    """Where a run starts: a provider of portable tensors, which are weights and optimizer states.

    The keys are `weights/NAME`, `buffers/NAME` and `optimizer/NAME/STATE`; NAME is the parameter's
    or buffer's name in the transformers model. A fresh start has no tensors, a resume has those of a
    checkpoint, a live re-split those in memory. Weights that a state does not have come from the
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
    def keys(self) -> Collection[str]:
        """The keys of the tensors, equal on every rank."""
        ...

    def check(self, model: PreTrainedModel, cfg: RunConfig) -> None:
        """Raise UserError, the same on every rank, if the tensors do not fit a run of this model.

        `model`: all of it, on meta, with its adapters. `build` calls this before it takes memory.
        """
        ...

    def read(self, key: str, portable: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Return a tensor: the full one, or `portable()` after this rank's part was read into it.

        `portable()` gives what this rank holds under the key, placed as `ParallelModel.to_portable`
        does. It may be a collective: a state calls it for a key on every rank or on none.
        """
        ...
