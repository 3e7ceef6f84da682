"""The storages behind tensors, those of subclasses included."""

from collections.abc import Iterable, Iterator

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


def storages(tensors: Iterable[torch.Tensor]) -> dict[int, torch.UntypedStorage]:
    """Return the storages behind tensors, each once, by their address in C++."""
    plain = (part for tensor in tensors for part in plain_tensors(tensor))
    return {storage._cdata: storage for storage in (t.untyped_storage() for t in plain)}


def plain_tensors(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the tensors with memory of which a tensor consists.

    It is the tensor itself, or the tensors that a subclass wraps, such as the shard of a DTensor.
    """
    if not is_traceable_wrapper_subclass(tensor):
        yield tensor
        return
    for name in tensor.__tensor_flatten__()[0]:
        part = getattr(tensor, name)
        if isinstance(part, torch.Tensor):
            yield from plain_tensors(part)
