"""The base of all sections of the run file, and the error for the user's mistake."""

from __future__ import annotations

from functools import cache
from typing import Any, ClassVar

from shardwise.ranges import RANGES, missed_bound, shown


class UserError(ValueError):
    """The user's mistake: one line that names what is wrong and the way out (exit code 2)."""

    def __init__(self, message: str) -> None:
        # The message may quote what others wrote: lines, control characters, thousands of letters.
        text = " ".join(message.split())
        text = text if len(text) < 1_200 else f"{text[:800]} ... {text[-400:]}"  # the way out
        super().__init__("".join(c if c.isprintable() else ascii(c)[1:-1] for c in text))


def require(condition: bool, message: str) -> None:
    """Raise UserError with `message` unless `condition` holds."""
    if not condition:
        raise UserError(message)


class Section:
    """Base of the sections: it refuses unknown keys (by pydantic) and numbers out of range.

    The text below a key is its description, also in the JSON schema.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {
        "extra": "forbid",
        "use_attribute_docstrings": True,
    }

    def __post_init__(self) -> None:
        """Raise UserError for a number that is outside its range."""
        section = type(self).__name__.lower()
        for name, (least, most) in _ranges_of(section).items():
            value = getattr(self, name)
            if value == "epoch":  # in place of a number
                continue
            if problem := missed_bound(value, least, most):  # text only then: planning makes many
                raise UserError(f"{section}.{name} is {shown(value)}; give {problem}")


@cache
def _ranges_of(section: str) -> dict[str, tuple[float, float]]:
    keys = {key.partition(".")[::2]: bounds for key, bounds in RANGES.items()}
    return {name: bounds for (of, name), bounds in keys.items() if of == section}
