"""Documents in the form that published kernels take: one row, and where in it each begins."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn import functional as F
from torch.utils.weak import WeakTensorKeyDictionary

from shardwise.kernels.recurrence import begins


class Packed(NamedTuple):
    """The documents of rows [B, T] that are joined end to end; a row begins a document."""

    cu_seqlens: torch.Tensor
    """[documents + 1] int32: where each begins, and the end."""
    firsts: torch.Tensor
    """[B] int64: the number of the document that each row begins with."""
    lasts: torch.Tensor
    """[B] int64: the number of the document that each row ends with."""

    def states_of(self, states: torch.Tensor | None) -> torch.Tensor | None:
        """Return the state before each document, of those before each row [B, ...]: else 0."""
        if states is None:
            return None
        shape = (self.cu_seqlens.numel() - 1, *states.shape[1:])
        return states.new_zeros(shape).index_copy(0, self.firsts, states)


_FOUND = WeakTensorKeyDictionary()
"""What was found for documents that are still alive: all layers of a micro-batch share theirs."""


def packed(documents: torch.Tensor) -> Packed:
    """Return the documents of rows [B, T]; the host waits for their number once per tensor.

    fla keeps what it derives from `cu_seqlens` by the tensor too, so each layer gets the same one.
    """
    if documents not in _FOUND:
        _FOUND[documents] = _packed(documents)
    return _FOUND[documents]


def _packed(documents: torch.Tensor) -> Packed:
    starts = begins(documents)
    starts[:, 0] = True
    numbers = starts.flatten().cumsum(0).view_as(starts) - 1
    places = starts.flatten().nonzero().flatten()
    cu_seqlens = F.pad(places, (0, 1), value=documents.numel()).to(torch.int32)
    return Packed(cu_seqlens, numbers[:, 0], numbers[:, -1])
