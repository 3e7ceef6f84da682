"""The documents of packed rows, each as a row of its own, which mixers that isolate them see."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from shardwise.base.batches import Batch


def document_begins(document_ids: torch.Tensor) -> torch.Tensor:
    """Return the place in its row at which the document of each token begins, [B, T] int64."""
    is_first = torch.ones_like(document_ids, dtype=torch.bool)
    is_first[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    places = torch.arange(document_ids.shape[1], device=document_ids.device)
    return torch.where(is_first, places, 0).cummax(1).values


@dataclass(frozen=True)
class Documents:
    """The places of a micro-batch's tokens when each document has a row of its own.

    Documents of 1 token, of 2, of 3-4, of 5-8, ... make a group each, padded to the longest one in
    it. So the rows of all groups hold fewer than twice the tokens, and a mixer runs at most
    1 + log2(T) times.
    """

    places: torch.Tensor
    """The place of each token in the rows of all groups, joined end to end: [B*T] int64."""
    shapes: tuple[tuple[int, int], ...]
    """The number of documents of each group, and the tokens of the longest."""

    def unpack(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Return [documents, longest, ...] of each group, zero where padded, of x [B, T, ...]."""
        flat = x.flatten(0, 1)
        sizes = [documents * longest for documents, longest in self.shapes]
        joined = flat.new_zeros(sum(sizes), *flat.shape[1:]).index_copy(0, self.places, flat)
        return [
            part.view(*shape, *flat.shape[1:])
            for part, shape in zip(joined.split(sizes), self.shapes)
        ]

    def repack(self, groups: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return [B*T, ...] of the groups' tensors, without the padding: undo `unpack`."""
        return torch.cat([group.flatten(0, 1) for group in groups]).index_select(0, self.places)


@dataclass(frozen=True)
class IsolatedBatch(Batch):
    """A batch with its documents, which are found once, outside the layers.

    A layer that is computed again takes them from the batch. If it found them itself, forward and
    recomputation could run different operations, which checkpointing forbids.
    """

    documents: Documents | None


def documents_of(document_ids: np.ndarray, device: torch.device) -> Documents | None:
    """Return the documents of rows [B, T] for `device`; None where every row is one document.

    What fills a row up counts as a document.
    """
    # The host must know where documents begin, to give tensors their shapes.
    begins_here = np.ones(document_ids.shape, bool)
    begins_here[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    begins = [int(place) for place in np.flatnonzero(begins_here)]
    if len(begins) == len(document_ids):
        return None
    lengths = [end - begin for begin, end in pairwise([*begins, document_ids.size])]
    groups: dict[int, list[int]] = {}
    for document, length in enumerate(lengths):
        groups.setdefault((length - 1).bit_length(), []).append(document)
    shifts, shapes, taken = [0] * len(begins), [], 0
    for members in groups.values():
        longest = max(lengths[document] for document in members)
        shapes.append((len(members), longest))
        for document in members:
            shifts[document] = taken - begins[document]
            taken += longest
    places = torch.from_numpy(np.arange(document_ids.size) + np.repeat(shifts, lengths))
    return Documents(places.to(device, non_blocking=True), tuple(shapes))


def with_documents(batch: Batch) -> IsolatedBatch:
    """Return the batch as the mixers of an isolated model need it."""
    documents = documents_of(batch.documents_on_host, batch.device)
    return IsolatedBatch(**vars(batch), documents=documents)
