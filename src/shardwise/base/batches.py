"""One micro-batch on a rank, and what the host knows of it."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch

from shardwise.kernels.packed import keep_on_host
from shardwise.kernels.recurrence import Neighbours

IGNORED = -100
"""The label of a position that has no target; cross entropy skips it."""


class OnHost(NamedTuple):
    """Facts of a batch on the device that the host knows, so that it never waits.

    It holds for a batch whose tensors are these very ones, not for a share of them. Arrays are in
    the host's memory.
    """

    labels: torch.Tensor
    labels_array: np.ndarray
    target_places: torch.Tensor
    """[targets] int64, on the device: the places of `labels.flatten()` that have a target."""
    document_ids: torch.Tensor
    documents_array: np.ndarray

    @staticmethod
    def of(
        labels: torch.Tensor,
        labels_array: np.ndarray,
        document_ids: torch.Tensor,
        documents_array: np.ndarray,
    ) -> "OnHost":
        """Return what the host finds in arrays that equal these tensors."""
        keep_on_host(document_ids, documents_array)
        places = torch.from_numpy(np.flatnonzero(labels_array != IGNORED))
        places = places.to(labels.device, non_blocking=True)
        return OnHost(labels, labels_array, places, document_ids, documents_array)


@dataclass(frozen=True)
class Batch:
    """One micro-batch on this rank. Its labels are shifted, so that a slice along T is right."""

    input_ids: torch.Tensor
    """[B, T] int64."""
    labels: torch.Tensor
    """[B, T] int64: the token after input_ids[b, t], or IGNORED."""
    document_ids: torch.Tensor
    """[B, T] int64: equal within a document, -1 where the row is padded."""
    slots: tuple[int, ...]
    """B slots of the global batch: row b is the next row of the stream of slot slots[b]."""
    step: int
    """The optimizer step, from 1. With the slot it seeds dropout, whatever the layout."""
    positions: torch.Tensor | None = field(default=None, kw_only=True)
    """[B, T] int64: the places of the tokens in their rows; None: 0 to T-1, a complete row."""
    neighbours: Neighbours | None = field(default=None, kw_only=True, repr=False, compare=False)
    """With context parallelism: the ranks that have the other tokens of these rows."""
    on_host: OnHost | None = field(default=None, kw_only=True, repr=False, compare=False)
    """Set by `to`."""
    ids_on_host: np.ndarray | None = field(default=None, kw_only=True, repr=False, compare=False)
    """`input_ids`, [B, T] in the host's memory; set by `to`."""
    most_pairs: int = field(default=0, kw_only=True, compare=False)
    """Half of the documents of the complete row that has most of them: its pairs of answers, where
    documents are sides of pairs."""
    mismatched: "Batch | None" = field(default=None, kw_only=True, compare=False)
    """Rows of the same prompts, each with another document's answer, where answers have labels."""

    @property
    def device(self) -> torch.device:
        """The device of its tensors."""
        return self.input_ids.device

    def num_target_tokens(self) -> torch.Tensor:
        """Return the number of positions that have a target, int64 on the batch's device."""
        return (self.labels != IGNORED).sum()

    @property
    def target_places(self) -> torch.Tensor | None:
        """The places of labels with a target, [targets] int64; None if the host must count them."""
        is_known = self.on_host is not None and self.on_host.labels is self.labels
        return self.on_host.target_places if self.on_host and is_known else None

    @property
    def documents_on_host(self) -> np.ndarray:
        """`document_ids`, in the host's memory; the host waits if they are not known there."""
        if self.on_host is not None and self.on_host.document_ids is self.document_ids:
            return self.on_host.documents_array
        return self.document_ids.numpy(force=True)

    def to(self, device: torch.device) -> "Batch":
        """Return the same batch with its tensors on `device`."""
        tensors = {n: t for n, t in vars(self).items() if isinstance(t, torch.Tensor)}
        moved = {name: tensor.to(device, non_blocking=True) for name, tensor in tensors.items()}
        arrays = self.labels.numpy(force=True), self.document_ids.numpy(force=True)
        ids = self.input_ids.numpy(force=True)
        on_host = OnHost.of(moved["labels"], arrays[0], moved["document_ids"], arrays[1])
        mismatched = None if self.mismatched is None else self.mismatched.to(device)
        return replace(self, **moved, on_host=on_host, ids_on_host=ids, mismatched=mismatched)

    def rows(self) -> list[dict[str, Any]]:
        """Return what a reader needs of each row to find an error, as plain data."""
        rows = zip(self.slots, self.input_ids.tolist(), self.labels.tolist())
        return [{"slot": slot, "input_ids": ids, "labels": labels} for slot, ids, labels in rows]


@dataclass(frozen=True)
class TensorBatch:
    """One micro-batch of a module that is not a language model of transformers: named tensors.

    `batch["name"]` is a tensor. The first dim of each is the rows.
    """

    tensors: Mapping[str, torch.Tensor]
    """[B, ...] each, by the names that the module reads."""
    num_targets: int
    """The number of targets in these rows: of what the module's loss is a sum."""
    slots: tuple[int, ...]
    """Slots of the global batch, one for each row."""
    step: int
    """Optimizer step, from 1."""
    positions: None = field(default=None, init=False)
    """Places of tokens in their rows; None, since every row is complete."""

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.tensors[name]

    @property
    def device(self) -> torch.device:
        """The device of its tensors."""
        return next(iter(self.tensors.values())).device

    def num_target_tokens(self) -> torch.Tensor:
        """Return the number of targets, int64 on the batch's device."""
        return torch.tensor(self.num_targets, device=self.device)

    def to(self, device: torch.device) -> "TensorBatch":
        """Return the same batch with its tensors on `device`."""
        tensors = {n: t.to(device, non_blocking=True) for n, t in self.tensors.items()}
        return replace(self, tensors=tensors)

    def rows(self) -> list[dict[str, Any]]:
        """Return what a reader needs of each row to find an error, as plain data."""
        content = {name: tensor.tolist() for name, tensor in self.tensors.items()}
        return [
            {"slot": slot, **{name: rows[place] for name, rows in content.items()}}
            for place, slot in enumerate(self.slots)
        ]


AnyBatch = Batch | TensorBatch
"""A micro-batch, which strategies pass on to the model as it is."""


def positions_of(microbatches: Iterable[AnyBatch]) -> Counter[int]:
    """Return how many positions the rows of a language model's batches have, by their length."""
    positions = Counter[int]()
    for batch in microbatches:
        if isinstance(batch, Batch):
            positions[batch.input_ids.shape[1]] += batch.input_ids.numel()
    return positions


class Objective:
    """Thing that the loss of a global batch is a mean over, and what a step reports beside it."""

    names: Sequence[str] = ()
    """Names of what `take` returns."""

    def count(self, batch: AnyBatch) -> torch.Tensor:
        """Return the target tokens of a micro-batch of complete rows and, last, how many it has of
        what the loss is a mean over, int64: one number where these are the target tokens.
        """
        return batch.num_target_tokens()[None]

    def take(self) -> torch.Tensor:
        """Return numbers of the passes since the last call, equal on all ranks: a collective."""
        return torch.zeros(0)


TARGET_TOKENS = Objective()
