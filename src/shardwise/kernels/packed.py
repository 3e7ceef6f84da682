"""Documents in the form that published kernels take: one row, and where in it each begins."""

from typing import NamedTuple

import numpy as np
import torch
from torch.utils.weak import WeakTensorKeyDictionary


class Packed(NamedTuple):
    """The documents of rows [B, T] that are joined end to end; a row begins a document."""

    cu_seqlens: torch.Tensor
    """[documents + 1] int32: where each begins, and the end."""
    cu_seqlens_on_host: torch.Tensor
    """The same in the host's memory, int64: without it fla waits for the device to read them."""
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


_ON_HOST = WeakTensorKeyDictionary()
"""Documents [B, T] in the host's memory, of tensors that are still alive."""
_FOUND = WeakTensorKeyDictionary()
"""Results for documents that are still alive: all layers of a micro-batch share theirs."""


def keep_on_host(documents: torch.Tensor, array: np.ndarray) -> None:
    """Remember an array that equals documents [B, T], so that `packed` need not read these."""
    _ON_HOST[documents] = array


def packed(documents: torch.Tensor) -> Packed:
    """Return the documents of rows [B, T]; the host waits, once per tensor, if it knows no array.

    fla keeps what it derives from `cu_seqlens` by the tensor too, so each layer gets the same one.
    """
    if documents not in _FOUND:
        array = _ON_HOST.get(documents)
        array = documents.numpy(force=True) if array is None else array
        _FOUND[documents] = _packed(array, documents.device)
    return _FOUND[documents]


def _packed(documents: np.ndarray, device: torch.device) -> Packed:
    starts = np.ones(documents.shape, bool)
    starts[:, 1:] = documents[:, 1:] != documents[:, :-1]
    ends = torch.from_numpy(np.append(np.flatnonzero(starts), documents.size))
    numbers = starts.cumsum().reshape(documents.shape) - 1

    def there(x: torch.Tensor) -> torch.Tensor:
        return x.to(device, non_blocking=True)

    rows = (torch.from_numpy(numbers[:, place].copy()) for place in (0, -1))
    return Packed(there(ends.to(torch.int32)), ends, *map(there, rows))
