"""A document as it is stored, and the error of one that cannot be used."""

from typing import Any

from shardwise.config import UserError

Record = dict[str, Any]
"""A document as it is stored: its fields by name."""

KINDS = {
    "NoneType": "null",
    "bool": "true or false",
    "dict": "an object",
    **dict.fromkeys(("int", "float"), "a number"),
    **dict.fromkeys(("list", "tuple"), "a list"),
    "str": "text",
}
"""Kinds of values in a document, by their types."""

CORRECT_LINE = "correct or remove the line"
"""The way out of an error in a document."""


class BadDocument(UserError):
    """A document that cannot be used. `data.on_error` decides whether it stops the run.

    `reason` names the kind of mistake; documents that are left out are counted by it.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class OutOfBounds(UserError):
    """A chat template takes more time or memory for a document than any needs."""


def string(value: Any, name: str) -> str:
    """Return `value` if it is a string for a tokenizer; BadDocument, with `name` in it, if not."""
    if not isinstance(value, str):
        kind = KINDS.get(type(value).__name__, "no text")
        raise BadDocument("wrong type", f"{name} is {kind}, not text in quotes; {CORRECT_LINE}")
    try:
        value.encode()  # JSON can escape half of a surrogate pair, which no tokenizer accepts
    except UnicodeEncodeError:
        problem = f"{name} escapes half of a surrogate pair; {CORRECT_LINE}"
        raise BadDocument("not UTF-8", problem) from None
    return value
