"""The tensors of a checkpoint: `index.json` says which file holds which part of which tensor.

It and the safetensors files are plain data: nothing in a checkpoint is ever unpickled. Where they
do not agree, that is found before anything is read into a model. Needs no torch.
"""

import dataclasses
import functools
import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

INDEX = "index.json"
DTYPES = ("F64", "F32", "BF16", "F16", "I64", "I32", "I16", "I8", "U8", "BOOL")
"""The dtypes that a checkpoint may hold, by their names in a safetensors header."""
LARGEST = 2**40
"""The largest size or offset; no dim has more elements."""


class DamagedError(Exception):
    """A checkpoint is not complete or was altered: one line that names the file."""


class Strict:
    """Base of dataclasses that `parse` reads from JSON with exactly their fields."""

    __pydantic_config__: ClassVar = {"extra": "forbid"}


@dataclass(frozen=True)
class File(Strict):
    """A mark by which a file of a checkpoint is known to be unchanged."""

    num_bytes: int
    sha256: str


@dataclass(frozen=True)
class TensorBox(Strict):
    """A box of a tensor, which one file holds under the tensor's key."""

    file: str
    offsets: list[int]  # where the box begins in the full tensor
    shape: list[int]


@dataclass(frozen=True)
class TensorEntry(Strict):
    """A tensor: disjoint chunks that fill it."""

    dtype: str
    shape: list[int]
    chunks: list[TensorBox]


@dataclass(frozen=True)
class Index(Strict):
    """Every tensor of a checkpoint, by key."""

    tensors: dict[str, TensorEntry]

    def files(self) -> set[str]:
        """Return the names of the files that hold the tensors."""
        return {chunk.file for entry in self.tensors.values() for chunk in entry.chunks}

    def content_of(self, file: str) -> dict[str, tuple[str, list[int]]]:
        """Return the dtype and shape that a file's header must give, by key."""
        return {
            key: (entry.dtype, chunk.shape)
            for key, entry in self.tensors.items()
            for chunk in entry.chunks
            if chunk.file == file
        }


def encode_index(index: Index) -> bytes:
    """Return the content of `index.json`."""
    return json.dumps(dataclasses.asdict(index), separators=(",", ":")).encode()


def read_index(folder: Path) -> Index:
    """Read `index.json`; DamagedError where it is malformed or its chunks do not fill a tensor."""
    path = folder / INDEX
    index: Index = parse(path, read_file(path), Index)
    for key, entry in index.tensors.items():
        if problem := _problem(entry):
            raise DamagedError(f"{path} is altered: {key} {problem}")
    places = [(chunk.file, key) for key, entry in index.tensors.items() for chunk in entry.chunks]
    if len(set(places)) < len(places):
        raise DamagedError(f"{path} is altered: a file holds a tensor twice")
    return index


def check_header(path: Path, content: dict[str, tuple[str, list[int]]]) -> None:
    """Raise DamagedError where the header of a safetensors file differs from this content."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np") as file:
            slices = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118 (no mapping)
            header = {k: (part.get_dtype(), list(part.get_shape())) for k, part in slices.items()}
    except (SafetensorError, OSError) as error:
        reason = " ".join(str(error).split())
        raise DamagedError(f"{path} is no safetensors file ({reason})") from None
    for key in sorted(content.keys() | header.keys()):
        if content.get(key) != header.get(key):
            raise DamagedError(f"{path} is altered: its {key} is not what {INDEX} says")


def read_file(path: Path) -> bytes:
    """Read a small file; DamagedError if it cannot be read."""
    try:
        return regular(path).read_bytes()
    except FileNotFoundError:
        raise DamagedError(f"{path} is missing") from None
    except OSError as error:
        raise DamagedError(f"{path} cannot be read ({error.strerror})") from None


def regular(path: Path) -> Path:
    """Return the path of a file; DamagedError where it is a pipe or a device, without an end."""
    if path.exists() and not path.is_file():
        raise DamagedError(f"{path} is not a file")
    return path


@functools.cache
def _adapter(kind: Any) -> Any:
    import pydantic  # here, so that a command that looks for checkpoints does not wait for it

    return pydantic.TypeAdapter(kind)


def parse(path: Path, content: bytes | str, kind: Any) -> Any:
    """Read JSON from `path` as a dataclass; DamagedError where fields or types differ."""
    import pydantic

    try:
        return _adapter(kind).validate_json(content, strict=True)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        where = "".join(f"{str(part)[:40]}: " for part in first["loc"][:3])
        raise DamagedError(f"{path} is altered: {where}{first['msg'].lower()}") from None


def is_file_name(name: str) -> bool:
    """Return whether a name can be that of a checkpoint's file, in its own folder."""
    return re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}", name) is not None


def _problem(entry: TensorEntry) -> str | None:
    """Return what is wrong with a tensor, if anything.

    Its chunks must be the cells of one grid over it: then they fill it, and none overlap.
    """
    num_dims = len(entry.shape)
    if entry.dtype not in DTYPES:
        return "has an unknown dtype"
    if not all(is_file_name(chunk.file) for chunk in entry.chunks):
        return "lies outside the folder"
    boxes = [sizes for chunk in entry.chunks for sizes in (chunk.offsets, chunk.shape)]
    if any(len(sizes) != num_dims for sizes in boxes):
        return "has chunks with another number of dims"
    if not all(0 <= size <= LARGEST for sizes in (entry.shape, *boxes) for size in sizes):
        return "has impossible sizes"
    if math.prod(entry.shape) == 0:
        return "has chunks, but no elements" if entry.chunks else None
    num_cells = 1
    for dim, size in enumerate(entry.shape):
        ranges = sorted({(c.offsets[dim], c.offsets[dim] + c.shape[dim]) for c in entry.chunks})
        # Each range of the grid begins where the one before it ends.
        begins, ends = [begin for begin, _ in ranges], [end for _, end in ranges]
        if [*begins, size] != [0, *ends] or any(begin == end for begin, end in ranges):
            return "is not filled by its chunks"
        num_cells *= len(ranges)
    cells = {tuple(chunk.offsets) for chunk in entry.chunks}
    if not len(cells) == len(entry.chunks) == num_cells:
        return "is not filled by its chunks"
    return None
