"""Parquet files and `datasets`: rows by number out of memory-mapped Arrow files."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.config import UserError
from shardwise.data.text import SUFFIXES, Record, expanded, suffix

SPLIT = "train"
"""The split that is read of a dataset that has several."""


@dataclass(frozen=True, eq=False)
class Table:
    """The rows of a `datasets.Dataset` by number; a pickle of it holds the path of its files, not their rows."""

    rows: Any
    name: str

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, document: int) -> Record:
        return self.rows[document]

    def where(self, document: int) -> str:
        """The row, counted from 0."""
        return f"{self.name}: row {document}"

    def fingerprint(self) -> str:
        """A short hash of the number of rows and of 16 of them."""
        sample = [self.rows[i] for i in range(0, len(self), max(len(self) // 16, 1))]
        content = json.dumps([len(self), sample], default=str, sort_keys=True)
        return hashlib.blake2b(content.encode(), digest_size=8).hexdigest()


def is_dataset_folder(path: Path) -> bool:
    """Whether `datasets` must read this folder: it saved it, its README describes it, or it holds no file of ours."""
    if not path.is_dir():
        return False
    if (path / "dataset_info.json").exists() or (path / "dataset_dict.json").exists():
        return True
    readme = path / "README.md"
    if readme.is_file() and re.match(
        rb"---\s.*?^(configs|dataset_info):", readme.read_bytes(), re.DOTALL | re.MULTILINE
    ):
        return True
    files = [file for file in path.rglob("*") if file.is_file() and not file.name.startswith(".")]
    return bool(files) and not any(suffix(file) in SUFFIXES for file in files) and any(map(_is_data, files))


def _is_data(file: Path) -> bool:
    return suffix(file) in (".csv", ".tsv", ".arrow", ".json")


def is_dataset_name(entry: str) -> bool:
    """Whether an entry that is no path can be the name of a dataset on the hub: `owner/name`, no suffix of ours."""
    path = expanded(entry)
    is_name = re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", entry) is not None
    return is_name and not path.exists() and suffix(path) not in SUFFIXES


def open_parquet(path: Path, fields: Sequence[str]) -> Table:
    """The rows of a Parquet file with these columns.

    A row cannot be read from Parquet without decoding its whole row group. So `datasets` copies the columns, batch by
    batch, into an Arrow file in its cache once, and rows are read from there. UserError for a file that is not Parquet
    and for a column that is not there.
    """
    datasets = _datasets(str(path))
    import pyarrow.parquet

    try:
        metadata = pyarrow.parquet.read_metadata(path)
        _check_fields(str(path), metadata.schema.to_arrow_schema().names, fields)
        if metadata.num_rows == 0:
            raise UserError(f"{path}: a Parquet file without rows; remove it")
        files = {"data_files": str(path), "columns": list(fields), "split": SPLIT}
        return Table(_quietly(lambda: datasets.load_dataset("parquet", **files)), str(path))
    except UserError:
        raise
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise UserError(f"{path}: cannot be read as Parquet ({error}); mend or remove it") from None


def open_csv(path: Path, fields: Sequence[str]) -> Table:
    """The rows of a CSV or TSV file, whose first line names the columns; read through `datasets`, as in a folder."""
    datasets = _datasets(str(path))
    separator = "\t" if suffix(path) == ".tsv" else ","
    files = {"data_files": str(path), "sep": separator, "split": SPLIT}
    try:
        loaded = _quietly(lambda: datasets.load_dataset("csv", **files))
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        cause = error.__cause__ or error  # what datasets says itself is only that it failed
        raise UserError(f"{path}: cannot be read as {suffix(path)[1:].upper()} ({cause}); mend or remove it") from None
    _check_fields(str(path), loaded.column_names, fields)
    return Table(loaded.select_columns(list(fields)), str(path))


def open_dataset(entry: str, fields: Sequence[str], key: str = "data.train") -> Table:
    """The rows of a dataset: a folder that `save_to_disk` wrote, a folder or a hub name that `load_dataset` takes.

    UserError (naming `key`) where it cannot be loaded, has several splits but none named `train`, or lacks a field.
    """
    datasets = _datasets(entry)
    path = expanded(entry)
    try:
        if (path / "dataset_info.json").exists() or (path / "dataset_dict.json").exists():
            loaded = datasets.load_from_disk(str(path))
        else:
            loaded = _quietly(lambda: datasets.load_dataset(str(path) if path.exists() else entry))
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        what = f"datasets cannot load it ({error})"
        way_out = "give existing files, folders or glob patterns, or the name or folder of a dataset"
        raise UserError(f"{key}: {entry}: {what}; {way_out}") from None
    if isinstance(loaded, dict):
        if SPLIT not in loaded:
            raise UserError(
                f"{key}: {entry} has no split {SPLIT}, only {', '.join(loaded)}; save the one you mean alone"
            )
        loaded = loaded[SPLIT]
    _check_fields(entry, loaded.column_names, fields)
    return Table(loaded.select_columns(list(fields)), entry)


def _check_fields(name: str, columns: Sequence[str], fields: Sequence[str]) -> None:
    for field in fields:
        if field not in columns:
            raise UserError(
                f"{name}: no column {field!r}, only {', '.join(columns)}; set data.format and data.text_field to what "
                "it holds"
            )


def _datasets(name: str) -> Any:
    try:
        import datasets  # optional, and slow to import
    except ImportError:
        raise UserError(f"{name}: reading it takes the package datasets; pip install 'shardwise[data]'") from None
    return datasets


def _quietly(load: Callable[[], Any]) -> Any:
    """Load without a progress bar, which each rank would draw into the run's own."""
    import datasets

    if not datasets.is_progress_bar_enabled():
        return load()
    datasets.disable_progress_bar()
    try:
        return load()
    finally:
        datasets.enable_progress_bar()
