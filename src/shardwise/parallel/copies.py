"""Whether ranks that hold copies of a weight, and of its states, still hold the same bits.

They start with the same bits and make the same updates, so a difference means that a device or its
memory has computed something wrong, or that the run has a bug. The states count because a wrong
gradient may reach them first: Adam's first update of a weight depends on the sign alone. Reads each
tensor that has copies once, and sends a digest of it: 8 bytes, which a single flip always changes,
and another change nearly always.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

from shardwise.base.interfaces import Mesh, ParallelModel, ParameterFacts
from shardwise.base.words import listed
from shardwise.models.names import hf_name, is_adapter
from shardwise.parallel.place import axes_of, local, sharded_axes
from shardwise.parallel.reduce import all_gather, from_every_rank

PLAIN = ParameterFacts()
_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Dtypes of as many bytes, as which bits can be read."""
_AT_ONCE = 2**24
"""Elements whose places are counted at once, each in 8 bytes."""


@dataclass(frozen=True)
class Difference:
    """A weight whose copies differ along an axis."""

    name: str
    ranks: tuple[int, ...]
    """The ranks whose bits most others do not have; all of the group where no bits are held by
    most."""
    is_certain: bool
    """Whether most ranks of the group agree, so that `ranks` are those that are wrong."""


def differences(
    pm: ParallelModel, mesh: Mesh, optimizer: torch.optim.Optimizer
) -> list[Difference]:
    """Return the weights and states whose copies differ, by any rank, in the order of the ranks.

    A collective of all ranks, which all get the same list.
    """
    by_rank = from_every_rank(list(_seen_here(pm, mesh, optimizer)))
    return list(dict.fromkeys(difference for rank in by_rank for difference in rank))


def explain(found: list[Difference]) -> str:
    """Return a clause that names the weights and the ranks."""
    names = listed(list(dict.fromkeys(difference.name for difference in found)))
    certain = {rank for difference in found if difference.is_certain for rank in difference.ranks}
    if certain:
        ranks = ", ".join(map(str, sorted(certain)))
        return f"copies of {names} differ on rank {ranks} from those of most ranks"
    ranks = ", ".join(map(str, sorted({rank for item in found for rank in item.ranks})))
    return f"copies of {names} differ between ranks {ranks}"


def _seen_here(
    pm: ParallelModel, mesh: Mesh, optimizer: torch.optim.Optimizer
) -> Iterator[Difference]:
    """Yield the differences along each axis of this rank's groups."""
    along: dict[str, list[tuple[str, torch.Tensor]]] = {}
    for name, parameter in pm.named_parameters():
        facts = pm.parameter_facts.get(parameter, PLAIN)
        sharded = sharded_axes(parameter, facts)
        label = name if is_adapter(name) else hf_name(name)
        tensors = [(label, parameter.detach())]
        for state, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor) and value.dim() > 0:
                tensors.append((f"{label} ({state})", value))
        for axis in (*mesh.copy_axes((*axes_of(parameter), *sharded)), "tp"):
            if axis not in sharded and mesh.size(axis) > 1:
                along.setdefault(axis, []).extend(tensors)
    for axis in sorted(along):
        group = mesh.group(axis)
        values = (local(pm.storage.values(tensor)) for _, tensor in along[axis])
        ours = torch.stack([_digest(value).to(mesh.device) for value in values])
        gathered = ours.new_empty(mesh.size(axis) * len(ours))
        all_gather(gathered, ours, group=group)  # 8 bytes a tensor, of every rank, to all
        for (name, _), digests in zip(along[axis], gathered.view(-1, len(ours)).T.tolist()):
            if len(set(digests)) > 1:
                yield _difference(name, digests, dist.get_process_group_ranks(group))


def _digest(weight: torch.Tensor) -> torch.Tensor:
    """Return the sum of a weight's elements, read as integers, times 1, 3, 5 ...: modulo 2^64.

    An odd factor loses no bit, and other ones tell elements that have changed places.
    """
    bits = weight.reshape(-1).view(_INTEGER[weight.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=weight.device)
    for start in range(0, len(bits), _AT_ONCE):
        part = bits[start : start + _AT_ONCE]
        places = torch.arange(start, start + len(part), device=weight.device)
        total += (part * (2 * places + 1)).sum()
    return total


def _difference(name: str, digests: list[int], ranks: list[int]) -> Difference:
    most, count = Counter(digests).most_common(1)[0]
    is_certain = 2 * count > len(digests)
    wrong = (rank for rank, digest in zip(ranks, digests) if not is_certain or digest != most)
    return Difference(name, tuple(wrong), is_certain)
