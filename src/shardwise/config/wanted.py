"""Types of the keys of the run file in words, for who wrote something else."""

import dataclasses
from collections.abc import Mapping, Sequence
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

ONE = {int: "a whole number", float: "a number", str: "a text"}
MANY = {int: "whole numbers", float: "numbers", str: "texts"}
COUNTS = {2: "two", 3: "three"}


def wanted(hint: Any, place: Sequence[str], data: Any) -> str:
    """Return what may stand at a place of data of this type: "a whole number or null".

    The place is the keys of mappings and the numbers of lists that lead there.
    """
    return _either([words for option in _options_at(hint, place, data) for words in _words(option)])


def _options_at(hint: Any, place: Sequence[str], data: Any) -> list[Any]:
    """Return the types that a place may have, by what the data before it are."""
    options = [*get_args(hint)] if get_origin(hint) in (Union, UnionType) else [hint]
    if not place:
        return options
    found: list[Any] = []
    for option in options:
        kind, inner = get_origin(option), get_args(option)
        if isinstance(data, list) and kind in (list, tuple):
            found += _options_at(inner[0], place[1:], dict(enumerate(data)).get(int(place[0])))
        elif isinstance(data, Mapping) and (kind is dict or dataclasses.is_dataclass(option)):
            value = next((v for key, v in data.items() if str(key)[:80] == place[0]), None)
            keys = get_type_hints(option) if kind is not dict else {place[0]: inner[1]}
            found += _options_at(keys.get(place[0], Any), place[1:], value)
    return [*dict.fromkeys(found)]


def _words(option: Any) -> list[str]:
    """Return a type in words; a type of fixed words has several."""
    kind, inner = get_origin(option), get_args(option)
    if kind is Literal:
        return [str(word) for word in inner]
    if option in (NoneType, bool):
        return ["null"] if option is NoneType else ["true", "false"]
    if kind is tuple and Ellipsis not in inner:
        return [f"a list of {COUNTS[len(inner)]} {MANY[inner[0]]}"]
    if kind in (list, tuple):
        return [f"a list of {_either([_many(part) for part in _options_at(inner[0], (), None)])}"]
    return [ONE.get(option, "a mapping")]


def _many(option: Any) -> str:
    return MANY.get(option) or (
        _either(_words(option)) if get_origin(option) is Literal else "mappings"
    )


def _either(words: Sequence[str]) -> str:
    if "a number" in words or "numbers" in words:
        words = [text for text in words if text not in ("a whole number", "whole numbers")]
    *others, last = dict.fromkeys(words)
    return f"{', '.join(others)} or {last}" if others else last
