"""The base of all sections of the run file, and the error for the user's mistake."""

from dataclasses import MISSING, dataclass, field, fields, replace
from functools import cache
from typing import Any, ClassVar, Literal

from shardwise.config.ranges import missed_bound, shown


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


@dataclass(frozen=True)
class KeyFacts:
    """Facts of a key that the rest of the library must know, beside its type and its default.

    Those of a section hold for each of its keys that does not say otherwise.
    """

    between: tuple[float, float] | None = None
    """The smallest and the largest value of a number. No real run reaches the largest one: a larger
    number is a typing error, and could cost memory or time without end before it is noticed."""
    resumable: bool = False
    """Whether a resumed run may change it: what is computed does not depend on it, or its content
    is compared in another way."""
    timed: bool = True
    """Whether the time of a unit of the model, in one forward and backward on one process, depends
    on it and is not known from elsewhere. Then a profile of these times names it."""
    searched: bool = False
    """Whether the search of a layout chooses it, where the user does not fix it."""
    decides: Literal["work", "layout"] | None = None
    """Whether it says what is computed, or over which ranks; None: a choice of its own of how. An
    axis of a sweep varies one of these."""
    rounds: bool = False
    """Whether it changes how numbers are rounded. Losses are compared where all such keys agree."""
    reported: bool = False
    """Whether a report lists it where it is equal in all cells of a group."""
    rows: bool = False
    """Whether what rows hold depends on it, so that a resume has to find it as it was."""
    for_own_loop: bool = True
    """Whether a loop of the caller, who makes the rows, has a use for it."""
    by_adapter: bool = False
    """Whether the folder of an adapter says it."""
    follows: bool = False
    """Whether it has a meaning only beside what the search chooses, and is left out with that."""
    is_noise: bool = False
    """Whether it changes rounding alone, as the control of a sweep does."""
    never_set: str = ""
    """Why a sweep cannot set it; empty: it can."""
    never_varied: str = ""
    """Why an axis of a sweep cannot vary it; empty: it can."""


def with_facts(default: Any = MISSING, *, factory: Any = MISSING, **facts: Any) -> Any:
    """Return the field of a key with a default, or with what makes one, and its own facts."""
    return field(default=default, default_factory=factory, metadata=facts)


class Section:
    """Base of the sections: it refuses unknown keys (by pydantic) and numbers out of range.

    The text below a key is its description, also in the JSON schema.
    """

    facts: ClassVar[KeyFacts] = KeyFacts()
    """The facts of its keys."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {
        "extra": "forbid",
        "use_attribute_docstrings": True,
    }

    def __post_init__(self) -> None:
        """Raise UserError for a number that is outside its range."""
        section = type(self).__name__.lower()
        for name, (least, most) in _ranges_of(type(self)).items():
            value = getattr(self, name)
            if value == "epoch":  # in place of a number
                continue
            if problem := missed_bound(value, least, most):  # text only then: planning makes many
                raise UserError(f"{section}.{name} is {shown(value)}; give {problem}")


def facts_in(section: Any) -> dict[str, KeyFacts]:
    """Return the facts of each key of a class of a section."""
    return {key.name: replace(section.facts, **key.metadata) for key in fields(section)}


@cache
def _ranges_of(section: type[Section]) -> dict[str, tuple[float, float]]:
    return {name: facts.between for name, facts in facts_in(section).items() if facts.between}
