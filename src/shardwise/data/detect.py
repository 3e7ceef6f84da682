"""The format of data by the fields of its first documents, for a run file that is written."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shardwise.config import UserError
from shardwise.data.tables import DatasetEntry, columns_of, columns_of_dataset
from shardwise.data.text import find_files, first_document, suffix

FITS: tuple[tuple[frozenset[str], dict[str, Any]], ...] = (
    (frozenset({"messages"}), {"format": "chat"}),
    (frozenset({"conversations"}), {"format": "chat", "fields": {"messages": "conversations"}}),
    (frozenset({"prompt", "completion"}), {"format": "completion"}),
    (
        frozenset({"instruction", "input", "output"}),
        {
            "format": "completion",
            "fields": {"prompt": ["instruction", "input"], "completion": "output"},
        },
    ),
    (
        frozenset({"instruction", "output"}),
        {"format": "completion", "fields": {"prompt": "instruction", "completion": "output"}},
    ),
    (
        frozenset({"question", "answer"}),
        {"format": "completion", "fields": {"prompt": "question", "completion": "answer"}},
    ),
    (
        frozenset({"prompt", "response"}),
        {"format": "completion", "fields": {"completion": "response"}},
    ),
    (frozenset({"text"}), {"format": "text"}),
)
"""Fields of a document, and the keys of section `data` that read them; the first that fit."""


def keys_for(entries: Sequence[str], key: str) -> dict[str, Any]:
    """Return the keys of section `data` that fit these entries of `data.train`.

    The first document of each entry is read, except on the hub, where nothing is. UserError, which
    names `key`, for one that cannot be read or that no format fits, and for two that differ.
    """
    fits: dict[str, dict[str, Any]] = {}
    for entry in entries:
        fields = _first_fields(entry, key)
        if fields is None:
            continue
        fits[entry] = next((keys for names, keys in FITS if names <= fields), {})
        if not fits[entry]:
            names = ", ".join(sorted(fields)) or "none"
            raise UserError(
                f"{key} {entry}: the fields of its first document are {names}, which no format "
                "reads as they are; rename them to text, to prompt and completion, or to messages, "
                "or leave --data out and set data.format and data.fields yourself"
            )
        first = next(iter(fits))
        if fits[entry] != fits[first]:
            raise UserError(
                f"{key}: {first} is data of format {fits[first]['format']} and {entry} of "
                f"{fits[entry]['format']}, with fields of their own; give data of one form"
            )
    return next(iter(fits.values()), {})


def _first_fields(entry: str, key: str) -> frozenset[str] | None:
    """Return the names of the fields of the first document of an entry, None for the hub's."""
    dataset = DatasetEntry.of(entry)
    if dataset is None:
        file: Path = find_files(entry, key)[0]
        is_table = suffix(file) in (".parquet", ".csv", ".tsv")
        return frozenset(columns_of(file) if is_table else first_document(file, key))
    return None if dataset.is_on_hub else frozenset(columns_of_dataset(dataset, key))
