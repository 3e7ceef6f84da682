"""Numbers, units and lists as text: seconds, bytes, ratios, percentages."""

import math
from collections.abc import Sequence

NOTHING = "–"
"""The text in place of a figure that was not measured."""

SECOND_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
BYTE_UNITS = ((2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"), (1.0, "bytes"))


def second_unit(largest_seconds: float) -> tuple[float, str]:
    """Return the unit for times of up to `largest_seconds`: its length in seconds, and its name."""
    return _unit(largest_seconds, SECOND_UNITS)


def byte_unit(largest_bytes: float) -> tuple[float, str]:
    """Return the unit for sizes of up to `largest_bytes`: its size in bytes, and its name."""
    return _unit(largest_bytes, BYTE_UNITS)


def _unit(largest: float, units: Sequence[tuple[float, str]]) -> tuple[float, str]:
    """Return the largest unit that is at most `largest`, or the smallest unit of all."""
    return next((unit for unit in units if largest >= unit[0]), units[-1])


def seconds(value: float | None) -> str:
    """Return a time in its unit: `812 ms`, `1.23 s`."""
    if value is None:
        return NOTHING
    unit, name = second_unit(value)
    return f"{number(value / unit)} {name}"


def size(num_bytes: float | None) -> str:
    """Return a number of bytes in its unit: `61.4 MiB`."""
    if num_bytes is None:
        return NOTHING
    unit, name = byte_unit(num_bytes)
    return f"{number(num_bytes / unit)} {name}"


def duration(num_seconds: float) -> str:
    """Return how long a person waits: `1 h 05 min`, `3 min 20 s`, `7 s`."""
    rounded = round(num_seconds)
    if rounded >= 3600:
        return f"{rounded // 3600} h {rounded % 3600 // 60:02} min"
    if rounded >= 60:
        return f"{rounded // 60} min {rounded % 60:02} s"
    return f"{rounded} s"


def number(value: float | None) -> str:
    """Return three significant digits and commas: `1,309`, `86.7`, `0.0123`, `80` (not `80.0`)."""
    if value is None:
        return NOTHING
    if not math.isfinite(value):
        return str(value)
    if value == 0 or abs(value) >= 100:
        return f"{value:,.0f}"
    num_decimals = max(0, 2 - math.floor(math.log10(abs(value))))
    integer, _, decimals = f"{value:.{num_decimals}f}".partition(".")
    return f"{integer}.{decimals}" if decimals.strip("0") else integer


def scientific(value: float | None) -> str:
    """Return a very small number: `4.8e-07`, and `0` for zero."""
    if value is None:
        return NOTHING
    return f"{value:.1e}" if value else "0"


def ratio(value: float | None) -> str:
    """Return a ratio: `1.51×`."""
    return NOTHING if value is None else f"{value:.2f}×"


def percent(share: float | None, decimals: int = 0) -> str:
    """Return a share of 1 as a percentage: `58%`."""
    return NOTHING if share is None else f"{share:.{decimals}%}"


def span(low_high: tuple[float, float] | None) -> str:
    """Return the smallest and the largest of several figures: `950 – 1,040`."""
    return NOTHING if low_high is None else f"{number(low_high[0])} – {number(low_high[1])}"


def counted(count: int, noun: str) -> str:
    """Return a count and its noun: `1 round`, `3 rounds`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def listed(names: Sequence[str], most: int = 4) -> str:
    """Return names as a sentence lists them: `a, b and c`; more than `most`: `a, b and 4 more`."""
    shown = [*names]
    if len(shown) > most:
        shown[most - 1 :] = [f"{len(names) - most + 1} more"]
    if len(shown) < 2:
        return "".join(shown)
    return f"{', '.join(shown[:-1])} and {shown[-1]}"


def one_line(text: str, longest: int = 60) -> str:
    """Return text on one line of `longest` printable characters; a longer text loses its middle."""
    text = "".join(character if character.isprintable() else " " for character in text)
    if len(text) <= longest:
        return text
    num_first = (longest - 1) // 2
    num_last = longest - 1 - num_first
    return f"{text[:num_first]}…{text[-num_last:]}"


def runs(numbers: Sequence[int]) -> str:
    """Return numbers in ascending order as a text: 0-2, 5."""
    spans: list[list[int]] = []
    for place in numbers:
        if spans and place == spans[-1][1] + 1:
            spans[-1][1] = place
        else:
            spans.append([place, place])
    return ", ".join(f"{a}-{b}" if a < b else f"{a}" for a, b in spans)


def groups_of_ranks(groups: Sequence[Sequence[int]]) -> str:
    """Return groups of ranks: `[0,1] [2,3]`; of many `[0-7] [8-15] ... [504-511] (64 groups)`."""
    texts = []
    for group in groups:
        first, *_, last = group
        members = [*map(str, group)]
        if len(group) > 4 and last - first == len(group) - 1:
            members = [f"{first}-{last}"]
        elif len(group) > 8:
            members = [*members[:3], "...", members[-1]]
        texts.append(f"[{','.join(members)}]")
    if len(texts) > 8:
        texts = [*texts[:2], "...", texts[-1], f"({len(groups)} groups)"]
    return " ".join(texts)
