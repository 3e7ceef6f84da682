"""The parts of a peak, of blocks that are worked out by hand."""

from __future__ import annotations

import pytest

from shardwise.base.records.memory_parts import AllocationEvent, Mark, parts_at_peak


def parts(
    weights: int = 0, gradients: int = 0, optimizer: int = 0, activations: int = 0
) -> dict[str, int]:
    return {
        "weights": weights,
        "gradients": gradients,
        "optimizer": optimizer,
        "activations": activations,
    }


def without_temporary(sizes: dict[str, int] | None) -> dict[str, int]:
    assert sizes is not None
    return {part: size for part, size in sizes.items() if part != "temporary"}


def timeline(*entries: AllocationEvent | Mark | int) -> list[AllocationEvent | Mark]:
    """Integers +address and -address for a block that comes and goes; its size is its address."""
    alive, result = 100, []
    for entry in entries:
        if isinstance(entry, int):
            alive += entry
            entry = AllocationEvent(abs(entry), entry, alive)
        result.append(entry)
    return result


BEGIN = Mark({10: ("weights", 10), 20: ("optimizer", 20)})
NOTHING_NEW = BEGIN


@pytest.mark.parametrize(
    ("events", "peak", "expected"),
    [
        ((), 100, parts(10, 0, 20)),  # nothing is more than what was there at entry
        ((+1, -1, Mark({}), +1), 101, parts(10, 0, 20)),
        ((NOTHING_NEW, +1, +2, -2, Mark({}, ends_forward=True), +3), 104, parts(10, 0, 20, 1)),
        # 2 is gathered weights; 3 was allocated between micro-batches.
        (
            (+3, NOTHING_NEW, +1, +2, Mark({2: ("weights", 2)}, ends_forward=True)),
            106,
            parts(10, 0, 20, 1),
        ),
        # The first instant with the most; a gradient that a later mark finds was there already, 5
        # not yet.
        ((+4, -4, +4, +1, -1, +5, -4, Mark({5: ("gradients", 5)})), 109, parts(10, 5, 20)),
        ((+4, +1, -1, Mark({4: ("gradients", 4)})), 105, parts(10, 4, 20)),
        (
            (+4, +1, -4, -1, +4, Mark({4: ("gradients", 4)})),
            105,
            parts(10, 0, 20),
        ),  # another block at its place
        # Buckets of DistributedDataParallel: from before, and seen only once they are gradients.
        ((+4, -4, Mark({7: ("gradients", 7)})), 104, parts(10, 7, 20)),
        ((Mark({7: ("gradients", 7)}), +4, -4), 104, parts(10, 7, 20)),
        # A gradient that the forward has made already.
        (
            (NOTHING_NEW, +4, Mark({}, ends_forward=True), Mark({4: ("gradients", 4)})),
            104,
            parts(10, 4, 20),
        ),
        # While a weight is gathered, only the optimizer still shows its shard.
        ((Mark({10: ("optimizer", 10)}), +4, -4), 104, parts(10, 0, 20)),
        # A weight that is freed before the peak.
        ((-10, +15), 105, parts(0, 0, 20)),
    ],
)
def test_blocks_alive_at_the_peak(events, peak, expected):
    entries = timeline(BEGIN, *events, Mark({}))
    sizes = parts_at_peak(entries, 100, peak)
    assert without_temporary(sizes) == expected
    assert sizes["temporary"] == peak - sum(expected.values())
