"""The bound that a number misses, and the text of a value in an error."""

import reprlib

MOST_TOKENS = 1_000_000_000
"""The largest number of tokens in an optimizer step."""

_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = _REPR.maxlong = 100


def shown(value: object) -> str:
    """Return the text of a value in an error: its repr, cut where it is long or nested."""
    try:
        return _REPR.repr(value)
    except ValueError:  # Python writes no numbers of more than some thousand digits
        return "a number of thousands of digits"


def missed_bound(value: float | None, least: float, most: float) -> str:
    """Return the bound that a value misses, such as "at most 8"; "" where it misses none.

    A value that is left out (None) misses none.
    """
    if value is None or least <= value <= most:
        return ""
    if value > most:
        return f"at most {most:,}"
    return f"at least {least:,}" if value < least else "a number"  # NaN is on neither side
