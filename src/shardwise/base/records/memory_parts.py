"""The parts of a memory peak: each block that was alive at the peak belongs to one of PARTS.

This file needs no torch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

PARTS = ("weights", "gradients", "optimizer", "activations", "temporary")


@dataclass(frozen=True)
class AllocationEvent:
    """An allocation (`size_bytes` > 0) or a free of the block at `address`."""

    address: int
    size_bytes: int
    alive_bytes: int
    """All bytes in use after the event."""


@dataclass(frozen=True)
class Mark:
    """A moment at which it is known which of the first three PARTS lies where."""

    blocks: Mapping[int, tuple[str, int]]  # address -> part, bytes
    ends_forward: bool = False
    """Whether the forward of a micro-batch ends here; it began at the mark before."""


@dataclass
class _Block:
    size_bytes: int
    part: str = "temporary"


def parts_at_peak(
    timeline: Sequence[AllocationEvent | Mark], entry_bytes: int, peak_bytes: int
) -> dict[str, int]:
    """Return the bytes of each of PARTS at the peak; they add up to `peak_bytes`.

    The peak is the first moment with the most bytes alive. `timeline` begins and ends with a mark;
    `entry_bytes` were alive at the first one. A block that is alive at the peak belongs to

    - `weights`, if the first mark has it there;
    - `gradients` or `optimizer`, if any mark has it there, even one after the peak;
    - `activations`, if it was allocated in the forward of a micro-batch and not freed before the
      end of that forward, unless it was a weight then, gathered for a while;
    - `temporary` otherwise. Tensors that a backward computes again belong here, and bytes of which
      no mark or event tells, such as those of other tensors from before, or the rounding of an
      allocator.
    """
    peak, most_bytes = 0, entry_bytes
    for i, entry in enumerate(timeline):
        if isinstance(entry, AllocationEvent) and entry.alive_bytes > most_bytes:
            peak, most_bytes = i, entry.alive_bytes
    alive: dict[int, _Block] = {}
    since_mark: dict[int, _Block] = {}
    at_peak: list[_Block] = []
    is_first = True
    for i, entry in enumerate(timeline):
        if isinstance(entry, AllocationEvent):
            alive.pop(entry.address, None)
            since_mark.pop(entry.address, None)
            if entry.size_bytes > 0:
                alive[entry.address] = since_mark[entry.address] = _Block(entry.size_bytes)
        else:
            for address, (part, size_bytes) in entry.blocks.items():
                if address not in alive:
                    if part == "weights" and not is_first:
                        continue  # in memory that no event tells of, as a window on a file
                    # No event has reported the block, so it was there before the first mark.
                    alive[address] = _Block(size_bytes, part)
                    if i > peak:
                        at_peak.append(alive[address])
                elif "weights" not in (part, alive[address].part):
                    alive[address].part = part
            if entry.ends_forward:
                for address in since_mark.keys() - entry.blocks.keys():
                    since_mark[address].part = "activations"
            since_mark.clear()
            is_first = False
        if i == peak:
            at_peak.extend(alive.values())
    parts = dict.fromkeys(PARTS, 0)
    for block in at_peak:
        parts[block.part] += block.size_bytes
    parts["temporary"] += peak_bytes - sum(parts.values())
    assert parts["temporary"] >= 0, parts
    return parts
