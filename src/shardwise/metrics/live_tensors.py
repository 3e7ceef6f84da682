"""The tensors of this process that Python can reach."""

import gc
import weakref
from collections.abc import Iterable, Iterator
from itertools import compress

import torch

from shardwise.models.storages import plain_tensors


def cpu_tensors(tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield the plain tensors of these tensors and of their gradients that lie in CPU memory."""
    tensors = list(tensors)
    for tensor in [*tensors, *gradients(tensors)]:
        for plain in plain_tensors(tensor):
            if plain.layout == torch.strided and _is_in_cpu_memory(plain.untyped_storage()):
                yield plain


def _is_in_cpu_memory(storage: torch.UntypedStorage) -> bool:
    if storage.device.type != "cpu":
        return False
    try:
        storage.data_ptr()
    except RuntimeError:  # of what torch.compile has traced with, which stays alive for a while
        return False
    return True


def gradients(tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield the gradients of these tensors that are set."""
    return (t.grad for t in tensors if t.is_leaf and t.grad is not None)


def live_tensors() -> list[torch.Tensor]:
    """Return the tensors that Python's garbage collector knows, those in `_FROZEN` included."""
    frozen = (reference() for reference in _FROZEN)
    return [*(tensor for tensor in frozen if tensor is not None), *collectable_tensors()]


def collectable_tensors() -> list[torch.Tensor]:
    """Return the tensors that the garbage collector looks at, so without those in `_FROZEN`."""
    # By type and without a loop in Python. isinstance would ask each of some 400,000 objects for
    # its class, which some modules answer with a deprecation warning.
    objects = gc.get_objects()
    return list(compress(objects, map(_subclasses(torch.Tensor).__contains__, map(type, objects))))


def _subclasses(cls: type) -> set[type]:
    return {cls}.union(*map(_subclasses, cls.__subclasses__()))


def freeze_imports() -> None:
    """Exempt all objects so far from garbage collections, here and in processes forked from here.

    To collect the 400,000 objects of torch and transformers takes 0.3 s. `live_tensors` still
    returns the tensors among them.
    """
    _FROZEN.extend(map(weakref.ref, collectable_tensors()))
    gc.freeze()


_FROZEN: list[weakref.ref[torch.Tensor]] = []
"""The tensors that `freeze_imports` has hidden from the garbage collector."""
