"""The format of data by the fields of its first documents, for a run file that is written."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shardwise.config import UserError
from shardwise.data.files import find_files
from shardwise.data.known_forms import keys_of_form
from shardwise.data.record import BadDocument
from shardwise.data.rows import suffix
from shardwise.data.tables import DatasetEntry, columns_of, columns_of_dataset
from shardwise.data.text import index_files


def keys_for(entries: Sequence[str], key: str) -> dict[str, Any]:
    """Return the keys of section `data` that fit these entries of `data.train`.

    Where entries differ, each is a mapping with keys of its own. The first document of each entry
    is read, except on the hub, where nothing is. UserError, which names `key`, for one that cannot
    be read or that no format fits.
    """
    fits: dict[str, dict[str, Any]] = {}
    for entry in entries:
        fields = _first_fields(entry, key)
        if fields is None:
            continue
        fits[entry] = keys_of_form(fields)
        if not fits[entry]:
            names = ", ".join(sorted(fields)) or "none"
            raise UserError(
                f"{key} {entry}: the fields of its first document are {names}, which no format "
                "reads as they are; rename them to text, to prompt and completion, to messages, "
                "or to prompt, chosen and rejected; or leave --data out, and set data.format and "
                "data.fields yourself"
            )
    first = next(iter(fits.values()), {})
    if all(keys == first for keys in fits.values()):
        return first
    return {
        "train": [{"path": entry, **fits[entry]} if entry in fits else entry for entry in entries]
    }


def _first_fields(entry: str, key: str) -> frozenset[str] | None:
    """Return the names of the fields of the first document of an entry, None for the hub's."""
    dataset = DatasetEntry.of(entry)
    if dataset is None:
        file: Path = find_files(entry, key)[0]
        if suffix(file) in (".parquet", ".csv", ".tsv"):
            return frozenset(columns_of(file))
        index = index_files([file], most=1)
        if not len(index):
            raise UserError(f"{key}: no document in {file}; give a file that is not empty")
        try:
            return frozenset(index[0])
        except BadDocument as error:
            raise UserError(f"{index.where(0)}: {error}") from None
    return None if dataset.is_on_hub else frozenset(columns_of_dataset(dataset, key))
