"""Parquet and CSV files and `datasets`: rows by number out of memory-mapped Arrow files."""

import contextlib
import csv
import glob
import hashlib
import json
import logging
import re
import tempfile
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.config import Data, UserError
from shardwise.data.columns import fields_beside, fields_of
from shardwise.data.files import SUFFIXES, expanded, files_below, files_of_folder, parts_of
from shardwise.data.known_forms import way_to_read
from shardwise.data.record import BadDocument, Record
from shardwise.data.rows import JSON_ROW, check_text, csv_lines, csv_rows, json_rows, suffix
from shardwise.data.text import read_object

SPLIT = "train"
"""The split that is read of a dataset on the hub where none is named."""
REPAIR = "repair or remove it"
STREAMED = {".csv": "csv", ".tsv": "csv", ".parquet": "parquet"}
STREAMED |= dict.fromkeys((".jsonl", ".ndjson", ".json"), "json")
"""The kind of a file that is streamed, by its suffix."""


@dataclass(frozen=True, eq=False)
class Table:
    """The rows of a `datasets.Dataset` by number. A pickle has the paths of its files, no rows."""

    rows: Any
    name: str

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, document: int) -> Record:
        return without_padding(self.rows[document], self.rows.features)

    def where(self, document: int) -> str:
        """Return the number of the row, counted from 0, behind the name of the table."""
        return f"{self.name}: row {document}"

    def fingerprint(self) -> str:
        """Return a short hash of the number of rows and of at least 16 rows."""
        sample = [self[i] for i in range(0, len(self), max(len(self) // 16, 1))]
        content = json.dumps([len(self), sample], default=str, sort_keys=True)
        return hashlib.blake2b(content.encode(), digest_size=8).hexdigest()


def without_padding(row: Record, features: Any) -> Record:
    """Return a row without the nulls in its objects, which a table has for fields of other rows.

    A null within a column of JSON was written by the author, and stays.
    """

    def kept(value: Any, feature: Any) -> Any:
        if isinstance(feature, dict) and isinstance(value, dict):
            return {k: kept(v, feature.get(k)) for k, v in value.items() if v is not None}
        items = feature[0] if isinstance(feature, list) else getattr(feature, "feature", None)
        if items is not None and isinstance(value, list):
            return [kept(item, items) for item in value]
        return value

    return {name: kept(value, (features or {}).get(name)) for name, value in row.items()}


def is_dataset_folder(path: Path) -> bool:
    """Return whether `datasets` must read this folder.

    It must if it saved the folder, if the folder's README describes a dataset, or if there are
    Arrow files, but none that is read without it.
    """
    if not path.is_dir():
        return False
    if _was_saved_by_datasets(path):
        return True
    readme = path / "README.md"
    described = rb"---\s.*?^(configs|dataset_info):"
    flags = re.DOTALL | re.MULTILINE
    if readme.is_file() and re.match(described, readme.read_bytes(), flags):
        return True
    return any(path.rglob("*.arrow")) and not files_below(path)


def _was_saved_by_datasets(folder: Path) -> bool:
    return any((folder / name).exists() for name in ("dataset_info.json", "dataset_dict.json"))


@dataclass(frozen=True)
class DatasetEntry:
    """A dataset in the run file: NAME, NAME:CONFIGURATION or NAME:CONFIGURATION:SPLIT.

    The name is a folder or `owner/name` on the hub. Without a configuration there is one or the
    default one (`NAME::SPLIT`). Without a split it is `train` on the hub, and the only one of a
    folder.
    """

    name: str
    config: str | None
    split: str | None

    @classmethod
    def of(cls, entry: str) -> "DatasetEntry | None":
        """Return the parts of an entry, or None for an entry that `datasets` need not read."""
        parsed = cls._parsed(entry)
        return parsed if parsed.is_on_hub or is_dataset_folder(expanded(parsed.name)) else None

    @classmethod
    def streamed(cls, entry: str, key: str) -> "DatasetEntry":
        """Return the parts of an entry that `datasets` streams; UserError for a file."""
        parsed = cls._parsed(entry)
        if not parsed.is_on_hub and not expanded(parsed.name).is_dir():
            raise UserError(
                f"{key}: {parsed} is no folder here and no owner/name on the hub, which alone "
                "data.streaming reads; give one, or leave data.streaming out: files are read in "
                "place"
            )
        return parsed

    @classmethod
    def _parsed(cls, entry: str) -> "DatasetEntry":
        return cls(*parts_of(entry))

    def files(self, key: str) -> list[Path]:
        """Return the files that it names: of a folder that `datasets` need not read.

        They are those that are read without a stream. UserError, which names `key`, as from
        `files_of_split`.
        """
        path = expanded(self.name)
        if not path.is_dir() or is_dataset_folder(path) or not files_below(path):
            return []
        return files_of_folder(path, key, self.config, self.split)

    @property
    def is_on_hub(self) -> bool:
        """Whether it is the name of a dataset on the hub, and no file or folder."""
        is_name = re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", self.name) is not None
        path = expanded(self.name)
        return is_name and not path.exists() and suffix(path) not in SUFFIXES

    @property
    def origin(self) -> str:
        """The documents that it names, however they are spelt."""
        path = expanded(self.name)
        name = str(path.resolve()) if path.exists() else self.name
        return f"{name}:{self.config or ''}:{self.split or SPLIT}"

    def __str__(self) -> str:
        return self.name


def open_parquet(path: Path, data: Data) -> Table:
    """Open these columns of a Parquet file.

    To read one row of Parquet, its whole row group must be decoded. So `datasets` copies the
    columns once, batch by batch, into an Arrow file in its cache, and rows are read from there.
    UserError for a file that is not Parquet, and for a column that does not exist.
    """
    datasets = load_datasets(str(path))
    import pyarrow.parquet

    with _loading(f"{path}: cannot be read as Parquet", REPAIR):
        metadata = pyarrow.parquet.read_metadata(path)
    columns = _columns(str(path), metadata.schema.to_arrow_schema().names, data)
    if metadata.num_rows == 0:
        raise UserError(f"{path}: a Parquet file without rows; remove it")
    load = datasets.Dataset.from_parquet  # `load_dataset` would ask the hub for each file
    with _loading(f"{path}: cannot be read as Parquet", REPAIR):
        return Table(load(glob.escape(str(path)), columns=columns), str(path))


def open_csv(path: Path, data: Data) -> Table:
    """Open these columns of a CSV or TSV file, whose first line has their names.

    Every cell is text, as it stands in the file. `datasets` copies them once, as those of Parquet.
    """
    datasets = load_datasets(str(path))
    options = _csv_options([path], data, (path.stat().st_mtime_ns, path.stat().st_size))
    with _loading(f"{path}: cannot be read as {suffix(path)[1:].upper()}", REPAIR):
        return Table(datasets.Dataset.from_generator(csv_rows, **options), str(path))


def _csv_options(files: Sequence[Path], data: Data, changed: object = None) -> dict[str, Any]:
    columns = tuple(_columns(str(files[0]), columns_of(files[0]), data))
    arguments = {"files": list(files), "columns": columns, "_changed": changed}
    return {"features": strings(columns), "gen_kwargs": arguments}


def strings(names: Sequence[str]) -> Any:
    """Return the features of a table whose columns of these names hold text."""
    datasets = load_datasets("text")
    return datasets.Features({name: datasets.Value("string") for name in names})


def columns_of(path: Path) -> list[str]:
    """Return the names of the columns of a Parquet, CSV or TSV file, of which only these are read.

    UserError for a file that cannot be read.
    """
    load_datasets(str(path))
    import pyarrow.parquet

    with _loading(f"{path}: cannot be read as {suffix(path)[1:].upper()}", REPAIR):
        if suffix(path) == ".parquet":
            return pyarrow.parquet.read_schema(path).names
        check_text(path)
        with path.open(encoding="utf-8-sig", newline="") as file:
            return next(csv_lines(path, file), [])


def columns_of_dataset(entry: DatasetEntry, key: str) -> list[str]:
    """Return the names of the columns of a split of a dataset; UserError as from `open_dataset`."""
    rows = _split(entry, key, streaming=True)
    return rows.column_names or list(next(read_stream(rows, key), {}))


def open_dataset(entry: DatasetEntry, data: Data, key: str = "data.train") -> Table:
    """Open these columns of a split of a dataset.

    It is a folder that `save_to_disk` wrote, or a folder or hub name for `load_dataset`. UserError,
    which names `key`, where it cannot be loaded, or lacks the split or a field.
    """
    rows = _split(entry, key, streaming=False)
    columns = _columns(entry.name, rows.column_names, data)
    return Table(rows.select_columns(columns), entry.name)


def open_stream(entry: DatasetEntry, data: Data, key: str) -> Any:
    """Open these columns of a split of a dataset as a `datasets.IterableDataset`.

    Nothing of it is read yet. UserError as from `open_dataset`.
    """
    files = entry.files(key)
    rows = _stream_of(files, data, key) if files else _split(entry, key, streaming=True)
    if rows.column_names in (None, [JSON_ROW]):  # known only when it is read
        return rows
    return rows.select_columns(_columns(entry.name, rows.column_names, data))


def read_stream(rows: Any, key: str) -> Generator[Record]:
    """Yield the rows of a stream; UserError where `datasets` cannot read on."""
    import datasets.exceptions

    try:
        yield from records_of(rows)
    except (BadDocument, OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        cause = error.__cause__ or error
        raise UserError(f"{key}: the stream cannot be read ({cause}); {REPAIR}") from None


def records_of(rows: Any) -> Iterator[Record]:
    """Yield the records of a stream."""
    # Not `iter(rows)`, which in a worker process gives only some of the rows.
    for batch in rows.iter(batch_size=1):
        row = {column: values[0] for column, values in batch.items()}
        line = row.get(JSON_ROW)
        yield without_padding(row, rows.features) if line is None else read_object(line)


def version() -> str:
    """Return the version of `datasets`."""
    return str(load_datasets("data.streaming").__version__)


def _stream_of(files: Sequence[Path], data: Data, key: str) -> Any:
    """Return the rows of these files as a stream; UserError for files of other or several kinds."""
    datasets = load_datasets("data.streaming")
    kind = STREAMED.get(suffix(files[0]))
    for file in files:
        if kind is None or STREAMED.get(suffix(file)) != kind:
            raise UserError(
                f"{key}: data.streaming reads folders of JSON, of CSV or of Parquet, and {file} is "
                "of another kind; leave data.streaming out: files are read in place"
            )
    with _loading(f"{key}: datasets cannot load {files[0]}", REPAIR):
        generated = datasets.IterableDataset.from_generator
        if kind == "json":  # the reader of `datasets` would add nulls to objects
            features = strings([JSON_ROW])
            return generated(json_rows, features=features, gen_kwargs={"files": list(files)})
        if kind == "csv":
            return generated(csv_rows, **_csv_options(files, data))
        paths = [glob.escape(str(file)) for file in files]
        return datasets.load_dataset(kind, data_files=paths, split=SPLIT, streaming=True)


def _split(entry: DatasetEntry, key: str, streaming: bool) -> Any:
    """Load the split of a dataset."""
    datasets = load_datasets(entry.name)
    path = expanded(entry.name)
    way_out = (
        "give existing files, folders or glob patterns, or the name or folder of a dataset, as "
        "NAME:CONFIGURATION where it has several"
    )
    is_saved = _was_saved_by_datasets(path)
    with _loading(f"{key}: {entry}: datasets cannot load it", way_out):
        if not is_saved:
            source = str(path.resolve()) if path.exists() else entry.name
            options = _csv_as_text(source, entry.config)
            loaded = datasets.load_dataset(source, entry.config, streaming=streaming, **options)
        elif entry.config is None:
            loaded = datasets.load_from_disk(str(path))
        else:
            raise UserError(
                f"{key}: {entry} was saved to disk without configurations; give "
                f"{entry}::{entry.split or entry.config}"
            )
    if not isinstance(loaded, dict):
        loaded = {SPLIT: loaded}
    split = entry.split
    if split is None:
        split = next(iter(loaded)) if len(loaded) == 1 else SPLIT if entry.is_on_hub else None
    if split is None or split not in loaded:
        problem = "several splits" if split is None else f"no split {split}"
        raise UserError(
            f"{key}: {entry} has {problem}: {', '.join(loaded)}; give one, as in "
            f"{entry}:{entry.config or ''}:{next(iter(loaded))}"
        )
    rows = loaded[split]
    return rows.to_iterable_dataset() if streaming and is_saved else rows


def _csv_as_text(source: str, config: str | None) -> dict[str, Any]:
    """Return the options with which `datasets` reads CSV as text, unless its page names types."""
    with tempfile.TemporaryDirectory() as empty:  # a cache would name the types of an earlier guess
        builder = load_datasets(source).load_dataset_builder(source, config, cache_dir=empty)
    if builder.name != "csv" or builder.info.features is not None:
        return {}
    import fsspec

    file, *_ = next(iter(builder.config.data_files.values()))
    with fsspec.open(file, "rt", encoding="utf-8-sig", newline="") as content:
        names = next(csv.reader(content, delimiter=builder.config.sep), [])
    return {"features": strings(names), "keep_default_na": False, "na_filter": False}


@contextlib.contextmanager
def _loading(problem: str, way_out: str) -> Generator[None]:
    """Load in the body, without a progress bar; UserError with `problem` where that fails.

    Each rank would draw its bar into that of the run.
    """
    import datasets.exceptions

    has_bars = datasets.is_progress_bar_enabled()
    datasets.disable_progress_bar()
    try:
        yield
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        cause = error.__cause__ or error  # an error of datasets itself has no details
        raise UserError(f"{problem} ({cause}); {way_out}") from None
    finally:
        if has_bars:
            datasets.enable_progress_bar()


def _columns(name: str, columns: Sequence[str], data: Data) -> list[str]:
    """Return the columns that are read: the fields of a run, and known ones beside them.

    UserError for a field that is no column.
    """
    fields = fields_of(data, columns)
    for field in fields:
        if field not in columns:
            way_out = (
                "set data.format, and data.text_field or data.fields, to fit them, or name the "
                "files to read"
            )
            if len(columns) == 1 and ";" in columns[0]:
                way_out = "write commas between its cells in place of semicolons"
            way_out = way_to_read(columns, data) or way_out
            raise UserError(f"{name}: no column {field!r}, only {', '.join(columns)}; {way_out}")
    return [*fields, *(field for field in fields_beside(data, columns) if field in columns)]


def load_datasets(name: str) -> Any:
    """Import `datasets`, which is optional and slow to import."""
    try:
        import datasets
    except ImportError:
        need = f"{name}: to read it needs datasets, which is not installed"
        raise UserError(f"{need}; pip install datasets") from None
    # Its readers log an error, in several lines, before they raise it.
    logging.getLogger("datasets.packaged_modules").setLevel(logging.CRITICAL)
    return datasets
