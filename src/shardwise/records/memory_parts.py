"""What the peak of memory is made of: each block that was alive at that instant is of one part. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

PARTS = ("weights", "gradients", "optimizer", "activations", "temporary")


@dataclass(frozen=True)
class Event:
    """A block at `address` was allocated (`size_bytes` > 0) or freed (else); then `alive_bytes` were in use."""

    address: int
    size_bytes: int
    alive_bytes: int


@dataclass(frozen=True)
class Mark:
    """A moment at which one looked which of the first three PARTS lies where."""

    held: Mapping[int, tuple[str, int]]  # address -> part, bytes
    ends_forward: bool = False  # of a micro-batch; the mark before this one stands where it began


@dataclass
class _Block:
    size_bytes: int
    part: str = "temporary"


def parts_at_peak(timeline: Sequence[Event | Mark], entry_bytes: int, peak_bytes: int) -> dict[str, int]:
    """Bytes of each of PARTS at the first instant with the most bytes alive; they add up to `peak_bytes`.

    The timeline begins and ends with a mark; at the first one `entry_bytes` were alive. A block that was alive at the
    peak is of the `weights` if the first mark found it there, of the `gradients` or the `optimizer` if some mark, even
    after the peak, did. Else it is of the `activations` if it was allocated in a micro-batch's forward and not freed
    when that ended, unless it was a weight then, gathered for a while. All else is `temporary`: so is what a backward
    computes again, and what no mark or event tells of, such as what was alive before or an allocator's rounding.
    """
    events = [(entry.alive_bytes, -i) for i, entry in enumerate(timeline) if isinstance(entry, Event)]
    most, place = max(events, default=(entry_bytes, 0))
    peak = -place if most > entry_bytes else 0
    alive: dict[int, _Block] = {}
    since_mark: dict[int, _Block] = {}
    at_peak: list[_Block] = []
    for i, entry in enumerate(timeline):
        if isinstance(entry, Event):
            alive.pop(entry.address, None)
            since_mark.pop(entry.address, None)
            if entry.size_bytes > 0:
                alive[entry.address] = since_mark[entry.address] = _Block(entry.size_bytes)
        else:
            for address, (part, size_bytes) in entry.held.items():
                if address not in alive:  # no event told of it: it was there before the first mark
                    alive[address] = _Block(size_bytes, part)
                    if i > peak:
                        at_peak.append(alive[address])
                elif "weights" not in (part, alive[address].part):
                    alive[address].part = part
            if entry.ends_forward:
                for address in since_mark.keys() - entry.held.keys():
                    since_mark[address].part = "activations"
            since_mark.clear()
        if i == peak:
            at_peak.extend(alive.values())
    parts = {part: sum(block.size_bytes for block in at_peak if block.part == part) for part in PARTS}
    parts["temporary"] += peak_bytes - sum(parts.values())
    assert parts["temporary"] >= 0, parts
    return parts
