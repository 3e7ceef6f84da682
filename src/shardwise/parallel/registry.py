"""Descriptions that are found as files of a folder: each has one, of its own name."""

from collections.abc import Iterable
from importlib import import_module
from inspect import isclass
from typing import TypeVar

Described = TypeVar("Described")


def in_files(package: str, names: Iterable[str], base: type[Described]) -> dict[str, Described]:
    """Return an object of the class in each file of a package whose `name` is the file's."""
    found = {}
    for name in names:
        values = vars(import_module(f"{package}.{name}")).values()
        classes = (value for value in values if isclass(value) and issubclass(value, base))
        (described,) = (cls for cls in classes if vars(cls).get("name") == name)
        found[name] = described()
    return found
